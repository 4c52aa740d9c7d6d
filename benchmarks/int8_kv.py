"""What smaller pages cost in quality: SmolLM2 reads Python's own help pages with pages of each dtype.

    PYTHONPATH=. python benchmarks/int8_kv.py --json out/int8_kv.json

Every passage is scored as an answer that somebody else gives, token by token, and compared with the same scores from
float32 pages and weights: KL(float32 || ours) in nats and whether the most likely token is the same. Keys and values of
the passage itself are read from the pages like all others. `int8_weights.py` asks the same of weights.
"""

import argparse
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
from timing import machine

from inms_jax import LLM, Segment
from inms_jax.capacity import weight_bytes
from inms_jax.eval.fragment_quality import compare
from inms_jax.weights import LoadedModel, load

MODEL = "smollm2-135m-instruct"
BASE = "float32"


@dataclass(frozen=True, slots=True)
class Form:
    """An engine to be measured: a model, options, and the dtype that its weights have or stand for."""

    model: LoadedModel
    options: Mapping[str, Any] = field(default_factory=dict)
    dtype: str = BASE

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights in that dtype."""
        return weight_bytes(self.model.config, self.dtype, self.options.get("weight_dtype", "auto"))


def load_model() -> LoadedModel:
    """SmolLM2 in float32."""
    return load(MODEL, dtype="float32")


def passages(llm: LLM, count: int, tokens: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The first `tokens` tokens of `count` help pages that have as many, spread over the alphabet."""
    texts = {name: re.sub(r"\s+", " ", topics[name]).strip() for name in sorted(topics)}
    long = [name for name, text in texts.items() if len(text) > 8 * tokens]
    for name in long[:: max(1, len(long) // count)][:count]:
        yield name, tuple(llm.tokenizer.encode(texts[name])[:tokens])


def measure(forms: Mapping[str, Form], count: int, tokens: int) -> list[dict[str, Any]]:
    """One line per form; BASE is among them and is what the others are compared with."""
    found: dict[str, list[tuple[np.ndarray, np.ndarray, np.ndarray]]] = {name: [] for name in forms}
    with ExitStack() as stack:
        llms = {
            name: stack.enter_context(LLM(form.model, kv_cache_memory="128MiB", max_model_len=2048, **form.options))
            for name, form in forms.items()
        }
        for title, answer in passages(llms[BASE], count, tokens):
            base = None
            for name in (BASE, *(name for name in forms if name != BASE)):
                with llms[name].tenant(title) as tenant, tenant.agent("reader", [Segment("You know Python.")]) as agent:
                    score = agent.score(f"Write about {title}.", answer)
                base = score.logits if base is None else base
                found[name].append((*compare(score.logits, base), -np.asarray(score.logprobs)))
            print(title, *(f"{name} {found[name][-1][0].mean():.2e}" for name in forms), flush=True)
        return [_line(name, forms[name], llms[name], lines) for name, lines in found.items()]


def _line(
    name: str, form: Form, llm: LLM, lines: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray]]
) -> dict[str, Any]:
    kl, same, nll = (np.concatenate(column) for column in zip(*lines, strict=True))
    means = [part.mean() for part, _, _ in lines]
    return {
        "form": name,
        "passages": len(lines),
        "tokens": len(kl),
        "kl_mean": float(kl.mean()),
        "kl_error": float(np.std(means, ddof=1) / len(means) ** 0.5),
        "kl_99th_percentile": float(np.quantile(kl, 0.99)),
        "top1": float(same.mean()),
        "nll": float(nll.mean()),
        "kv_bytes_per_token": llm.page_bytes // llm.config.block_size,
        "weight_bytes": form.weight_bytes,
    }


def show(lines: Sequence[dict[str, Any]]) -> None:
    for line in lines:
        print(
            f"{line['form']:>10}: KL {line['kl_mean']:.2e} +- {line['kl_error']:.0e}, top-1 {line['top1']:.2%}, "
            f"NLL {line['nll']:.4f}, {line['kv_bytes_per_token']:,} B of KV a token, "
            f"{line['weight_bytes']:,} B of weights"
        )


def main(forms: Mapping[str, Form], description: str) -> None:
    """Measure `forms` as the command line says."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--passages", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=512, help="of each passage")
    options = parser.parse_args()
    lines = measure(forms, options.passages, options.tokens)
    show(lines)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        result = {"machine": machine(), "model": MODEL, "text": "pydoc_data.topics", "forms": lines}
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    shared = load_model()
    dtypes = (BASE, "bfloat16", "float16", "int8")
    main({name: Form(shared, {"kv_cache_dtype": name}) for name in dtypes}, (__doc__ or "").splitlines()[0])
