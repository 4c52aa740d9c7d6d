"""What one of several processes runs in test_replicas.py: groups of agents on a tiny model, results as JSON."""

import json
import sys

import jax

from inms_jax import SamplingParams, Segment

GROUPS = [{"name": f"team-{i}", "notes": ["I keep the books. " * (1 + i % 3), "I write the code."]} for i in range(5)]


def main(mode: str, index: int, port: int) -> None:
    jax.config.update("jax_platforms", "cpu")
    if mode != "alone":
        jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=index)
    from inms_jax.errors import EngineError
    from inms_jax.eval.replicas import evaluate
    from tests.tiny import tiny_llm

    with tiny_llm(deterministic=True) as llm:

        def ask(group):
            with llm.tenant(group["name"]) as tenant:
                tenant.publish("system", "You help a web shop.")
                agents = [tenant.agent(f"a{i}", ["system", Segment(note)]) for i, note in enumerate(group["notes"])]
                params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
                return [list(agent.chat("What do you do?", params).outputs[0].token_ids) for agent in agents]

        def refuse(group):
            if group["name"] == "team-3":
                raise ValueError("team-3 is on strike")
            return group["name"]

        def load(group):
            return sum(map(len, group["notes"]))

        found = evaluate(GROUPS, ask, load=load)
        refused = ""
        try:
            evaluate(GROUPS, refuse, load=load)
        except EngineError as error:
            refused = str(error)
        print(json.dumps({"found": found, "refused": refused, "requests": llm.stats().work.requests}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
