"""Writes docs/results.md from the committed results of experiments.

PYTHONPATH=. python benchmarks/results_page.py
"""

import json
from pathlib import Path

from inms_jax.eval.experiment import Results, find_config, load_config
from inms_jax.eval.experiment_run import markdown

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks/results/eval"

HEAD = """\
# Results

Each experiment is a TOML file in `configs/experiments/`; its head says what to expect and how long it takes. The
tables are made from `benchmarks/results/eval/` by `benchmarks/results_page.py`. What fragments cost in quality stands
in [fragments.md](fragments.md).

## Where the article is wrong or silent

The source article describes sharing the KV cache among agents; most of its tables are missing. What was found here:

- **8 agents, 16k tokens each, 60% public, 512 KiB a token**: the article says 34 GiB. Its own formula, `(p + n (1 -
  p)) L b`, gives 30.4 GiB, and so do pages counted one by one (`eight_agents`).
- **Large blocks because small ones hit less**: false where keys are chained, as they must be. A block is found only
  behind all blocks before it, so a smaller block finds more of a common beginning, never less (`block_size`: 99.7% at
  16, 91.0% at 512). Larger blocks cost less host time and memory. 128 is the default: it loses 2.6% and costs a
  quarter of 16.
- **Sharing whatever is equal**, in any tier: not without a leak. Keys and values depend on everything before them, so
  a text behind private text is private. With keys of content alone another agent's note moved a reader's logits by
  1.6 (notebook `03_isolation`).
- **Leaks**: without leases the pages of crashed agents end everybody's work (`leak_soak`).
- **Bursts of copies on write**: a budget spreads them over steps and changes no token (`cow_burst`).
- **Three pools with fixed parts**: at equal memory, elastic pools serve more with less waiting (`pools`).
- **Long-term memory** behind private notes is found only as fragments: computed and stored once, however many recall
  it (`memory_store`). That has a price in quality, see [fragments.md](fragments.md).
"""


def page() -> str:
    """The whole of docs/results.md."""
    parts = [HEAD.rstrip()]
    for folder in sorted(RESULTS.iterdir()):
        results = Results.from_json(json.loads((folder / "results.json").read_text()))
        module = load_config(find_config(folder.name)).module
        parts.append(f"## {module.TITLE}\n\n`inms-jax eval {folder.name}`")
        parts += [markdown(table) for table in module.tables(results)]
        parts.append(f"![{folder.name}](../benchmarks/results/eval/{folder.name}/{folder.name}.png)")
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    (ROOT / "docs/results.md").write_text(page())
