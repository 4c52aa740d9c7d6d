"""The page map says what the pages hold, on a terminal and as a picture."""

import io
import json
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.image import imread
from rich.console import Console

from inms_jax import SamplingParams, cli
from inms_jax.errors import ConfigError
from inms_jax.eval import map_picture, map_run, map_text
from inms_jax.eval.page_map import PageCell, PageMap, owners_of, page_map
from tests.eval.work import Recorder, small_scenario
from tests.tiny import tiny_llm, tiny_model


def cell(page: int, owner: str, state: str = "sealed", tokens: int = 16, sequences: int = 1) -> PageCell:
    tier = ("global", "group", "private")[owner.count("/")]
    return PageCell(page, tier, owner, state, tokens, sequences)


HELD = PageMap(
    "at the peak",
    40,
    16,
    2**20,
    (
        cell(1, "shop", sequences=3),
        cell(2, "shop", sequences=12),
        cell(3, "shop/team", sequences=2, tokens=8),
        cell(4, "shop/team/tom", "filling"),
        cell(5, "shop/team/sue", "cached", sequences=0),
        cell(6, "shop/team/tom", "fenced", sequences=0),
    ),
)


def printed(maps: list[PageMap], width: int = 80) -> list[str]:
    out = io.StringIO()
    map_text.show(maps, Console(file=out, width=width))
    return out.getvalue().splitlines()


def test_counts_of_a_map() -> None:
    assert (HELD.held, HELD.cached, HELD.fenced, HELD.free) == (4, 1, 1, 34)
    assert (HELD.shared, HELD.spared) == (3, 2 + 11 + 1)


def test_every_owner_has_a_label_and_a_colour_of_its_own() -> None:
    owners = owners_of([HELD])
    assert {name: owner.label for name, owner in owners.items()} == {
        "shop": "S",
        "shop/team": "T",
        "shop/team/sue": "U",
        "shop/team/tom": "O",
    }
    assert len({owner.colour for owner in owners.values()}) == 4
    many = PageMap("", 999, 16, 1, tuple(cell(n + 1, f"shop/team/a{n}") for n in range(140)))
    labels = Counter(owner.label for owner in owners_of([many]).values())
    assert max(len(label) for label in labels) == 2
    assert max(count for label, count in labels.items() if label != "*") == 1


@pytest.mark.parametrize(("width", "columns"), [(80, 16), (140, 32), (30, 4)])
def test_the_terminal_shows_one_cell_a_page_without_colours_too(width: int, columns: int) -> None:
    lines = printed([HELD], width)
    assert lines[0] == "Pages at the peak"
    rows = lines[1 : 1 - (-41 // columns)]
    assert [int(row.split()[0]) for row in rows] == list(range(0, 41, columns))
    cells = [entry for row in rows for entry in row.split()[1:]]
    assert cells == ["0", "S3", "S+", "T2", "O", "(U)", "x", *["·"] * 34]
    assert all(len(line) <= width for line in lines)
    text = " ".join(" ".join(lines).split())
    assert "held 4 (3 by several sequences) + cached 1 + fenced 1 + free 34 = 40 pages of 16 tokens, 1 MiB each" in text
    if width > 60:
        [row] = [line.split() for line in lines if line.split()[1:3] == ["GLOBAL", "shop"]]
        assert row == ["S", "GLOBAL", "shop", "2", "2", "0"]


def test_an_empty_pool_has_a_map() -> None:
    lines = printed([PageMap("now", 3, 16, 2**20, ())])
    assert lines[1].split() == ["0", "0", "·", "·", "·"]
    assert "held 0 (0 by several sequences) + cached 0 + free 3" in " ".join(lines)


def test_the_picture_fills_squares_as_pages_are_filled(tmp_path: Path) -> None:
    path = tmp_path / "map.png"
    map_picture.write([HELD], path)
    image = imread(path)[..., :3]
    owners = owners_of([HELD])

    def area(name: str) -> int:
        colour = np.array(to_rgb(owners[name].colour))
        return int((np.abs(image - colour).max(axis=-1) < 0.01).sum())

    legend = area("shop/team/sue")  # a cached page is pale and hatched, so only the legend has its colour
    square = (area("shop") - legend) / 2
    assert square > 20 * legend > 0
    assert area("shop/team") - legend == pytest.approx(square / 2, rel=0.2)
    assert area("shop/team/tom") - legend == pytest.approx(square, rel=0.2)


def test_the_map_of_an_engine_is_that_of_its_pages() -> None:
    with tiny_llm(num_pages=40) as llm:
        team = llm.tenant("shop").group("team")
        team.publish("plan", "the plan of the whole team")
        agents = [team.agent(name, ["plan"]) for name in ("ann", "bob")]
        for agent in agents:
            agent.chat("hello", SamplingParams(max_tokens=2, temperature=0.0))
        now = page_map(llm, "now")
        memory = llm.stats().memory
        assert (now.held, now.cached, now.free) == (memory.held, memory.cached, memory.free)
        assert {c.owner: c.sequences for c in now.cells} == {"shop/team": 2, "shop/team/ann": 1, "shop/team/bob": 1}
        agents[0].close()
        assert {c.owner for c in page_map(llm, "now").cells} == {"shop/team", "shop/team/bob"}
        again = team.agent("ann", ["plan"])
        again.chat("hello", SamplingParams(max_tokens=2, temperature=0.0))
        assert "shop/team/ann#2" in {c.owner for c in page_map(llm, "now").cells}


def test_the_command_runs_the_scenario_and_writes_both_maps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(map_run, "load_scenario", lambda path: small_scenario())
    monkeypatch.setattr(map_run, "load_model", lambda scenario: tiny_model())
    picture, file = tmp_path / "new" / "map.png", tmp_path / "map.json"
    assert cli.main(["map", "--png", str(picture), "--json", str(file)]) == 0
    assert imread(picture).std() > 0.05
    peak, after = json.loads(file.read_text())["maps"]
    assert peak["held"] > 0
    assert peak["spared"] > 0
    assert any(c["sequences"] == 3 for c in peak["cells"])
    assert after["held"] == 0
    assert {c["owner"] for c in after["cells"]} == {"webshop", "webshop/checkout"}
    assert {c["state"] for c in after["cells"]} == {"cached"}
    shown = capsys.readouterr().out
    assert "Pages at the peak" in shown
    assert "Pages after the agents left" in shown
    assert re.search(r"\bW3\b", shown)


def test_the_peak_is_the_step_with_the_most_pages() -> None:
    recorder = Recorder()
    peak, _ = map_run.run_maps(small_scenario(), tiny_model(), recorder)
    assert peak.held == max(sample.held_pages for sample in recorder.steps)


def test_a_picture_that_is_no_png_is_refused_before_the_work(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"name it something.png, not .*map.jpg"):
        map_run.show_map(Path("x.toml"), tmp_path / "map.jpg", Console())
