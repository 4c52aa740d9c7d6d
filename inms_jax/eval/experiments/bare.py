"""The memory manager without a model, for experiments on pages alone: a memory, and a turn that reads a context."""

from collections.abc import Sequence

from inms_jax.memory.fingerprint import CacheIdentity
from inms_jax.memory.manager import MemoryManager
from inms_jax.memory.plan import Span
from inms_jax.memory.stats import SequenceHandle


def bare_memory(pages: int, block_size: int, *, pool_mode: str = "elastic") -> MemoryManager:
    """`pages` that can be used, of nothing."""
    identity = CacheIdentity(
        model_id="none", weights_version="0", dtype="none", layout="none", rope="none", block_size=block_size
    )
    return MemoryManager(num_pages=pages + 1, block_size=block_size, identity=identity, pool_mode=pool_mode)


def read_context(memory: MemoryManager, handle: SequenceHandle, context: Sequence[Span]) -> int | None:
    """A turn without an answer, and of the fragments that it misses before; the tokens computed, None without room."""
    computed = 0
    admission = memory.begin_turn(handle, context, max_new_tokens=0)
    encoders = []
    for canonical in admission.missing:
        encoders.append(memory.register(canonical[-1].scope))
        computed += read_context(memory, encoders[-1], canonical) or 0
    if admission.missing:
        admission = memory.begin_turn(handle, context, max_new_tokens=0)
    for encoder in encoders:
        memory.release(encoder)
    if not admission.admitted:
        return None
    while True:
        chunk = memory.prefill(handle, 1 << 20)
        memory.commit_prefill(handle, chunk)
        if chunk.is_last:
            break
    memory.end_turn(handle, keep=True, history_len=sum(len(span.tokens) for span in context))
    return computed + memory.usage(handle).computed_tokens
