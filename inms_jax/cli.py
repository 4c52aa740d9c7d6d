"""The command line: `inms-jax demo | map | eval | generate | calibrate | convert | models | plan`.

Errors are one line on stderr and exit code 2, the traceback only with --debug. Everything heavy is imported inside the
command that needs it, so that --help is fast.
"""

import argparse
import json
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from inms_jax import __version__
from inms_jax.errors import InmsError

DEFAULT_MODEL = "smollm2-135m-instruct"
DEFAULT_SCENARIO = Path(__file__).parent / "configs/experiments/three_agents.toml"
ERROR, INTERRUPTED = 2, 130


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        print(f"inms-jax: error: {_one_line(message)} (see `{self.prog} --help`)", file=sys.stderr)
        raise SystemExit(ERROR)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit code."""
    options = _parser().parse_args(arguments)
    command: Callable[[argparse.Namespace], None] = options.command
    try:
        command(options)
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:
        if options.debug:
            traceback.print_exc()
        known = isinstance(error, InmsError | OSError)
        text = str(error) if known else f"{type(error).__name__}: {error} (unexpected; --debug shows where)"
        print(f"inms-jax: error: {_one_line(text)}", file=sys.stderr)
        return ERROR
    return 0


def _parser() -> argparse.ArgumentParser:
    common = _Parser(add_help=False)
    common.add_argument("--json", type=Path, metavar="FILE", help="also write the result to FILE as JSON")
    common.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser = _Parser(prog="inms-jax", description="Tiered KV-cache sharing for several agents on one model.")
    parser.add_argument("--version", action="version", version=f"inms-jax {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    demo = commands.add_parser(
        "demo", parents=[common], help="three agents, the same work without and with sharing; JSON and pictures"
    )
    demo.add_argument(
        "--config", type=Path, default=DEFAULT_SCENARIO, metavar="FILE", help=f"default: {DEFAULT_SCENARIO.name}"
    )
    demo.add_argument("--out", type=Path, default=Path("out/demo"), metavar="DIR", help="default: %(default)s")
    demo.set_defaults(command=_demo)

    show = commands.add_parser(
        "map", parents=[common], help="run a scenario and show what every page holds; text and a picture"
    )
    show.add_argument(
        "--config", type=Path, default=DEFAULT_SCENARIO, metavar="FILE", help=f"default: {DEFAULT_SCENARIO.name}"
    )
    show.add_argument("--png", type=Path, default=Path("out/map.png"), metavar="FILE", help="default: %(default)s")
    show.set_defaults(command=_map)

    generate = commands.add_parser("generate", parents=[common], help="continue a text, printed as it comes")
    generate.add_argument(
        "--model", default=DEFAULT_MODEL, help="a known name, a .gguf file or a Hugging Face folder (%(default)s)"
    )
    generate.add_argument("--prompt", required=True)
    for name, kind, text in _SAMPLING:
        generate.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar=kind.__name__.upper(), help=text)
    generate.add_argument("--stop", action="append", metavar="TEXT", help="end before this text; may be repeated")
    generate.add_argument("--ignore-eos", action="store_true", default=None, help="go on after the end token")
    generate.set_defaults(command=_generate)

    evaluate = commands.add_parser(
        "eval", parents=[common], help="run an experiment into a folder; a run that was stopped goes on"
    )
    evaluate.add_argument("config", metavar="CONFIG", help="a TOML file, or the name of a built-in experiment")
    evaluate.add_argument("--out", type=Path, metavar="DIR", help="default: out/eval/ and the name of the file")
    evaluate.add_argument("--tiny", action="store_true", help="with the values of [tiny], which take seconds")
    evaluate.set_defaults(command=_eval)

    calibrate = commands.add_parser(
        "calibrate", parents=[common], help="measure what fragments cost a model, and allow them if that is little"
    )
    calibrate.add_argument("model", metavar="MODEL", help="what --model of generate takes")
    calibrate.add_argument(
        "--link-tokens", type=int, default=16, metavar="INT", help="computed in place at each fragment (%(default)s)"
    )
    calibrate.add_argument("--documents", type=int, default=40, metavar="INT", help="of each task (%(default)s)")
    calibrate.add_argument("--seed", type=int, default=0, metavar="INT")
    calibrate.set_defaults(command=_calibrate)

    convert = commands.add_parser(
        "convert", parents=[common], help="write a model as a checkpoint that restores straight to its devices"
    )
    convert.add_argument("model", metavar="MODEL", help="what --model of generate takes")
    convert.add_argument("out", type=Path, metavar="OUT", help="a new directory; it then is a model of its own")
    convert.add_argument(
        "--dtype", default="bfloat16", metavar="NAME", help="bfloat16, float16 or float32 (%(default)s)"
    )
    convert.add_argument("--weight-dtype", default="auto", help="int8: matrices of layers with scales; auto: --dtype")
    convert.set_defaults(command=_convert)

    models = commands.add_parser("models", parents=[common], help="which models are known, and which are here")
    models.set_defaults(command=_models)

    plan = commands.add_parser(
        "plan", parents=[common], help="what fits on a device: weights, pages, agents without and with sharing"
    )
    plan.add_argument("model", metavar="MODEL", help="a preset such as llama-2-7b, or a file or folder with its config")
    plan.add_argument("--memory", required=True, metavar="SIZE", help='of the device, such as "80GB" or "16GiB"')
    plan.add_argument("--agents", type=int, required=True, metavar="INT")
    plan.add_argument(
        "--context", type=int, required=True, metavar="INT", help="tokens of each agent, answers included"
    )
    plan.add_argument("--public", type=float, required=True, metavar="FLOAT", help="published part of it, 0 to 1")
    plan.add_argument(
        "--texts", type=int, default=1, metavar="INT", help="published texts it consists of (%(default)s)"
    )
    plan.add_argument("--block-size", type=int, default=128, metavar="INT", help="tokens of a page (%(default)s)")
    plan.add_argument("--dtype", default="bfloat16", help="of the weights (%(default)s)")
    plan.add_argument("--weight-dtype", default="auto", help="int8: matrices of layers with scales; auto: --dtype")
    plan.add_argument("--kv-cache-dtype", default="auto", help="of the pages; auto is that of the weights")
    plan.set_defaults(command=_plan)
    return parser


_SAMPLING: tuple[tuple[str, type, str], ...] = (
    ("max_tokens", int, "tokens to generate at most (16)"),
    ("min_tokens", int, "tokens to generate at least (0)"),
    ("temperature", float, "0 is greedy (1.0)"),
    ("top_p", float, "keep the most likely tokens of this total probability (1.0)"),
    ("top_k", int, "keep this many of the most likely tokens; 0 keeps all (0)"),
    ("min_p", float, "keep tokens at least this likely, relative to the most likely one (0.0)"),
    ("repetition_penalty", float, "above 1 discourages what was said before (1.0)"),
    ("seed", int, "seed of this request"),
)


def _demo(options: argparse.Namespace) -> None:
    from rich.console import Console

    from inms_jax.eval.demo import show_demo

    result = show_demo(options.config, options.out, Console())
    _write_json(options.json, result.to_json())


def _map(options: argparse.Namespace) -> None:
    from rich.console import Console

    from inms_jax.eval.map_run import show_map

    maps = show_map(options.config, options.png, Console())
    _write_json(options.json, {"maps": [pages.to_json() for pages in maps]})


def _generate(options: argparse.Namespace) -> None:
    from inms_jax.config import SamplingParams

    names = [name for name, _, _ in _SAMPLING] + ["stop", "ignore_eos"]
    asked = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    params = SamplingParams(**asked)  # a bad value is refused before the model is loaded

    from inms_jax.llm import LLM

    text, token_ids, finish_reason, ttft_s = "", list[int](), None, None
    with LLM(options.model) as llm:
        for delta in llm.stream(options.prompt, params):
            [part] = delta.outputs
            print(part.text, end="", flush=True)
            text += part.text
            token_ids += part.token_ids
            finish_reason, ttft_s = part.finish_reason, delta.ttft_s
    print()
    result = {
        "model": options.model,
        "prompt": options.prompt,
        "text": text,
        "token_ids": token_ids,
        "finish_reason": finish_reason,
        "ttft_s": ttft_s,
    }
    _write_json(options.json, result)


def _eval(options: argparse.Namespace) -> None:
    from rich.console import Console

    from inms_jax.eval.experiment import find_config, load_config
    from inms_jax.eval.experiment_run import run_experiment

    config = load_config(find_config(options.config), tiny=options.tiny)
    out = options.out or Path("out/eval") / (config.name + ("-tiny" if options.tiny else ""))
    results = run_experiment(config, out, Console())
    _write_json(options.json, results.to_json())


def _calibrate(options: argparse.Namespace) -> None:
    from rich.console import Console

    from inms_jax.eval.calibrate import run_calibration

    found = run_calibration(
        options.model,
        link_tokens=options.link_tokens,
        documents=options.documents,
        seed=options.seed,
        console=Console(),
    )
    _write_json(options.json, found)


def _convert(options: argparse.Namespace) -> None:
    from inms_jax.weights.convert import convert

    record = convert(options.model, options.out, dtype=options.dtype, weight_dtype=options.weight_dtype)
    size = sum(file.stat().st_size for file in options.out.rglob("*") if file.is_file())
    print(f"{options.out}: {record.config.name} in {record.dtype}, {size:,} bytes")
    result = {
        "model": record.model_id,
        "out": str(options.out),
        "dtype": record.dtype,
        "weight_dtype": record.weight_dtype,
        "bytes": size,
        "weights_version": record.weights_version,
    }
    _write_json(options.json, result)


def _models(options: argparse.Namespace) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from inms_jax.weights import default_cache_dir, list_models

    cache = default_cache_dir()
    found = list_models(cache)
    table = Table(box=box.SIMPLE_HEAD)
    for title in ("model", "bytes", "licence", "comes from", "cached"):
        table.add_column(title, justify="right" if title == "bytes" else "left", no_wrap=title != "comes from")
    for model in found:
        table.add_row(model.name, f"{model.size:,}", model.licence, model.requirement, "yes" if model.cached else "no")
    console = Console()
    console.print(table)
    console.print(f"Cache: {cache}. A path to a .gguf file or to a Hugging Face folder works too.", soft_wrap=True)
    rows = [
        {
            "name": model.name,
            "bytes": model.size,
            "licence": model.licence,
            "requirement": model.requirement,
            "cached": model.cached,
            "path": model.path,
        }
        for model in found
    ]
    _write_json(options.json, {"cache_dir": str(cache), "models": rows})


def _plan(options: argparse.Namespace) -> None:
    from rich.console import Console

    from inms_jax.capacity import Work, model_preset, plan_capacity
    from inms_jax.capacity_report import print_capacity

    found = plan_capacity(
        model_preset(options.model),
        options.memory,
        Work(agents=options.agents, context=options.context, public=options.public, texts=options.texts),
        block_size=options.block_size,
        dtype=options.dtype,
        weight_dtype=options.weight_dtype,
        kv_cache_dtype=options.kv_cache_dtype,
    )
    print_capacity(found, Console())
    _write_json(options.json, found.to_json())


def _write_json(path: Path | None, value: dict[str, Any]) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def _one_line(text: str) -> str:
    return " ".join(text.split())


if __name__ == "__main__":
    sys.exit(main())
