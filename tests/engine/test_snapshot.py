"""A snapshot brings published texts and their pages back, bit by bit; it fits only an engine that computes the same."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from inms_jax import LLM, RequestOutput, SamplingParams, Segment, Tier
from inms_jax.engine import snapshot_folder
from inms_jax.errors import CapacityError, ConfigError, SnapshotError
from inms_jax.memory.quota import Quota
from tests.tiny import tiny_llm, tiny_model

PARAMS = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, logprobs=0)
SYSTEM = "You are an agent of a web shop. Be brief and polite."
PLAN = "The plan of the team is to ship on Monday, whatever the weather is."
SECRET = "The colour of the vault is ultraviolet."


def work(llm: LLM) -> list[RequestOutput]:
    """Two teams of one tenant and another tenant; what two agents of a team answer."""
    shop, bank = llm.tenant("shop"), llm.tenant("bank")
    shop.publish("system", SYSTEM)
    bank.publish("system", SYSTEM + " Of a bank.", role="user")
    for name in ("team", "night"):
        shop.group(name).publish("plan", f"{PLAN} {name}")
    bank.agent("clerk", ["system"]).chat("hello", PARAMS)
    shop.groups["night"].agent("owl", ["system", "plan"]).chat("hello", PARAMS)
    return answers(llm)


def answers(llm: LLM) -> list[RequestOutput]:
    team = llm._tenants["shop"].groups["team"]
    own = Segment(SECRET)
    agents = [team.agent(name, ["system", "plan", own]) for name in ("ann", "bob")]
    return [agent.chat(f"hello, this is {agent.name}", PARAMS) for agent in agents]


def same(a: list[RequestOutput], b: list[RequestOutput]) -> None:
    for one, other in zip(a, b, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        assert one.outputs[0].logprobs == other.outputs[0].logprobs
        assert one.prompt_token_ids == other.prompt_token_ids


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[RequestOutput], int]:
    folder = tmp_path_factory.mktemp("snapshots") / "kv"
    with tiny_llm() as llm:
        first = work(llm)
        shared = sum(info.tier is not Tier.PRIVATE for info in llm.memory_map())
        llm.save(folder)
    return folder, first, shared


def test_the_first_turn_after_a_restore_finds_the_pages_and_gives_the_same_bits(
    saved: tuple[Path, list[RequestOutput], int],
) -> None:
    folder, first, shared = saved
    with tiny_llm() as llm:
        restored = llm.restore(folder)
        assert (restored.pages.restored, restored.pages.left_out) == (shared, 0)
        memory = llm.stats().memory
        assert (memory.cached, memory.held) == (shared, 0)
        llm.verify()
        assert set(restored.tenants) == {"shop", "bank"}
        assert set(restored.tenants["shop"].groups) == {"team", "night"}
        again = answers(llm)
        same(first, again)
        assert first[0].num_cached_tokens < first[1].num_cached_tokens == again[0].num_cached_tokens
        clerk = restored.tenants["bank"].agent("clerk", ["system"])
        assert clerk.chat("hello", PARAMS).num_cached_tokens > 40
        assert restored.tenants["bank"].shelf.visible()["system"].role == "user"
        llm.verify()


def test_bits_after_a_restore_are_those_without_one(saved: tuple[Path, list[RequestOutput], int]) -> None:
    """Against an engine that neither saved nor shares anything."""
    with tiny_llm(enable_prefix_caching=False) as llm:
        same(work(llm), saved[1])


def test_isolation_holds_among_restored_tenants(saved: tuple[Path, list[RequestOutput], int]) -> None:
    with tiny_llm() as llm:
        restored = llm.restore(saved[0])
        shop, bank = restored.tenants["shop"], restored.tenants["bank"]
        same_text = [Segment(SYSTEM), Segment(f"{PLAN} team")]
        for home in (shop, shop.groups["night"], bank, llm.tenant("new")):
            spy = home.agent("spy", same_text)
            assert spy.chat("hello", PARAMS).num_cached_tokens == 0
        assert shop.groups["night"].agent("ann", ["system", "plan"]).chat("hi", PARAMS).num_cached_tokens > 100
        assert llm.verify_isolation().same_group > 0


def test_nothing_private_is_in_the_files(saved: tuple[Path, list[RequestOutput], int]) -> None:
    folder, first, shared = saved
    manifest, arrays = snapshot_folder.read(folder)
    assert len(manifest["blocks"]) == len(arrays["k"]) == len(arrays["v"]) == shared
    raw = b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())
    assert SYSTEM.encode() in raw, "texts can be found like this"
    everything = json.dumps(manifest)
    for private in (SECRET, "hello", "ann", "bob", "clerk", "owl"):
        assert private.encode() not in raw
        assert f'"{private}"' not in everything
    tokens = [block["tokens"] for block in manifest["blocks"]]
    for text in (SECRET, "hello, this is"):
        ids = list(text.encode())  # one token a byte
        assert not any(ids[:5] == block[i : i + 5] for block in tokens for i in range(len(block)))
    for out in first:
        ids = list(out.outputs[0].token_ids)
        assert not any(ids == block[i : i + len(ids)] for block in tokens for i in range(len(block)))


def test_pages_of_private_text_are_not_among_the_saved_ones(saved: tuple[Path, list[RequestOutput], int]) -> None:
    with tiny_llm() as llm:
        work(llm)
        private = [info.page for info in llm.memory_map() if info.tier is Tier.PRIVATE]
        k, v = llm._core.call(lambda: llm._core.runner.read_pages(private))
    _, arrays = snapshot_folder.read(saved[0])
    kept = {page.tobytes() for page in (*arrays["k"], *arrays["v"])}
    assert len(private) > 4
    assert not any(page.tobytes() in kept for page in (*k, *v))


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"model_id": "other"}, ["model_id: 'tiny' there, 'other' here"]),
        ({"weights_version": "random-8"}, ["weights_version: 'random-7' there, 'random-8' here"]),
        (
            {"model_id": "other", "weights_version": "random-8", "block_size": 32, "kv_cache_dtype": "bfloat16"},
            ["model_id", "weights_version", "block_size: 16 there, 32 here", "dtype: 'float32/float32' there"],
        ),
    ],
)
def test_a_snapshot_of_another_engine_is_refused_with_every_difference(
    saved: tuple[Path, list[RequestOutput], int],
    changed: dict[str, Any],
    named: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = {"model_id", "weights_version"}
    model = dataclasses.replace(tiny_model(), **{k: v for k, v in changed.items() if k in names})
    monkeypatch.setattr("tests.tiny.tiny_model", lambda: model)
    with tiny_llm(**{k: v for k, v in changed.items() if k not in names}) as llm:
        with pytest.raises(SnapshotError) as refused:
            llm.restore(saved[0])
        assert llm.stats().tenants == {}
        assert llm.stats().memory.free == llm.stats().memory.total - 1
    for text in named:
        assert text in str(refused.value)
    assert str(refused.value).count(" there, ") == len(named)


@pytest.mark.parametrize("field", ["layout", "rope", "format"])
def test_the_other_fields_are_compared_too(
    saved: tuple[Path, list[RequestOutput], int], field: str, tmp_path: Path
) -> None:
    manifest, arrays = snapshot_folder.read(saved[0])
    (manifest if field == "format" else manifest["identity"])[field] = "other"
    snapshot_folder.write(tmp_path / "kv", manifest, arrays)
    with tiny_llm() as llm, pytest.raises(SnapshotError, match=rf"{field}.*'other'"):
        llm.restore(tmp_path / "kv")


def test_bits_that_this_machine_would_not_compute_are_refused_in_deterministic_mode(
    saved: tuple[Path, list[RequestOutput], int], tmp_path: Path
) -> None:
    manifest, arrays = snapshot_folder.read(saved[0])
    arrays["v"][0, 1, 0, 3, 2] ^= 1  # the last bit of one number
    snapshot_folder.write(tmp_path / "kv", manifest, arrays)
    with tiny_llm() as llm:
        with pytest.raises(SnapshotError, match=r"1 of \d+ numbers of v in the first block are not those"):
            llm.restore(tmp_path / "kv")
        assert llm.stats().tenants == {}
        assert llm.stats().memory.free == llm.stats().memory.total - 1
    with tiny_llm(deterministic=False) as llm:
        assert llm.restore(tmp_path / "kv").pages.restored == len(manifest["blocks"])


def test_a_name_that_is_live_is_refused_and_nothing_stays(saved: tuple[Path, list[RequestOutput], int]) -> None:
    with tiny_llm() as llm:
        mine = llm.tenant("bank")
        with pytest.raises(ConfigError, match="tenant 'bank' is live"):
            llm.restore(saved[0])
        assert set(llm.stats().tenants) == {"bank"}
        mine.close()
        assert llm.stats().memory.free == llm.stats().memory.total - 1
        assert set(llm.restore(saved[0]).tenants) == {"shop", "bank"}


def test_a_pool_with_little_room_takes_what_fits_and_evicts_nothing(
    saved: tuple[Path, list[RequestOutput], int],
) -> None:
    _, _, shared = saved
    with tiny_llm() as llm:
        mine = llm.tenant("mine")
        keep = [mine.agent(name, [Segment(f"keep {name}" * 115)]) for name in ("me", "you")]
        for agent in keep:
            agent.chat("hello", PARAMS)
        before = llm.stats().memory
        assert 0 < before.free < shared
        pages = llm.restore(saved[0]).pages
        after = llm.stats().memory
        assert 0 < pages.restored < shared
        assert pages.restored + pages.left_out == shared
        assert (after.held, after.cached, after.evictions) == (before.held, before.cached + pages.restored, 0)
        llm.verify()


def test_versions_modes_and_roots_come_back(tmp_path: Path) -> None:
    with tiny_llm() as llm:
        shop = llm.tenant("shop")
        shop.publish("system", SYSTEM, readers=5, mode="dense")
        team = shop.group("team")
        team.publish("plan", PLAN, "user")
        team.publish("plan", PLAN + " Or later.", on_update="replace")
        team.root(["system"])
        visible = team.shelf.visible()
        llm.save(tmp_path / "kv")
    with tiny_llm() as llm:
        team = llm.restore(tmp_path / "kv").tenants["shop"].groups["team"]
        assert team.shelf.visible() == visible
        assert team.shelf.newer("plan", 0)[0].text == PLAN
        assert visible["plan"].version == 2


def test_a_fragment_is_read_where_the_snapshot_put_it(tmp_path: Path) -> None:
    options: dict[str, Any] = {"fragments": "unchecked", "link_tokens": 5, "num_pages": 256}

    def read(llm: LLM) -> tuple[RequestOutput, int]:
        agent = llm._tenants["shop"].agent("ann", ["system", Segment(SECRET), "document"])
        before = llm.stats().work.prefill_tokens
        output = agent.chat("When?", PARAMS)
        return output, llm.stats().work.prefill_tokens - before

    with tiny_llm(**options) as llm:
        shop = llm.tenant("shop")
        shop.publish("system", SYSTEM)
        shop.publish("document", "The release is on Thursday, and the port is 8443. " * 4, mode="fragment")
        first, cold = read(llm)
        llm.save(tmp_path / "kv")
    with tiny_llm(**options) as llm:
        llm.restore(tmp_path / "kv")
        again, warm = read(llm)
        same([first], [again])
        assert again.num_fragment_tokens == first.num_fragment_tokens > 100
        assert warm <= cold - first.num_fragment_tokens


def test_quotas_and_pins_come_back(tmp_path: Path) -> None:
    quotas = {"global_pool": Quota(reserve=8), "private_pool": Quota(limit=20)}
    with tiny_llm() as llm:
        shop = llm.tenant("shop", **quotas)
        shop.publish("system", SYSTEM)
        team = shop.group("team", kv_limit=30)
        team.publish("plan", PLAN)
        shop.preload(["system"])
        team.preload(["system", "plan"], pin=True)
        team.preload(["plan"], pin=False)
        pinned = llm.stats().memory.held
        assert pinned > 5
        llm.save(tmp_path / "kv")
    with tiny_llm() as llm:
        shop = llm.restore(tmp_path / "kv").tenants["shop"]
        assert llm.stats().memory.held == pinned
        assert (shop.quotas[Tier.GLOBAL], shop.quotas[Tier.PRIVATE]) == (Quota(reserve=8), Quota(limit=20))
        assert (shop.groups["team"].kv_limit, shop.pinned) == (30, (("system",),))
        llm.tenant("flood").agent("crowd", [Segment("y" * 900)]).chat("hello", PARAMS)
        llm.reset_prefix_cache()
        with pytest.raises(CapacityError, match="its limit is 20 pages"):
            shop.agent("big", [Segment("z" * 600)]).chat("hello", PARAMS)
        with pytest.raises(CapacityError):  # what is reserved is not there for another one
            llm.tenant("greedy", private_pool=Quota(reserve=127 - 7))
        llm.verify()
    with tiny_llm() as llm:
        llm.tenant("greedy", private_pool=Quota(reserve=127 - 7))
        with pytest.raises(CapacityError):
            llm.restore(tmp_path / "kv")
        assert set(llm.stats().tenants) == {"greedy"}
        assert llm.stats().memory.free == 127


def test_an_engine_without_anything_published_has_a_snapshot_too(tmp_path: Path) -> None:
    with tiny_llm() as llm:
        llm.tenant("empty").agent("a", [Segment("mine alone")]).chat("hello", PARAMS)
        llm.save(tmp_path / "kv")
    with tiny_llm() as llm:
        restored = llm.restore(tmp_path / "kv")
        assert set(restored.tenants) == {"empty"}
        assert restored.pages.restored == 0


def test_saving_while_agents_speak_gives_whole_pages(tmp_path: Path) -> None:
    with tiny_llm() as llm:
        first = work(llm)
        busy = llm._tenants["shop"].groups["team"].agent("busy", ["system", "plan"])
        stream = busy.stream("go on", SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True))
        next(iter(stream))
        llm.save(tmp_path / "kv")
        llm.save(tmp_path / "kv")
        stream.close()
    with tiny_llm() as llm:
        llm.restore(tmp_path / "kv")
        same(first, answers(llm))


def test_what_is_no_snapshot_is_refused(saved: tuple[Path, list[RequestOutput], int], tmp_path: Path) -> None:
    with tiny_llm() as llm:
        with pytest.raises(SnapshotError, match="no such folder"):
            llm.restore(tmp_path / "none")
        (tmp_path / "empty").mkdir()
        with pytest.raises(SnapshotError, match="holds no complete snapshot"):
            llm.restore(tmp_path / "empty")
        shutil.copytree(saved[0], tmp_path / "torn")
        for path in (tmp_path / "torn").rglob("*"):
            if path.is_file() and "/d/" in str(path):
                path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        with pytest.raises(SnapshotError, match="cannot be read"):
            llm.restore(tmp_path / "torn")
        assert llm.stats().tenants == {}
