"""Pools, caps and pinned texts as users meet them."""

import contextlib
import threading

import pytest

from inms_jax import Quota, SamplingParams, Segment, Tier
from inms_jax.errors import CapacityError, ConfigError, VisibilityError
from tests.tiny import tiny_llm

ONE = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
RULES = "Everybody answers politely, in whole sentences, and says where a number comes from. " * 3


def test_a_tenant_at_its_limit_waits_for_itself_and_holds_up_nobody_else():
    with tiny_llm(num_pages=200) as llm:
        one, two = llm.tenant("one", private_pool=Quota(limit=19)), llm.tenant("two")
        busy, late = one.agent("busy"), one.agent("late")
        stream = busy.stream("Count.", SamplingParams(max_tokens=250, temperature=0.0, ignore_eos=True))
        with contextlib.closing(stream):
            next(stream)
            waiting = threading.Thread(target=late.chat, args=("Me too.", ONE))
            waiting.start()
            other = two.agent("other")
            while not llm.stats().memory.quota_refusals:
                other.chat("Still here?", ONE)
            assert late.turn == 0
            assert other.turn > 0
        waiting.join(60)
        assert late.turn == 1
        assert llm.stats().memory.quota_refusals == 1
        llm.verify()


def test_a_turn_above_a_cap_is_refused_with_the_numbers_and_counted():
    with tiny_llm() as llm:
        tenant = llm.tenant("t", private_pool=Quota(limit=30))
        group = tenant.group("g", kv_limit=4)
        capped = group.agent("capped", kv_limit=3)
        with pytest.raises(CapacityError, match=r"pages of agent capped#1 of g#1 .*its limit is 3 pages of 16 tokens"):
            capped.chat("x" * 40, ONE)
        group.publish("rules", RULES)
        with pytest.raises(CapacityError, match=r"pages of group g#1 of t#1 .*its limit is 4 pages"):
            group.agent("reader", ["rules"]).chat("Hello", ONE)
        with pytest.raises(CapacityError, match=r"pages of the private pool of t#1 .*its limit is 30 pages"):
            group.agent("free").chat("x" * 500, ONE)
        assert llm.stats().memory.quota_refusals == 3
        capped.chat("x", ONE)
        llm.verify()


def test_what_a_tenant_reserves_is_there_whatever_others_do():
    with tiny_llm(num_pages=64) as llm:
        quiet = llm.tenant("quiet", private_pool=Quota(reserve=20))
        noisy = llm.tenant("noisy")
        speakers = [noisy.agent(f"n{n}") for n in range(4)]
        for speaker in speakers:
            speaker.chat("x" * 200, ONE)
        before = [speaker.snapshot().kv_pages for speaker in speakers]
        resident = quiet.agent("q")
        resident.chat("x" * 250, ONE)
        assert [speaker.snapshot().kv_pages for speaker in speakers] == before
        with pytest.raises(CapacityError, match="cannot reserve 50 pages: 20 of 63 are reserved by others"):
            llm.tenant("third", group_pool=Quota(reserve=50))
        quiet.close()
        llm.tenant("third", group_pool=Quota(reserve=50))
        llm.verify()


def test_a_pinned_text_is_found_by_the_first_reader_and_stays_through_a_flood():
    with tiny_llm(num_pages=64) as llm:
        tenant = llm.tenant("t")
        tenant.publish("rules", RULES)
        tenant.preload(["rules"])
        pinned = llm.stats().pages[Tier.GLOBAL].used
        assert pinned == -(-(len(RULES) + 10) // 16)
        flood = [tenant.agent(f"flood {n}") for n in range(8)]
        for n, agent in enumerate(flood):
            agent.chat(f"{n}" * 400, ONE)
        assert llm.stats().memory.dropped_sequences > 0
        assert llm.stats().pages[Tier.GLOBAL].used == pinned
        tenant.empty()
        output = tenant.agent("reader", ["rules"]).chat("Hello", ONE)
        assert output.num_cached_tokens > len(RULES)
        llm.verify()
        tenant.close()
        stats = llm.stats().memory
        assert stats.free == stats.total - 1


def test_a_preloaded_text_that_is_not_pinned_is_cached_like_any_other():
    with tiny_llm() as llm:
        group = llm.tenant("t").group("g")
        group.publish("rules", RULES)
        group.preload(["rules"], pin=False)
        assert llm.stats().pages[Tier.GROUP].cached > 10
        assert llm.stats().memory.held == 0
        assert group.agent("reader", ["rules"]).chat("Hello", ONE).num_cached_tokens > len(RULES)
        with pytest.raises(VisibilityError, match="'laws' is not published"):
            group.preload(["laws"])


def test_a_text_that_cannot_be_pinned_leaves_nothing_behind():
    with tiny_llm() as llm:
        tenant = llm.tenant("t", global_pool=Quota(limit=5))
        tenant.publish("rules", RULES)
        with pytest.raises(CapacityError, match="its limit is 5 pages"):
            tenant.preload(["rules"])
        llm.verify()
        assert llm.stats().memory.held == 0


def test_an_answer_is_the_same_whether_its_tenant_was_emptied_or_not():
    answers = []
    for emptied in (False, True):
        with tiny_llm() as llm:
            tenant = llm.tenant("t")
            agent = tenant.agent("a", [Segment("Remember the number seven.")])
            agent.chat("Which one?", SamplingParams(max_tokens=8, temperature=0.0))
            if emptied:
                assert tenant.empty() > 0
                assert llm.stats().memory.held == llm.stats().memory.cached == 0
            output = agent.chat("And now?", SamplingParams(max_tokens=8, temperature=0.0, logprobs=1))
            answers.append((output.outputs[0].token_ids, output.outputs[0].logprobs))
    assert answers[0] == answers[1]


def test_a_fork_pays_for_what_it_inherits_once_its_parent_has_left():
    with tiny_llm() as llm:
        tenant = llm.tenant("t")
        parent = tenant.agent("parent", kv_limit=6)
        parent.chat("x" * 30, ONE)
        twin = parent.fork("twin")
        llm.verify()
        twin.chat("y", ONE)
        parent.close()
        llm.verify()
        with pytest.raises(CapacityError, match=r"of agent twin#1 of t#1 .*its limit is 6 pages"):
            twin.chat("z" * 60, ONE)
        twin.close()
        assert llm.stats().memory.held == 0
        llm.verify()


def test_reserved_mode_gives_each_pool_exactly_what_it_reserves():
    with tiny_llm(pool_mode="reserved") as llm:
        with pytest.raises(ConfigError, match="a reserve of 4 and a limit of 9 pages"):
            llm.tenant("t", private_pool=Quota(reserve=4, limit=9))
        tenant = llm.tenant("t", private_pool=Quota(reserve=4))
        with pytest.raises(CapacityError, match="its limit is 4 pages"):
            tenant.agent("a").chat("x" * 60, ONE)
        llm.tenant("plain").agent("a").chat("x" * 60, ONE)
    with pytest.raises(ConfigError, match="pool_mode must be elastic or reserved, got 'rigid'"):
        tiny_llm(pool_mode="rigid")


def test_pages_are_counted_from_bytes():
    with tiny_llm() as llm:
        assert llm.pages("1MiB") == 2**20 // llm.page_bytes
        assert llm.pages(3 * llm.page_bytes + 1) == 3
        with pytest.raises(ConfigError, match="at least 1 page, got 0"):
            llm.tenant("t").agent("a", kv_limit=0)
