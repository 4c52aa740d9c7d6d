"""The step loop: one thread that owns the scheduler, the runner and the memory, and serves every caller.

Other threads hand it requests, tasks and calls; it batches whatever is there. A failed step fails the requests in
it and nothing else.
"""

import atexit
import contextlib
import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from queue import Empty, SimpleQueue
from time import monotonic
from typing import TypeVar

import numpy as np

from inms_jax.config import EngineConfig
from inms_jax.engine.buckets import bucket, copies_bucket
from inms_jax.engine.host_pages import HostPages
from inms_jax.engine.levels import SharedSplits, share, split_entries
from inms_jax.engine.report import Counters, StepReport
from inms_jax.engine.request import Branch, Request, RowSampling, SampledToken, sampling_key
from inms_jax.engine.runner import Runner, StepResult
from inms_jax.engine.scheduler import PrefillWork, Scheduler, Task
from inms_jax.engine.sweep import INTERVAL_S
from inms_jax.errors import AbortedError, ClosedError, EngineError, InmsError
from inms_jax.memory.manager import MemoryManager
from inms_jax.memory.plan import DecodeSlot, Row, plan_decode, plan_prefill
from inms_jax.text.tokenizer import Tokenizer

T = TypeVar("T")
log = logging.getLogger("inms_jax")
MAX_PUBLISHED = 64
"""Published segments of one context."""


