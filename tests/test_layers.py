"""The structure that the design promises: host and device apart, no upward import, packaging as on disk."""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "inms_jax"

# Host side: may not import jax. Folders stand for all their files.
HOST = [
    "config.py",
    "errors.py",
    "capacity.py",
    "capacity_report.py",
    "memory",
    "text",
    "shelf.py",
    "memory_store.py",
    "engine/fragments.py",
    "engine/gate.py",
    "engine/buckets.py",
    "engine/host_pages.py",
    "engine/sweep.py",
    "engine/repair_choice.py",
    "engine/segment.py",
    "engine/conversation.py",
    "engine/request.py",
    "engine/scheduler.py",
    "engine/pending.py",
    "engine/report.py",
    "engine/levels.py",
    "engine/outputs.py",
    "engine/accounts.py",
]

# From bottom to top; a file may import from its own floor (without cycles) and from the floors below.
FLOORS: list[list[str]] = [
    ["errors", "config"],
    ["kernels"],
    ["cache"],
    ["models", "memory", "text"],
    ["weights"],
    ["engine"],
    [
        "llm",
        "isolation",
        "tenants",
        "homes",
        "membership",
        "agents",
        "shelf",
        "stats",
        "snapshots",
        "preload",
        "plain",
        "scoring",
        "speaker",
        "memory_store",
    ],
    ["eval", "metrics", "langgraph_memory", "capacity", "capacity_report"],
    ["cli", "__init__"],
]


def sources() -> list[Path]:
    return sorted(PACKAGE.glob("*.py")) + sorted(
        path
        for folder in PACKAGE.iterdir()
        if folder.is_dir() and folder.name != "__pycache__"
        for path in folder.rglob("*.py")
    )


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


def floor(module: str) -> int:
    head = module.split(".")[0]
    for number, names in enumerate(FLOORS):
        if head in names:
            return number
    raise AssertionError(f"{module} stands on no floor of the house: add it to FLOORS")


def test_host_files_import_no_jax() -> None:
    checked = 0
    for entry in HOST:
        path = PACKAGE / entry
        assert path.exists(), f"{entry} is listed as a host file and does not exist"
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            guilty = {name for name in imports(file) if name.split(".")[0] in {"jax", "jaxlib", "flax"}}
            assert not guilty, f"{file.relative_to(ROOT)} is host side and imports {guilty}"
            checked += 1
    assert checked > 10


def test_memory_loads_without_jax() -> None:
    script = "import sys, inms_jax.memory.manager; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=False).returncode == 0


def test_no_import_runs_up() -> None:
    known = {module_name(path) for path in sources()}
    edges: dict[str, set[str]] = {}
    for path in sources():
        module = module_name(path)
        edges[module] = set()
        for name in imports(path):
            if not name.startswith("inms_jax."):
                continue
            target = name.removeprefix("inms_jax.")
            if target not in known:
                continue
            edges[module].add(target)
            assert floor(target) <= floor(module), f"{module} imports {target}, which stands above it"
    for module, targets in edges.items():
        for target in targets:
            assert module not in edges[target], f"{module} and {target} import each other"


def test_prediction_imports_nothing_of_ours() -> None:
    assert not {name for name in imports(PACKAGE / "memory/prediction.py") if name.startswith("inms_jax")}


def test_package_list_matches_the_folders() -> None:
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    on_disk = {"inms_jax", "inms_jax.configs"} | {
        "inms_jax." + ".".join(path.parent.relative_to(PACKAGE).parts) for path in sources() if path.parent != PACKAGE
    }
    assert listed == on_disk


@pytest.mark.parametrize("name", ["models", "kernels", "configs"])
def test_links_point_at_the_real_folders(name: str) -> None:
    assert (PACKAGE / name).is_symlink()
    assert (PACKAGE / name).resolve() == (ROOT / name).resolve()
    assert not (ROOT / name / "__init__.py").exists()


def test_no_file_is_too_long() -> None:
    for path in sources():
        lines = len(path.read_text().splitlines())
        assert lines <= 400, f"{path.relative_to(ROOT)} has {lines} lines: is it one concept?"
