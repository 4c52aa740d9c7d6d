"""Another engine on the memory manager, with no model: only what docs/memory_manager.md says is used.

The number in a slot is made from the number before it and the token, read from pages, so a wrong page shows in the
answer. `expected` is the same answer worked out without any page.
"""

from dataclasses import dataclass, field

import numpy as np

from inms_jax.memory import CacheIdentity, Copy, DecodeSlot, MemoryManager, PrefillChunk, Scope, SequenceHandle, Span
from inms_jax.memory.fingerprint import HashFunction


def mix(before: int, token: int) -> int:
    return (31 * before + token + 7) % 65521


def expected(context: list[Span], count: int) -> list[int]:
    """The first `count` tokens of the answer."""
    value = 0
    for span in context:
        for token in span.tokens:
            value = mix(value, token)
    answer = [value % 100]
    while len(answer) < count:
        value = mix(value, answer[-1])
        answer.append(value % 100)
    return answer


@dataclass(eq=False)
class Job:
    """One turn of one sequence; ended when `answer` has `count` tokens."""

    handle: SequenceHandle
    context: list[Span]
    count: int
    started: bool = False
    prefilled: bool = False
    answer: list[int] = field(default_factory=list)


class ToyEngine:
    """Serves any number of jobs: one prefill chunk a step, and everyone who decodes."""

    def __init__(self, num_pages: int, block_size: int = 4, hash_function: HashFunction | None = None) -> None:
        identity = CacheIdentity(
            model_id="sums", weights_version="1", dtype="int64", layout="page slot", rope="none", block_size=block_size
        )
        self.memory = MemoryManager(
            num_pages=num_pages, block_size=block_size, identity=identity, hash_function=hash_function
        )
        self.pages = np.zeros((num_pages, block_size), np.int64)
        self.jobs: list[Job] = []
        self.refused = self.waited = 0

    def submit(self, scope: Scope, context: list[Span], count: int) -> Job:
        self.jobs.append(Job(self.memory.register(scope), context, count))
        return self.jobs[-1]

    def run(self) -> None:
        """Until every job has its answer."""
        for _ in range(10_000):
            if not self.jobs:
                return
            self.step()
        raise AssertionError(f"{len(self.jobs)} jobs make no progress")

    def step(self) -> None:
        for job in self.jobs:
            if not job.started:
                job.started = self.memory.begin_turn(job.handle, job.context, max_new_tokens=job.count).admitted
                self.refused += not job.started
        for job in list(self.jobs):
            if job.started and not job.prefilled:
                if self.memory.match(job.handle).status == "ready":
                    self._prefill(job)
                    self.jobs.remove(job)  # everyone in turn
                    self.jobs.append(job)
                    break
                self.waited += 1
        self._decode([job for job in self.jobs if job.prefilled])
        for job in [job for job in self.jobs if len(job.answer) == job.count]:
            self.end(job, keep=True)

    def end(self, job: Job, *, keep: bool) -> None:
        """The job is over: done, or given up at any point."""
        if job.started:
            length = sum(len(span.tokens) for span in job.context) + len(job.answer)
            self.memory.end_turn(job.handle, keep=keep, history_len=length if keep else 0)
        self.memory.release(job.handle)
        self.jobs.remove(job)

    def _prefill(self, job: Job) -> None:
        chunk: PrefillChunk = self.memory.prefill(job.handle, 6)
        self._copy(chunk.copies)
        columns = (chunk.tokens, chunk.positions, chunk.write_page, chunk.write_slot)
        for token, position, page, slot in zip(*(column.tolist() for column in columns), strict=True):
            value = self._compute(job, token, position, page, slot)
        self.memory.commit_prefill(job.handle, chunk)
        if chunk.is_last:
            job.prefilled = True
            job.answer.append(value % 100)

    def _decode(self, jobs: list[Job]) -> None:
        jobs = [job for job in jobs if len(job.answer) < job.count]
        slots: list[DecodeSlot] = [self.memory.decode(job.handle, job.answer[-1]) for job in jobs]
        self._copy([copy for slot in slots for copy in slot.copies])
        values = [
            self._compute(job, slot.token, slot.position, slot.page, slot.slot)
            for job, slot in zip(jobs, slots, strict=True)
        ]
        for job, value in zip(jobs, values, strict=True):
            self.memory.commit_decode(job.handle)
            job.answer.append(value % 100)

    def _copy(self, copies: list[Copy] | tuple[Copy, ...]) -> None:
        sources = self.pages[[copy.source for copy in copies]]
        self.pages[[copy.destination for copy in copies]] = sources

    def _compute(self, job: Job, token: int, position: int, page: int, slot: int) -> int:
        row = self.memory.row(job.handle)
        seen = [self.pages[p, b:e] for p, b, e in zip(row.page, row.begin, row.end, strict=True)]
        value = mix(int(np.concatenate(seen)[position - 1]) if position else 0, token)
        if page:
            self.pages[page, slot] = value
        return value
