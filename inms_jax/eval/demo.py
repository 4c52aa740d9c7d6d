"""The demo as one call: run a scenario twice before the reader's eyes and leave JSON and pictures in a folder."""

import json
from pathlib import Path

from rich.console import Console

from inms_jax.errors import StateError
from inms_jax.eval.live import View
from inms_jax.eval.plots import require_matplotlib, write_plots
from inms_jax.eval.report import print_report
from inms_jax.eval.results import DemoResult
from inms_jax.eval.scenario import load_scenario
from inms_jax.eval.three_agents import load_model, run_demo


def show_demo(config: Path, out: Path, console: Console) -> DemoResult:
    """Run, print, and write demo.json, memory.png and pages.png into `out`.

    Raises StateError, after everything was written, when the runs differ although deterministic mode was on.
    """
    require_matplotlib()  # before the minutes of work, not after
    scenario = load_scenario(config)
    out.mkdir(parents=True, exist_ok=True)
    console.print(f"{config.name}: {scenario.num_turns} turns of {len(scenario.agents)} agents on {scenario.model}")
    model = load_model(scenario)
    turns = {agent.name: len(agent.turns) + len(agent.later_turns) for agent in scenario.agents}
    with View(console, turns) as view:
        result = run_demo(scenario, model, view)
    (out / "demo.json").write_text(json.dumps(result.to_json(), indent=1) + "\n", encoding="utf-8")
    write_plots(result, out)
    print_report(result, console)
    console.print(f"Written to {out}: demo.json, memory.png, pages.png", soft_wrap=True, highlight=False)
    if result.shared.deterministic and not result.texts_identical:
        raise StateError(f"deterministic mode was on and the two runs differ: see the texts in {out / 'demo.json'}")
    return result
