"""Scenario files are refused with the file, the key and what is wrong."""

from pathlib import Path

import pytest

from inms_jax.errors import ConfigError
from inms_jax.eval.scenario import load_scenario

ROOT = Path(__file__).resolve().parents[2]
GOOD = (ROOT / "tests/data/short_demo.toml").read_text()


def test_the_demos_own_scenario_is_read() -> None:
    scenario = load_scenario(ROOT / "configs/experiments/three_agents.toml")
    assert [agent.name for agent in scenario.agents] == ["architect", "backend", "frontend"]
    assert scenario.author.name == "architect"
    assert [agent.name for agent in scenario.readers] == ["backend", "frontend"]
    assert [text.name for text in scenario.published] == ["system", "tools"]
    assert scenario.num_turns == 10
    assert scenario.engine["block_size"] == 128
    assert scenario.sampling.temperature == 0
    assert not scenario.decisions.text.startswith("\n")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("[project]", "[project]\ncolour = 'red'", r"project\.colour: is not a known key; .*group, tenant"),
        ('text = "Decisions', 'note = "x"\ntext = "Decisions', r"decisions\.note: is not a known key"),
        ("max_num_seqs = 4", "max_seqs = 4", r"engine\.max_seqs: is not a known key; .*max_num_seqs"),
        ("max_num_seqs = 4", "enable_prefix_caching = true", r"engine\.enable_prefix_caching: is not a known key"),
        ("block_size = 32", "block_size = -32", r"engine: block_size must be an integer in 8\.\.512, got -32"),
        ("max_tokens = 6", "max_tokens = -6", r"sampling: max_tokens must be an integer >= 1 or None, got -6"),
        ("max_tokens = 6", "max_tokens = 'six'", r"sampling\.max_tokens: must be int, got 'six'"),
        ("temperature = 0.0", "temperature = true", r"sampling\.temperature: must be int or float, got True"),
        ("temperature = 0.0", "temperature = -2", r"sampling: temperature must be >= 0, got -2"),
        ("temperature = 0.0", "stop = 5", r"sampling\.stop: must be str or Sequence, got 5"),
        ("block_size = 32", "block_size = 32.5", r"engine\.block_size: must be int, got 32\.5"),
        ("max_tokens = 6", "n = 2", r"sampling\.n: is not a known key"),
        ('tenant = "webshop"', "tenant = 7", r"project\.tenant: must be a text, got 7"),
        ('tenant = "webshop"', "", r"project\.tenant: is missing; it must be a text"),
        ('tenant = "webshop"', 'tenant = " "', r"project\.tenant: must be a text, got an empty one"),
        ('turns = ["What does the customer see?"]', "turns = []", r"agent\[2\]\.turns: must hold at least one text"),
        ('turns = ["What does the customer see?"]', "turns = [3]", r"agent\[2\]\.turns\[0\]: must be a non-empty text"),
        ('turns = ["What does the customer see?"]', 'turns = "hm"', r"agent\[2\]\.turns: must be a list of texts"),
        ('author = "architect"', 'author = "boss"', r"decisions\.author: 'boss' is not an agent; there are \['arch"),
        ('name = "frontend"', 'name = "backend"', r"agent: the name 'backend' is used more than once"),
        ('name = "tools"', 'name = "decisions"', r"published: the name 'decisions' is used more than once"),
        (
            'turns = ["What does the customer see?"]',
            'turns = ["a"]\nlater_turns = ["b"]',
            r"agent\[2\]\.later_turns: only the author \('architect'\) has later turns",
        ),
        ("[project]", "[project", r"is not TOML: .*line"),
    ],
)
def test_a_bad_scenario_is_named(tmp_path: Path, old: str, new: str, said: str) -> None:
    assert GOOD.count(old) == 1
    file = tmp_path / "bad.toml"
    file.write_text(GOOD.replace(old, new))
    with pytest.raises(ConfigError, match=rf"bad\.toml: {said}"):
        load_scenario(file)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml: cannot be read: No such file"):
        load_scenario(tmp_path / "none.toml")


def test_an_author_alone_is_not_a_demo(tmp_path: Path) -> None:
    file = tmp_path / "alone.toml"
    file.write_text(GOOD[: GOOD.index('[[agent]]\nname = "backend"')])
    with pytest.raises(ConfigError, match=r"agent: there must be an author and at least one reader, got 1 agent"):
        load_scenario(file)
