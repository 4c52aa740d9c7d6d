"""`inms-jax map`: runs the work of a scenario, with sharing, and shows what every page held at two moments."""

from pathlib import Path

from rich.console import Console

from inms_jax.engine.report import StepReport
from inms_jax.errors import ConfigError
from inms_jax.eval import map_picture, map_text
from inms_jax.eval.live import View
from inms_jax.eval.page_map import PageMap, page_map
from inms_jax.eval.plots import require_matplotlib
from inms_jax.eval.probe import Probe
from inms_jax.eval.scenario import Scenario, load_scenario
from inms_jax.eval.three_agents import Watcher, Work, load_model
from inms_jax.llm import LLM
from inms_jax.weights import LoadedModel


def show_map(config: Path, picture: Path, console: Console) -> tuple[PageMap, ...]:
    """Run, print both maps, and write them into `picture`, a PNG."""
    if picture.suffix.lower() != ".png":
        raise ConfigError(f"the picture is a PNG: name it something.png, not {picture}")
    require_matplotlib()  # before the work, not after
    scenario = load_scenario(config)
    picture.parent.mkdir(parents=True, exist_ok=True)
    turns = {agent.name: len(agent.turns) + len(agent.later_turns) for agent in scenario.agents}
    with View(console, turns) as view:
        maps = run_maps(scenario, load_model(scenario), view)
    map_text.show(maps, console)
    map_picture.write(maps, picture)
    console.print(f"Written to {picture}", soft_wrap=True, highlight=False)
    return maps


def run_maps(scenario: Scenario, model: LoadedModel, watcher: Watcher) -> tuple[PageMap, ...]:
    """The map when the most pages were held, and the map after every agent has left while its team is still there."""
    with LLM(model, progress=False, **scenario.engine) as llm:
        watcher.note("compiling the engine's programs")
        llm.warmup()
        watcher.mode("shared", llm.stats().memory.total - 1, llm.page_bytes)
        peak = _Peak(llm)
        probe = Probe(llm, shared=True, on_step=watcher.step)
        stop = llm.observe(peak.observe)
        work = Work(scenario, llm, probe, watcher)
        try:
            work.run()
        except BaseException:
            llm.close()  # ends the turns of agents that run in other threads
            raise
        stop()
        probe.check()
        work.dismiss()
        after = page_map(llm, "after the agents left")
        work.close()
    return peak.map, after


class _Peak:
    """Keeps the map of the step after which the most pages were held."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._held = 0
        self.map = page_map(llm, "at the peak")

    def observe(self, report: StepReport) -> None:
        """Called on the engine thread after each step."""
        if report.held_pages > self._held:
            self._held = report.held_pages
            self.map = page_map(self._llm, "at the peak")
