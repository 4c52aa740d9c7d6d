"""`llm.save` and `llm.restore`: tenants, groups and what they published, with the pages of it, over a restart.

Their quotas go with them, and what they pinned is pinned again.

Agents, conversations and everything PRIVATE end with their engine. Groups that were closed are not saved.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from inms_jax.config import SamplingParams
from inms_jax.engine import snapshot_folder
from inms_jax.engine.pending import Pending
from inms_jax.engine.request import Request
from inms_jax.engine.services import Services
from inms_jax.engine.snapshot import FORMAT, RestoredPages, SpotCheck, check_same, put_pages, take_pages
from inms_jax.errors import ConfigError
from inms_jax.memory.fingerprint import CacheIdentity
from inms_jax.memory.quota import Quota
from inms_jax.memory.shared_blocks import SharedBlock
from inms_jax.memory.tier import Scope
from inms_jax.tenants import Group, Tenant


@dataclass(frozen=True, slots=True)
class Restored:
    """The tenants of a snapshot, live again, with their groups; and their pages, cached until somebody reads them."""

    tenants: Mapping[str, Tenant]
    pages: RestoredPages


def save(
    services: Services,
    identity: CacheIdentity,
    tenants: Mapping[str, Tenant],
    folder: Path,
    *,
    deterministic: bool,
) -> None:
    """See `LLM.save`."""
    with services.lock:
        homes = _homes(tenants)
        shelves = [_shelf(home) for home in homes]
    places = {home.scope: number for number, home in enumerate(homes)}
    blocks, arrays = services.core.call(lambda: take_pages(services.memory, services.core.runner, places))
    manifest = {
        "format": FORMAT,
        "identity": asdict(identity),
        "deterministic": deterministic,
        "homes": [
            {"name": home.name, "tenant": None if home.outer is None else places[home.outer.scope], **shelf}
            for home, shelf in zip(homes, shelves, strict=True)
        ],
        "blocks": [
            {"home": places[block.scope], "parent": block.parent, "tokens": list(block.tokens)} for block in blocks
        ],
    }
    snapshot_folder.write(folder, manifest, arrays if blocks else {})


def restore(
    services: Services,
    identity: CacheIdentity,
    tenant: Callable[..., Tenant],
    folder: Path,
    *,
    deterministic: bool,
) -> Restored:
    """See `LLM.restore`."""
    manifest, arrays = snapshot_folder.read(folder)
    check_same(manifest, identity, deterministic=deterministic)
    first = [number for number, block in enumerate(manifest["blocks"]) if block["parent"] is None]
    if first and deterministic:
        _check_bits(services, manifest["blocks"][first[0]]["tokens"], arrays["k"][first[0]], arrays["v"][first[0]])
    with ExitStack() as undo:
        homes: list[Tenant | Group] = []
        for saved in manifest["homes"]:
            outer = None if saved["tenant"] is None else homes[saved["tenant"]]
            home = _tenant(tenant, saved) if outer is None else _group(outer, saved)
            if isinstance(home, Tenant):
                undo.callback(home.close)
            for text in saved["published"]:
                home.publish(**text)
            if saved["root"]:
                home.root(saved["root"])
            homes.append(home)
        blocks = [
            SharedBlock(0, homes[block["home"]].scope, tuple(block["tokens"]), block["parent"])
            for block in manifest["blocks"]
        ]
        pages = services.core.call(lambda: put_pages(services.memory, services.core.runner, blocks, arrays))
        for home, saved in zip(homes, manifest["homes"], strict=True):
            for names in saved["pinned"]:
                home.preload(names, pin=True)
        undo.pop_all()
    return Restored({home.name: home for home in homes if isinstance(home, Tenant)}, pages)


def _homes(tenants: Mapping[str, Tenant]) -> list[Tenant | Group]:
    """Tenants that are open, each before its open groups."""
    found: list[Tenant | Group] = []
    for tenant in tenants.values():
        if not tenant.closed:
            found += [tenant, *(group for group in tenant.groups.values() if not group.closed)]
    return found


def _shelf(home: Tenant | Group) -> dict[str, Any]:
    """What was published, as arguments of `publish`: every version, so that numbers go on where they were. And what
    the home may have.
    """
    published = [
        {"name": text.name, "text": text.text, "role": text.role, "mode": str(text.mode), "readers": text.readers}
        | ({"on_update": str(text.on_update)} if isinstance(home, Group) else {})
        for text in home.shelf.everything()
    ]
    found = {"published": published, "root": list(home.shelf.root), "pinned": [list(names) for names in home.pinned]}
    if isinstance(home, Group):
        return {**found, "kv_limit": home.kv_limit}
    return {**found, "pools": {tier.name: [quota.reserve, quota.limit] for tier, quota in home.quotas.items()}}


def _tenant(tenant: Callable[..., Tenant], saved: dict[str, Any]) -> Tenant:
    pools = {f"{tier.lower()}_pool": Quota(reserve, limit) for tier, (reserve, limit) in saved["pools"].items()}
    return tenant(saved["name"], **pools)


def _group(tenant: Tenant | Group, saved: dict[str, Any]) -> Group:
    if not isinstance(tenant, Tenant):
        raise ConfigError(f"the snapshot has a group {saved['name']!r} inside a group")
    return tenant.group(saved["name"], kv_limit=saved["kv_limit"])


def _check_bits(services: Services, tokens: list[int], k: Any, v: Any) -> None:
    owner = SpotCheck(
        services.memory,
        services.core.runner,
        tuple(tokens[: services.core.scheduler.max_model_len - 1]),
        Scope(services.unique_id("spot check"), None, "spot check"),
    )
    pending = Pending(services.request_id(), services.core.abort, services)
    one = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    services.core.submit(Request(pending.request_id, owner, one, pending))
    pending.result()
    owner.compare(k, v)
