"""The real model: whatever others say, keep secret, break off or leave behind, the observed agent keeps its bits."""

import contextlib
import gc
import random
from collections.abc import Iterator
from typing import Any

import pytest

from inms_jax import LLM, Agent, SamplingParams, Segment
from inms_jax.errors import InmsError
from inms_jax.tenants import Group, Tenant

pytestmark = pytest.mark.model

SYSTEM = "You are an engineer of a small web shop. Answer in one sentence."
RECORD = (
    "Decision record. Billing listens on port 8443. Money is an integer of cents. Retries stop after three attempts."
)
WORDS = ("amber", "port", "seven", "password", "river", "Tuesday", "secret", "coffee", "ledger", "winter", "stone")
PARAMS = SamplingParams(max_tokens=4, temperature=0.0, logprobs=3, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(smollm2_spec: str) -> Iterator[LLM]:
    options: dict[str, Any] = {
        "block_size": 32,
        "max_num_batched_tokens": 64,
        "fragments": "unchecked",
        "link_tokens": 8,
    }
    with LLM(smollm2_spec, kv_cache_memory="56MiB", progress=False, zero_on_free=True, **options) as engine:
        yield engine


class Others:
    """Two agents of the team, who do something at random."""

    def __init__(self, llm: LLM, tenant: Tenant, team: Group, seed: int) -> None:
        self.llm, self.tenant, self.team = llm, tenant, team
        self.rng = random.Random(seed)
        self.agents: list[Agent] = []
        self.names = 0

    def text(self) -> str:
        return " ".join(self.rng.choices(WORDS, k=self.rng.randrange(3, 30)))

    def act(self) -> None:
        what = self.rng.choice(
            ["chat", "chat", "abort", "close", "crash", "evict", "fork", "offload", "recall", "flood"]
        )
        if len(self.agents) < 2:
            self.names += 1
            notes = Segment("My private notes: " + self.text())
            self.agents.append(self.team.agent(f"other-{self.names}", ["system", notes, "record"]))
        agent = self.rng.choice(self.agents)
        with contextlib.suppress(InmsError):
            if what == "chat":
                agent.chat(self.text(), PARAMS)
            elif what == "abort":
                next(iter(agent.stream(self.text(), PARAMS)))
            elif what in ("close", "crash"):
                self.agents.remove(agent)
                if what == "close":
                    agent.close()
                del agent
                gc.collect()
            elif what == "evict":
                self.llm.reset_prefix_cache()
            elif what == "fork":
                with agent.fork(f"twin-{self.names}") as twin:
                    twin.chat(self.text(), PARAMS)
            elif what == "offload":
                agent.pause(offload=True)
            elif what == "recall":
                agent.append("record", Segment(self.text()))
            else:
                self.llm.generate(self.text() + " " + self.text(), PARAMS)


def observed(llm: LLM, seed: int | None) -> list[object]:
    """What the observed agent says in three turns; `seed`: of what others do before, between and during them."""
    with llm.tenant("shop") as tenant:
        tenant.publish("system", SYSTEM)
        team = tenant.group("team")
        team.publish("record", RECORD, mode="fragment")
        others = None if seed is None else Others(llm, tenant, team, seed)
        agent = team.agent("observed", ["system", Segment("I keep the notes of the team."), "record"])
        said: list[object] = []
        for question in ("On which port does billing listen?", "And how is money kept?", "Thank you."):
            beside = None
            if others is not None:
                for _ in range(others.rng.randrange(4)):
                    others.act()
                if others.agents and others.rng.random() < 0.7:
                    beside = others.agents[0]._submit(others.text(), PARAMS, None)
            (answer,) = agent.chat(question, PARAMS).outputs
            said.append((answer.token_ids, answer.logprobs))
            if beside is not None:
                with contextlib.suppress(InmsError):
                    beside.result()
        llm.verify()
        return said


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(2, 12))])
def test_nothing_that_others_do_moves_a_bit(llm: LLM, seed: int) -> None:
    assert observed(llm, seed) == observed(llm, None)
