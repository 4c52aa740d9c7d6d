"""Long-term memory: what a store finds is stored once for all who recall it, and private memory stays private."""

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from langgraph.store.memory import InMemoryStore

from inms_jax import LLM, Agent, SamplingParams, Scope, Segment, Snippet, Tier
from inms_jax.errors import ClosedError, InvalidRequestError, VisibilityError
from inms_jax.langgraph_memory import LangGraphMemory
from tests.tiny import tiny_llm

RECORD = "Decisions: billing listens on port 8443; money is an integer of cents; retries stop after three. " * 2
PARAMS = SamplingParams(max_tokens=4, temperature=0.0, logprobs=0, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with tiny_llm(fragments="unchecked", link_tokens=4, num_pages=256) as engine:
        yield engine


class Fixed:
    """A store that finds what it is told to find, and remembers who asked."""

    def __init__(self, *found: Snippet) -> None:
        self.found = found
        self.asked: list[tuple[str, Scope, int]] = []

    def search(self, query: str, scope: Scope, k: int) -> Sequence[Snippet]:
        self.asked.append((query, scope, k))
        return self.found


def moved_pages(llm: LLM, agent: Agent) -> list[int]:
    row = llm._core.memory.row(agent.snapshot().sequence)
    return [] if row.shift is None else [int(p) for p, by in zip(row.page, row.shift, strict=True) if by]


def test_a_snippet_that_two_agents_recall_is_stored_once(llm: LLM) -> None:
    store = Fixed(Snippet("record", "1", Tier.GROUP, RECORD))
    with llm.tenant("acme") as tenant:
        tenant.publish("system", "You are an agent of a web shop.")
        team = tenant.group("team")
        agents = []
        for name, notes in (("a", "I like tea."), ("b", "I am the other one, with longer notes.")):
            agent = team.agent(name, ["system", Segment(notes)])
            assert agent.recall(store, "port?", k=2) == store.found
            output = agent.chat("Which port?", PARAMS)
            assert output.num_fragment_tokens > 100
            agents.append(agent)
        assert store.asked == [("port?", Scope("acme", "team", name), 2) for name in ("a", "b")]
        assert moved_pages(llm, agents[0]) == moved_pages(llm, agents[1]) != []
        assert llm.stats().work.encoded_fragments == 1
        before = agents[0].token_ids
        agents[0].recall(store, "port?", k=1)  # it is there already
        assert agents[0].token_ids == before
    llm.verify()
    assert llm.stats().memory.held == 0


def test_a_new_version_is_another_text_and_the_old_one_stays(llm: LLM) -> None:
    with llm.tenant("acme") as tenant:
        agent = tenant.agent("a", [Segment("I like tea.")])
        agent.recall(Fixed(Snippet("record", "1", Tier.GLOBAL, RECORD)), "port?")
        agent.recall(Fixed(Snippet("record", "2", Tier.GLOBAL, RECORD.replace("8443", "7070"))), "port?")
        text = llm.tokenizer.decode(agent.token_ids)
        assert text.index("8443") < text.index("7070")
        assert [decision.name for decision in agent.explain()] == [
            None,
            "memory record version 1",
            "memory record version 2",
            None,
        ]


def test_a_private_snippet_is_the_agents_own_text(llm: LLM) -> None:
    secret = Snippet("secret", "1", Tier.PRIVATE, "My word is ultraviolet. " * 4)
    with llm.tenant("acme") as tenant:
        team = tenant.group("team")
        one, other = team.agent("a"), team.agent("b")
        for agent in (one, other):
            agent.recall(Fixed(secret), "word?")
            assert agent.chat("Hm?", PARAMS).num_cached_tokens == 0
        assert {info.scope.tier for info in llm.memory_map() if info.references} == {Tier.PRIVATE}


def test_without_fragments_snippets_are_read_in_place() -> None:
    with tiny_llm(fragments="off") as llm, llm.tenant("acme") as tenant:
        agent = tenant.agent("a", [Segment("I like tea.")])
        agent.recall(Fixed(Snippet("record", "1", Tier.GLOBAL, RECORD)), "port?")
        assert agent.chat("Which port?", PARAMS).num_fragment_tokens == 0


def test_a_bad_store_is_told_and_changes_nothing(llm: LLM) -> None:
    good = Snippet("x", "1", Tier.GLOBAL, "text")
    with llm.tenant("acme") as tenant:
        agent = tenant.agent("a", [Segment("I like tea.")])
        before = agent.token_ids
        with pytest.raises(InvalidRequestError, match="returned 2 snippets, 1 were asked for"):
            agent.recall(Fixed(good, good), "q", k=1)
        with pytest.raises(InvalidRequestError, match="at least 1, got 0"):
            agent.recall(Fixed(good), "q", k=0)
        with pytest.raises(InvalidRequestError, match="Snippets with a text"):
            agent.recall(Fixed(Snippet("x", "1", Tier.GLOBAL, "")), "q")
        with pytest.raises(VisibilityError, match="belongs to a group, and agent 'a' is in none"):
            agent.recall(Fixed(Snippet("x", "1", Tier.GROUP, "text")), "q")
        with pytest.raises(InvalidRequestError, match="max_model_len"):
            agent.recall(Fixed(Snippet("x", "1", Tier.GLOBAL, "text " * 9000)), "q")
        assert agent.token_ids == before
        agent.close()
        with pytest.raises(ClosedError):
            agent.recall(Fixed(good), "q")


def letters(texts: Sequence[str]) -> list[list[float]]:
    """How often each letter stands in a text: enough to tell two topics apart."""
    counts = [np.array([text.lower().count(chr(97 + i)) for i in range(26)], float) for text in texts]
    return [(c / max(1.0, float(np.linalg.norm(c)))).tolist() for c in counts]


@pytest.fixture
def memory() -> LangGraphMemory:
    return LangGraphMemory(InMemoryStore(index={"dims": 26, "embed": letters, "fields": ["text"]}))


def test_langgraph_memory_is_found_by_meaning_and_by_those_it_is_for(llm: LLM, memory: LangGraphMemory) -> None:
    with llm.tenant("acme") as acme, llm.tenant("acme.eu") as other:
        team, rivals = acme.group("team"), acme.group("rivals")
        ann, bob, eve, out = team.agent("ann"), team.agent("bob"), rivals.agent("eve"), acme.agent("ann")
        memory.remember(acme, "greeting", "zzzz zzzz")
        memory.remember(team, "port", "pppp oooo rrrr tttt")
        memory.remember(ann, "diary", "dddd iiii aaaa")
        memory.remember(out, "diary", "eeee dddd iiii aaaa")
        memory.remember(other, "port", "pppp oooo rrrr")

        def keys(agent: Agent, query: str, k: int = 9) -> list[tuple[str, str]]:
            return [(found.id, found.tier.name) for found in memory.search(query, agent.names, k)]

        assert keys(ann, "port", 1) == [("port", "GROUP")]
        assert keys(ann, "zz", 1) == [("greeting", "GLOBAL")]
        assert set(keys(ann, "diary")) == {("diary", "PRIVATE"), ("port", "GROUP"), ("greeting", "GLOBAL")}
        assert set(keys(bob, "diary")) == {("port", "GROUP"), ("greeting", "GLOBAL")}
        assert keys(eve, "diary port") == [("greeting", "GLOBAL")]
        assert set(keys(out, "port")) == {("diary", "PRIVATE"), ("greeting", "GLOBAL")}
        (diary, _) = memory.search("diary", out.names, 9)
        assert diary.text.startswith("eeee")

        assert ann.recall(memory, "port", k=1)[0].text == "pppp oooo rrrr tttt"
        first = memory.search("port", ann.names, 1)[0]
        memory.remember(team, "port", "pppp oooo rrrr nnnn")
        second = memory.search("port", ann.names, 1)[0]
        assert first.id == second.id
        assert first.version != second.version
        memory.forget(team, "port")
        assert ("port", "GROUP") not in keys(ann, "port")


def test_forged_names_and_namespaces_inside_others_find_nothing(memory: LangGraphMemory) -> None:
    memory.store.put(("inms-jax", "group", "acme", "team", "deeper"), "x", {"text": "not of the team"})
    memory.store.put(memory.namespace(Scope("acme", "team")), "y", {"text": "of the team"})
    assert [found.id for found in memory.search("", Scope("acme", "team", "ann"), 9)] == ["y"]
    assert memory.search("", Scope("acme", "team.", "ann"), 9) == []
    names = [
        Scope("a.b"),
        Scope("a%2Eb"),
        Scope("a", "b"),
        Scope("a", None, "b"),
        Scope("a", "b", "c"),
        Scope("a", None, "c"),
    ]
    assert len({memory.namespace(one) for one in names}) == len(names)


def test_what_has_no_text_is_named(llm: LLM, memory: LangGraphMemory) -> None:
    memory.store.put(memory.namespace(Scope("acme")), "x", {"note": 1})
    with pytest.raises(InvalidRequestError, match="item 'x'"):
        memory.search("", Scope("acme", None, "ann"), 1)
    with llm.tenant("acme") as tenant, pytest.raises(InvalidRequestError, match="the text is empty"):
        memory.remember(tenant, "x", "")
