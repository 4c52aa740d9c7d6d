"""The pictures exist, have a sane size, are not blank, and show what the results say."""

from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.image import imread

from inms_jax.eval.plots import PAGE_COLOURS, letters_of, write_plots
from inms_jax.eval.results import (
    MODES,
    AgentPages,
    AgentResult,
    DemoResult,
    MapCell,
    ModeResult,
    StepSample,
    TurnResult,
)


def mode(name: str, cells: tuple[MapCell, ...]) -> ModeResult:
    pages = len([cell for cell in cells if cell.state != "cached"])
    samples = tuple(
        StepSample(t / 2, "decode", 1, p, p, 30 * p, {"ann": AgentPages(9, p)}) for t, p in [(1, 2), (8, pages)]
    )
    agents = tuple(
        AgentResult(agent, (TurnResult("?", "!", (1,), (-0.5,), 0.1, 20, 4),), 10) for agent in ("ann", "bob")
    )
    return ModeResult(
        mode=name,
        deterministic=True,
        wall_s=4.0,
        page_bytes=1 << 20,
        block_size=32,
        total_pages=24,
        tokens_prompt=40,
        tokens_computed=36,
        tokens_generated=2,
        decode_steps=2,
        samples=samples,
        page_map=cells,
        agents=agents,
    )


@pytest.fixture
def result() -> DemoResult:
    def cell(page: int, tier: str, *holders: str, state: str = "sealed") -> MapCell:
        return MapCell(page, tier, state, 32, holders)

    alone = (*(cell(p, "global", "ann") for p in (1, 2)), *(cell(p, "global", "bob") for p in (3, 4)))
    private = (cell(5, "private", "ann", state="filling"), cell(6, "private", "bob"))
    together = (cell(1, "global", "ann", "bob"), cell(2, "group", "ann", "bob"), *private)
    cached = cell(9, "global", state="cached")
    return DemoResult("tiny", mode(MODES[0], (*alone, *private)), mode(MODES[1], (*together, cached)))


def pixels(image: np.ndarray, colour: str) -> int:
    return int((np.abs(image[..., :3] - np.array(to_rgb(colour))).max(axis=-1) < 0.01).sum())


def test_both_pictures_are_written(result: DemoResult, tmp_path: Path) -> None:
    memory, pages = write_plots(result, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"memory.png", "pages.png"}
    for path in (memory, pages):
        image = imread(path)
        height, width = image.shape[:2]
        assert width >= 1000
        assert height >= 600
        assert image[..., :3].std() > 0.05


def test_the_page_map_shows_as_many_squares_as_pages(result: DemoResult, tmp_path: Path) -> None:
    image = imread(write_plots(result, tmp_path)[1])
    left, right = image[:, : image.shape[1] // 2], image[:, image.shape[1] // 2 :]
    left, right = (half[: int(0.92 * len(half))] for half in (left, right))  # above the legend
    square = pixels(left, PAGE_COLOURS["global"]) / 4
    assert pixels(right, PAGE_COLOURS["global"]) == pytest.approx(square, rel=0.15)
    assert pixels(right, PAGE_COLOURS["group"]) == pytest.approx(square, rel=0.15)
    assert pixels(left, PAGE_COLOURS["group"]) == 0
    assert pixels(right, PAGE_COLOURS["cached"]) == pytest.approx(square, rel=0.15)
    for half in (left, right):
        assert pixels(half, PAGE_COLOURS["private"]) == pytest.approx(2 * square, rel=0.15)


def testletters_of_tell_agents_apart() -> None:
    assert letters_of(["architect", "backend", "frontend"]) == {"architect": "A", "backend": "B", "frontend": "F"}
    assert letters_of(["bill", "bob", "bobby"]) == {"bill": "Bi", "bob": "Bob", "bobby": "Bobb"}