class EngineCore:
    """See the module. `observers` are called by the engine thread after each device step."""

    def __init__(
        self,
        runner: Runner,
        memory: MemoryManager,
        tokenizer: Tokenizer,
        config: EngineConfig,
        *,
        max_model_len: int,
        decode_buckets: Sequence[int],
        prefill_buckets: Sequence[int],
        share_reads: bool,
    ) -> None:
        self.runner = runner
        self.memory = memory
        self.tokenizer = tokenizer
        self.scheduler = Scheduler(
            memory,
            max_num_seqs=config.max_num_seqs,
            max_model_len=max_model_len,
            vocab_size=runner.model.vocab_size,
            max_published=MAX_PUBLISHED,
            copy_budget=config.copy_budget,
        )
        self.host = HostPages(memory, runner)
        self.scheduler.restore = self.host.restore
        if config.zero_on_free:
            runner.freed = memory.take_freed
        self.sweep: Callable[[], None] = _nothing
        self._next_sweep = monotonic() + INTERVAL_S
        self.counters = Counters()
        self.observers: list[Callable[[StepReport], None]] = []
        # A published segment may leave a page partly filled, and so may every change of tier; the body of a fragment
        # may cut an own page in two entries and share a block's worth of tokens with its link.
        self._max_entries = -(-max_model_len // config.block_size) + 3 * MAX_PUBLISHED + 2
        self._decode_buckets = tuple(decode_buckets)
        self._prefill_buckets = tuple(prefill_buckets)
        self._share_reads = share_reads
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._posting = threading.RLock()  # after the last command comes none
        self._stopping = False
        atexit.register(_close_at_exit, weakref.ref(self))  # no thread may be inside a program when the process ends
        self._thread = threading.Thread(target=self._loop, name="inms-jax-engine", daemon=True)
        self._thread.start()

    # ---- from any thread ---------------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Queue a request; its listener hears of every token and of the end."""
        self._post(lambda: self.scheduler.add(request))

    def call(self, run: Callable[[], T], *, queue: object = None) -> T:
        """Run `run` on the engine thread between two steps and return its result.

        With a `queue`, after all earlier requests and calls of that queue (an agent's turns) have ended.
        """
        future: Future[T] = Future()

        def task() -> None:
            try:
                future.set_result(run())
            except BaseException as error:
                future.set_exception(error)

        if threading.current_thread() is self._thread:
            task()
        elif queue is None:
            self._post(task)
        else:
            ended = Task(queue, task, lambda: future.set_exception(ClosedError("the engine was closed")))
            self._post(lambda: self.scheduler.add(ended))
        return future.result()

    def abort(self, request_id: str) -> None:
        """End a request now; unknown or finished ones, and a closed engine, are ignored."""
        with contextlib.suppress(ClosedError):
            self._post(lambda: self._abort(lambda request: request.request_id == request_id))

    def leave_word(self, command: Callable[[], None]) -> None:
        """Have `command` run on the engine thread some time, if that still runs. Takes no lock: for finalizers."""
        self._inbox.put(command)

    def end_queue(self, queue: object, error: InmsError) -> None:
        """Fail every request of `queue`. Engine thread only."""
        self._abort(lambda request: request.queue is queue, error)

    def stop(self) -> None:
        """Make the thread end soon; requests that have not ended fail with ClosedError."""
        with self._posting:
            self._stopping = True
            self._inbox.put(_nothing)

    def close(self) -> None:
        """`stop`, and wait for it."""
        self.stop()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    @property
    def closed(self) -> bool:
        return self._stopping

    def _post(self, command: Callable[[], None]) -> None:
        with self._posting:
            if self._stopping:
                raise ClosedError("the engine was closed: create a new LLM")
            self._inbox.put(command)

    # ---- engine thread -----------------------------------------------------------------------------------------

    def _loop(self) -> None:
        error: InmsError = ClosedError("the engine was closed")
        try:
            while not self._stopping:
                if self.scheduler.idle:
                    self.runner.wipe()
                    with contextlib.suppress(Empty):
                        self._inbox.get(timeout=INTERVAL_S)()
                self._drain()
                if monotonic() >= self._next_sweep:
                    self._next_sweep = monotonic() + INTERVAL_S
                    self.sweep()
                if not self._stopping:
                    self._step()
        except BaseException as cause:  # a bug of ours: nobody may wait for ever because of it
            log.exception("the engine thread failed")
            error = EngineError(f"the engine stopped on an internal error: {cause!r}; create a new LLM")
        with self._posting:
            self._stopping = True
        self._drain()
        self._abort(lambda _: True, error)
        self.scheduler.cancel_tasks()
        self.runner.release()

    def _drain(self) -> None:
        for _ in range(self._inbox.qsize()):
            self._inbox.get()()

    def _step(self) -> None:
        for request, error in self.scheduler.admit():
            self._end(request, error)
        try:
            work = self.scheduler.next_prefill(self._prefill_buckets)
        except Exception as failure:
            self._failed(list(self.scheduler.prefilling), failure)
            work = None
        if work is not None:
            self._guard([work.request], lambda: self._prefill(work))
        rows = self.scheduler.decode_rows()
        for start in range(0, len(rows), self._decode_buckets[-1]):
            batch = rows[start : start + self._decode_buckets[-1]]
            self._guard([request for request, _ in batch], lambda batch=batch: self._decode(batch))  # type: ignore[misc]

    def _guard(self, requests: list[Request], run: Callable[[], None]) -> None:
        """Run a step; if it fails, fail its requests and, if the device took the pages with it, forget all KV."""
        try:
            run()
        except Exception as error:
            self._failed(requests, error)

    def _failed(self, requests: list[Request], error: Exception) -> None:
        lost = self.runner.lost_pages(error)
        for request in dict.fromkeys([*requests, *(self.scheduler.running if lost else ())]):
            if not request.done:
                self._end(request, error)
        if lost:  # every context can be computed again from its tokens
            self.scheduler.forget_fragments()
            self.memory.clear()
            self.runner.reset_pages()

    def _prefill(self, work: PrefillWork) -> None:
        request, chunk = work.request, work.chunk
        count = len(chunk.tokens)
        plan = plan_prefill(
            chunk,
            self.memory.row(work.handle),
            num_tokens=bucket(count, self._prefill_buckets),
            num_entries=self._max_entries,
            num_copies=copies_bucket(len(chunk.copies)),
        )
        scored = request.scored_rows(chunk.positions) if work.handle == request.handle else []
        result = self.runner.prefill(plan, count - 1, scored)
        self.memory.commit_prefill(work.handle, chunk)
        self.counters.prefill_steps += 1
        self.counters.prefill_tokens += count
        request.progress = monotonic()
        self._report("prefill", count)
        if chunk.is_last and work.handle != request.handle:
            self.counters.encoded_fragments += 1
            self.scheduler.fragment_encoded(work)
            return
        if scored:
            request.add_scores(np.asarray(result.logits), np.asarray(result.greedy.lse), len(scored))
        if chunk.is_last:
            request.note_usage(self.memory.usage(work.handle))
            if request.scored:
                request.first_token = monotonic()
                self._end(request, None)
            else:
                self._first_tokens(request, result)

    def _first_tokens(self, request: Request, result: StepResult) -> None:
        """The prompt is in pages: fork it for each sample and draw the first tokens from its last logits."""
        assert request.handle is not None
        assert request.scope is not None
        for index in range(request.params.n):
            handle = request.handle
            if index > 0:
                handle = self.memory.fork(request.handle, request.scope, reserve_from_parent=True)
            key = sampling_key(*request.key_parts, index)
            request.branches.append(
                Branch(index, handle, request.params, self.tokenizer, key, request.limit, request.prompt_token_ids)
            )
        self.scheduler.prefilled(request)
        for start in range(0, len(request.branches), 2):  # the step returned the same logits twice
            pair = request.branches[start : start + 2]
            for branch, sampled in zip(pair, self.runner.choose(result, [b.row_sampling() for b in pair]), strict=True):
                self._add(request, branch, sampled)
        request.first_token = monotonic()
        self._after_tokens(request)

    def _decode(self, batch: list[tuple[Request, Branch]]) -> None:
        slots = [self.memory.decode(branch.handle, branch.token_ids[-1]) for _, branch in batch]
        self.scheduler.note_copies(sum(len(slot.copies) for slot in slots))
        rows = [self.memory.row(branch.handle) for _, branch in batch]
        # Rows that read pages at other positions run by themselves: which program a row takes, and with it its bits,
        # follows from the row alone.
        moved = [row.shift is not None for row in rows]
        for shifted in sorted(set(moved)):
            some = [i for i, is_moved in enumerate(moved) if is_moved == shifted]
            self._decode_rows([batch[i] for i in some], [slots[i] for i in some], [rows[i] for i in some], shifted)
        for request in dict.fromkeys(request for request, _ in batch):
            self._after_tokens(request)

    def _decode_rows(
        self, batch: list[tuple[Request, Branch]], slots: list[DecodeSlot], rows: list[Row], shifted: bool
    ) -> None:
        size = bucket(len(batch), self._decode_buckets)
        splits, own = (None, rows) if shifted else self._share(rows, size)
        plan = plan_decode(
            slots,
            own,
            num_rows=size,
            num_entries=self._max_entries,
            num_copies=copies_bucket(sum(len(slot.copies) for slot in slots)),
        )
        result = self.runner.decode(plan, splits)
        self.counters.pages_needed += sum(len(row) for row in rows)
        self.counters.pages_read += (splits.pages_read if splits else 0) + sum(len(row) for row in own)
        for _, branch in batch:
            self.memory.commit_decode(branch.handle)
        self.counters.decode_steps += 1
        self.counters.decode_tokens += len(batch)
        self._report("decode", len(batch))
        chosen = self.runner.choose(result, [branch.row_sampling() for _, branch in batch])
        for (request, branch), sampled in zip(batch, chosen, strict=True):
            self._add(request, branch, sampled)

    def _add(self, request: Request, branch: Branch, sampled: SampledToken) -> None:
        branch.add(sampled)
        if branch.finished and branch.index > 0:
            self.memory.release(branch.handle)

    def _after_tokens(self, request: Request) -> None:
        if not request.unfinished:
            self._end(request, None)
        else:
            request.progress = monotonic()
            self._tell(request)

    def _abort(self, which: Callable[[Request], bool], error: InmsError | None = None) -> None:
        for request in self.scheduler.requests():
            if which(request):
                self._end(request, error or AbortedError(f"request {request.request_id!r} was aborted"))

    def _end(self, request: Request, error: BaseException | None) -> None:
        """The request is over: give back what it held, tell its owner, then its listener."""
        self.scheduler.remove(request)
        request.error = error
        self.counters.requests += 1
        self.counters.failed_requests += error is not None
        self.counters.prompt_tokens += len(request.prompt_token_ids) if request.first_token is not None else 0
        self.counters.cached_tokens += request.num_cached_tokens
        self.counters.fragment_tokens += request.num_fragment_tokens
        if request.first_token is not None and request.start is not None:
            self.counters.segments.update(decision.reason.value for decision in request.start.decisions)
        try:  # whatever fails here, the caller gets its answer
            for branch in request.unfinished:
                if branch.index > 0:
                    self.memory.release(branch.handle)
            request.owner.end_turn(request)
        except Exception as failure:
            request.error = request.error or failure
        request.done = True
        self._tell(request)

    def _tell(self, request: Request) -> None:
        """A listener that fails is its caller's loss, not the engine's."""
        try:
            request.listener(request)
        except Exception:
            log.exception("the listener of request %r failed", request.request_id)

    def warmup(self) -> None:
        """Run every program once, on nothing: no page is read or written. Engine thread, or before it has work."""
        for copies in (1, 2, 4, 8):
            size, most = self._decode_buckets[0], self._max_entries
            empty = plan_decode([], [], num_rows=size, num_entries=most, num_copies=copies_bucket(copies))
            self.runner.decode(empty, self._share([], size)[0])
        for size in self._prefill_buckets:
            empty = plan_decode([], [], num_rows=1, num_entries=self._max_entries, num_copies=0)
            columns = {name: np.zeros(size, np.int32) for name in ("tokens", "positions", "write_page", "write_slot")}
            result = self.runner.prefill(replace(empty, **columns), 0)
            self.runner.choose(result, [_ANY_SAMPLING])
        for size in self._decode_buckets:
            empty = plan_decode([], [], num_rows=size, num_entries=self._max_entries, num_copies=0)
            splits, _ = self._share([], size)
            self.runner.choose(self.runner.decode(empty, splits), [_ANY_SAMPLING])

    def _share(self, rows: Sequence[Row], size: int) -> tuple[SharedSplits, list[Row]]:
        split = split_entries(self.memory.block_size)
        most = -(-self._max_entries // split)
        if not self._share_reads:
            return share([], num_rows=size, split=split, max_groups=most)[0], list(rows)
        return share(rows, num_rows=size, split=split, max_groups=most)

    def counters_now(self) -> Counters:
        """A copy that does not change."""
        return replace(self.counters, segments=self.counters.segments.copy(), **self.scheduler.copy_counts)

    def _report(self, kind: str, tokens: int) -> None:
        if self.observers:
            report = StepReport(kind, tokens, self.memory.stats().held)
            for observer in self.observers:
                observer(report)


_ANY_SAMPLING = RowSampling(
    key=(0, 0),
    token_index=0,
    temperature=1.0,
    top_k=0,
    top_p=1.0,
    min_p=0.0,
    repetition_penalty=1.0,
    seen=frozenset(),
    banned=(),
)


def _nothing() -> None:
    """A command that only wakes the thread."""


def _close_at_exit(core: "weakref.ref[EngineCore]") -> None:
    alive = core()
    if alive is not None:
        alive.close()
