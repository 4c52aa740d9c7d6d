"""How an operation finds what it works on: the tenant, all tenants, a live sequence; under locks, whole or not at all.

Each tenant has its lock; who needs pages of others takes those of all. Knows nothing of what operations do.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TypeVar

from inms_jax.errors import ClosedError, InmsError
from inms_jax.memory.commons import Commons, Crowded
from inms_jax.memory.partition import Partition
from inms_jax.memory.quota import Quota
from inms_jax.memory.registry import Registry
from inms_jax.memory.repair import repair
from inms_jax.memory.sequence import Sequence
from inms_jax.memory.stats import SequenceHandle
from inms_jax.memory.tier import Tier
from inms_jax.memory.totals import Totals

T = TypeVar("T")


class Operations:
    """Tenants and sequences of one memory."""

    def __init__(self, commons: Commons, *, block_size: int, provisional_decode: bool) -> None:
        self.block_size = block_size
        self._provisional_decode = provisional_decode
        # Held by who adds or removes a tenant, and by who takes the locks of all, in the order in which they came.
        self._tenants_lock = threading.RLock()
        self._commons = commons
        self._registry = Registry()
        self._parts: dict[str, Partition] = {}
        self._past = Totals()

    @contextmanager
    def _tenant(self, tenant: str, *, new: bool = False) -> Iterator[Partition]:
        """The tenant, for one operation; afterwards its claims are settled, and it is gone if nothing is left."""
        while True:
            part = self._parts.get(tenant)
            if part is None:
                part = self._find_tenant(tenant, new=new)
            part.lock.acquire()
            if not part.gone:
                break
            part.lock.release()
        try:
            yield part
        except (InmsError, Crowded):  # said before anything was changed
            raise
        except BaseException:
            repair(part, part.working)
            raise
        finally:
            part.finish()
            part.settle()
            part.lock.release()
            if part.is_empty:
                self._remove_tenant(part)

    @contextmanager
    def _all(self) -> Iterator[list[Partition]]:
        """Every tenant, for one operation."""
        with self._tenants_lock, ExitStack() as locks:
            parts = list(self._parts.values())
            for part in parts:
                locks.enter_context(part.lock)
            before, self._commons.owner = self._commons.owner, threading.get_ident()
            try:
                yield parts
            except (InmsError, Crowded):
                raise
            except BaseException:
                for part in parts:
                    repair(part, None)
                    part.settle()
                raise
            finally:
                self._commons.owner = before

    @contextmanager
    def _sequence(self, handle: SequenceHandle) -> Iterator[tuple[Partition, Sequence]]:
        """A live sequence and its tenant, for one operation."""
        with self._tenant(self._registry.get(handle).scope.tenant) as part:
            part.working = self._registry.get(handle)
            yield part, part.working

    def _with_room(self, handle: SequenceHandle, operate: Callable[[Partition, Sequence], T]) -> T:
        """An operation that may need pages which other tenants must give up first; then it is begun anew."""
        try:
            with self._sequence(handle) as (part, seq):
                return operate(part, seq)
        except Crowded:
            with self._all(), self._sequence(handle) as (part, seq):
                return operate(part, seq)

    def _find_tenant(self, tenant: str, *, new: bool) -> Partition:
        with self._tenants_lock:
            part = self._parts.get(tenant)
            if part is None:
                if not new:
                    raise ClosedError(f"{tenant!r} is not one of the {len(self._parts)} open tenants.")
                part = self._add_tenant(tenant, {})
            return part

    def _add_tenant(self, tenant: str, quotas: Mapping[Tier, Quota]) -> Partition:
        part = Partition(
            self._commons,
            self._registry,
            tenant,
            self._parts,
            block_size=self.block_size,
            provisional_decode=self._provisional_decode,
        )
        part.set_quotas(quotas, declared=bool(quotas))
        self._parts[tenant] = part  # from now on others see it
        return part

    def _remove_tenant(self, part: Partition) -> None:
        with self._tenants_lock, part.lock:
            if part.is_empty and not part.gone:
                part.gone = True
                self._past.include(part.totals)
                self._commons.stores.remove(part.store)
                del self._parts[part.tenant]
