"""Who runs next: admission in arrival order, one prefill chunk a step, and everyone who decodes.

Order of service never depends on what is cached. Knows nothing of devices, tokens' meaning or sampling.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from inms_jax.engine.request import Branch, Request, flatten
from inms_jax.errors import CapacityError, InvalidRequestError
from inms_jax.memory.manager import MemoryManager, PrefillChunk, SequenceHandle
from inms_jax.memory.plan import Span
from inms_jax.memory.stats import Admission, Shortage


@dataclass(frozen=True, slots=True)
class PrefillWork:
    """One chunk of one request's prompt, or of a fragment that the request waits for: `handle` says which."""

    request: Request
    handle: SequenceHandle
    chunk: PrefillChunk


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """Something to run in its turn of a queue: after the requests before it, before those behind it."""

    queue: object
    run: Callable[[], None]
    cancel: Callable[[], None]


class Scheduler:
    """Waiting and running requests. Changed only by the engine thread."""

    def __init__(
        self,
        memory: MemoryManager,
        *,
        max_num_seqs: int,
        max_model_len: int,
        max_published: int,
        vocab_size: int,
        copy_budget: int,
    ) -> None:
        self.memory = memory
        self.max_num_seqs = max_num_seqs
        self.max_model_len = max_model_len
        self.max_published = max_published
        self.vocab_size = vocab_size
        self.copy_budget = copy_budget
        self.copy_waits = 0
        """Steps that a row waited for its copy, since others had used up the budget."""
        self.copied = 0
        """Pages that the step that is being planned copies so far."""
        self.peak_copies = 0
        """Most pages that one step copied."""
        # A prompt had the whole budget, so that nobody who decodes got a copy: their turn is next.
        self._decode_first = False
        self.waiting: deque[Request | Task] = deque()
        # Fragments that nobody has computed yet: one sequence each, for the request at the head of the queue.
        self.encoding: list[tuple[Request, SequenceHandle]] = []
        self.prefilling: list[Request] = []
        self.decoding: list[Request] = []
        self.restore: Callable[[SequenceHandle], None] = lambda handle: None
        """Brings back what a sequence has in host memory."""

    @property
    def idle(self) -> bool:
        return not (self.waiting or self.prefilling or self.decoding)

    @property
    def running(self) -> list[Request]:
        return [*self.prefilling, *self.decoding]

    def requests(self) -> list[Request]:
        """Waiting and running requests."""
        return [*(r for r in self.waiting if isinstance(r, Request)), *self.running]

    def add(self, work: Request | Task) -> None:
        self.waiting.append(work)

    def cancel_tasks(self) -> None:
        """Tell every waiting task that it will not run."""
        for work in self.waiting:
            if isinstance(work, Task):
                work.cancel()
        self.waiting.clear()

    def admit(self) -> list[tuple[Request, Exception]]:
        """Start waiting requests, first come first served, while pages and rows allow.

        Returns those that failed, with the reason. A request that cannot be served *yet* blocks those behind it
        (else large requests would starve), except that requests of one queue also wait for each other. One that is
        kept waiting by a limit of its own tenant blocks that tenant only.
        """
        failed: list[tuple[Request, Exception]] = []
        limited: set[str] = set()
        busy = {id(request.queue) for request in self.running if request.queue is not None}
        blocked = False
        for work in list(self.waiting):
            if id(work.queue) in busy:
                continue
            if isinstance(work, Task):
                self.waiting.remove(work)
                work.run()
                continue
            if not blocked:
                try:
                    started = self._start(work, limited)
                except Exception as error:
                    failed.append((work, error))
                    self.waiting.remove(work)
                    continue
                if started:
                    self.waiting.remove(work)
                else:
                    blocked = work.start is None or work.start.scope.tenant not in limited
            if work.queue is not None:
                busy.add(id(work.queue))
        return failed

    def _start(self, request: Request, limited: set[str]) -> bool:
        """Reserve all pages the request can need. False: not now; `limited`: tenants that are at a limit of theirs."""
        rows = sum(running.params.n for running in self.running)
        if rows and rows + request.params.n > self.max_num_seqs:
            return False
        if request.start is None:
            request.start = request.owner.start_turn()
            self.check_context(request.start.context)
        start = request.start
        if start.scope.tenant in limited:
            return False
        if any(waiting is request for waiting, _ in self.encoding):
            return False
        prompt = flatten(start.context)
        room = self.max_model_len - len(prompt)
        limit = room if request.params.max_tokens is None else min(request.params.max_tokens, room)
        admission = self.memory.begin_turn(
            start.handle, start.context, max_new_tokens=limit, new_scope=start.scope, branches=request.params.n
        )
        if admission.missing and not request.encoded:
            admission = self._encode(request, admission.missing)
            if admission.admitted:
                return False
        if not admission.admitted:
            own = admission.short in (Shortage.POOL, Shortage.ACCOUNT)
            others = [r for r in self.running if r.start is not None and r.start.scope.tenant == start.scope.tenant]
            if not (others if own else self.running):
                whose, what = ("of its tenant ", "the limit") if own else ("", "`kv_cache_memory`")
                raise CapacityError(
                    f"Cannot start request {request.request_id!r} of {len(prompt)} + {limit} tokens: "
                    f"{admission.reason}, and nothing {whose}is running that could give pages back. "
                    f"Lower max_tokens or raise {what}."
                )
            if own:
                limited.add(start.scope.tenant)
            return False
        self._release_fragments(request)
        request.handle, request.scope = start.handle, start.scope
        request.prompt_token_ids, request.limit = prompt, limit
        seed = request.params.seed
        request.key_parts = ("seed", seed) if seed is not None else start.key_parts
        self.prefilling.append(request)
        return True

    def _encode(self, request: Request, missing: Sequence[Sequence[Span]]) -> Admission:
        """Start computing fragments, each directly after its root, in sequences that hold them for the request."""
        for context in missing:
            handle = self.memory.register(context[-1].scope)
            request.encoded.append(handle)
            admission = self.memory.begin_turn(handle, context, max_new_tokens=0)
            if not admission.admitted:
                self._release_fragments(request)
                return admission
            self.encoding.append((request, handle))
        return admission

    def fragment_encoded(self, work: PrefillWork) -> None:
        """A fragment is in pages; its sequence holds it until the request takes it over."""
        self.encoding.remove((work.request, work.handle))
        self.memory.end_turn(work.handle, keep=True, history_len=work.chunk.start + len(work.chunk.tokens))

    def _release_fragments(self, request: Request) -> None:
        self.encoding = [entry for entry in self.encoding if entry[0] is not request]
        for handle in request.encoded:
            self.memory.release(handle)
        request.encoded.clear()

    def forget_fragments(self) -> None:
        """The pages were lost: fragments that were being computed, or waited to be read, are begun again."""
        for request in self.requests():
            self._release_fragments(request)

    def check_context(self, context: Sequence[Span]) -> None:
        """InvalidRequestError for a context that can never be served. Any thread."""
        self.check_prompt(flatten(context))
        published = sum(span.published for span in context)
        if published > self.max_published:
            raise InvalidRequestError(
                f"the context has {published} published segments, at most {self.max_published} are supported: join some"
            )

    def check_prompt(self, prompt: tuple[int, ...]) -> None:
        """InvalidRequestError for a prompt that can never be served. Any thread."""
        if not prompt:
            raise InvalidRequestError("the prompt is empty: it must hold at least one token")
        for token in (min(prompt), max(prompt)):
            if not 0 <= token < self.vocab_size:
                raise InvalidRequestError(f"token id {token} is out of range: the vocabulary has {self.vocab_size} ids")
        if len(prompt) >= self.max_model_len:
            raise InvalidRequestError(
                f"the prompt has {len(prompt)} tokens and max_model_len is {self.max_model_len}: it must leave room "
                f"for at least one new token. Shorten it or raise max_model_len."
            )

    def next_prefill(self, buckets: Sequence[int]) -> PrefillWork | None:
        """A chunk of the first prompt that can go on; prompts whose next block another one is computing wait.

        A step begins here. None too when the prompt of the step before left no copy for those who decode.
        """
        self.copied = 0
        if self._decode_first:
            self._decode_first = False
            return None
        prompts = [(request, request.handle) for request in self.prefilling]
        for request, handle in [*self.encoding, *prompts]:
            assert handle is not None
            self.restore(handle)
            match = self.memory.match(handle)
            if match.status == "ready":
                chunk = self.memory.prefill(handle, chunk_size(match.remaining, buckets))
                self.note_copies(len(chunk.copies))
                return PrefillWork(request, handle, chunk)
        return None

    def prefilled(self, request: Request) -> None:
        """The whole prompt of `request` is in pages: it decodes from now on."""
        self.prefilling.remove(request)
        self.decoding.append(request)

    @property
    def copy_counts(self) -> dict[str, int]:
        """For the counters."""
        return {"copy_waits": self.copy_waits, "peak_copies": self.peak_copies}

    def note_copies(self, pages: int) -> None:
        """So many copies were planned for this step."""
        self.copied += pages
        self.peak_copies = max(self.peak_copies, self.copied)

    def decode_rows(self) -> list[tuple[Request, Branch]]:
        """The unfinished branches of decoding requests, in admission order.

        A branch that must copy a page first waits a step once the budget is used up, by those before it and by the
        prompt of this step.
        """
        rows, wanted = [], self.copied
        for request in self.decoding:
            for branch in request.unfinished:
                copies = self.memory.must_copy(branch.handle)
                if copies and wanted >= self.copy_budget:
                    self.copy_waits += 1
                    self._decode_first |= wanted == self.copied
                    continue
                wanted += copies
                rows.append((request, branch))
        return rows

    def remove(self, request: Request) -> None:
        """Forget `request`, wherever it is, and the fragments it waits for."""
        self._release_fragments(request)
        if request in self.waiting:
            self.waiting.remove(request)
        elif request in self.prefilling:
            self.prefilling.remove(request)
        elif request in self.decoding:
            self.decoding.remove(request)


def chunk_size(remaining: int, buckets: Sequence[int]) -> int:
    """Tokens of the next chunk: all that remain if they fill most of a bucket, else one that is filled."""
    for below, size in zip((0, *buckets), buckets, strict=False):
        if remaining <= size:
            return size if not below or 4 * remaining > 3 * size else below
    return buckets[-1]
