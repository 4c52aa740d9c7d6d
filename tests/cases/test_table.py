"""docs/cases.md names tests that exist."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROWS = {
    "A": (1, 2, 3, 5, 6, 7, 8, 10, 11, 12, 14, 15, 16),
    "B": (1, 2, 3, 4, 5, 8),
    "C": (1, 2, 3, 4, 6, 7, 9, 10, 11, 12, 13, 14, 15),
    "D": (1, 2, 3, 4, 5, 7, 8, 9, 12, 13),
    "E": (1, 3),
    "F": (1, 2, 3, 4, 5, 6, 9, 10, 11, 12),
    "H": (1, 2, 4, 5),
    "I": (2, 3, 4, 5, 6, 7),
    "J": (2, 3),
}


def names_in(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return found


def test_every_row_is_there_and_names_tests_that_exist() -> None:
    text = (ROOT / "docs/cases.md").read_text()
    rows = re.findall(r"^\| ([A-J]\d+) \| (.+?) \| (.+) \|$", text, flags=re.MULTILINE)
    assert [name for name, _, _ in rows] == [f"{part}{n}" for part, numbers in ROWS.items() for n in numbers]
    for name, behaviour, shown in rows:
        tests = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", shown)
        assert tests or len(shown) > 30, f"{name}: neither a test nor a reason"
        assert len(behaviour) > 20
        for path, test in tests:
            assert test.lower().startswith("test"), f"{name}: {test} is no test"
            assert test in names_in(ROOT / path), f"{name}: there is no {path}::{test}"
