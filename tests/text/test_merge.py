"""System messages under each rule: order is kept, nothing is lost, every part is one message."""

import itertools

import pytest

from inms_jax.text.merge import Message, Rendered, SystemRule, merge


def run(roles: str, rule: SystemRule) -> list[tuple[str, str]]:
    """Messages by the first letter of their role; contents are the letter and a number."""
    names = {"s": "system", "u": "user", "a": "assistant"}
    messages = [Message(names[letter], f"{letter}{i}") for i, letter in enumerate(roles)]
    return [(r.role[0], "+".join(r.parts)) for r in merge(messages, rule)]


def test_kept_as_they_are() -> None:
    assert run("ssuas", SystemRule.KEEP) == [("s", "s0"), ("s", "s1"), ("u", "u2"), ("a", "a3"), ("s", "s4")]


@pytest.mark.parametrize(
    ("roles", "expected"),
    [
        ("ssu", [("s", "s0+s1"), ("u", "u2")]),
        ("suasu", [("s", "s0"), ("u", "u1"), ("a", "a2"), ("u", "s3+u4")]),
        ("usa", [("u", "u0+s1"), ("a", "a2")]),
        ("uas", [("u", "u0"), ("a", "a1"), ("u", "s2")]),
        ("s", [("s", "s0")]),
    ],
)
def test_one_at_the_head(roles: str, expected: list[tuple[str, str]]) -> None:
    assert run(roles, SystemRule.HEAD) == expected


@pytest.mark.parametrize(
    ("roles", "expected"),
    [
        ("ssu", [("u", "s0+s1+u2")]),
        ("sa", [("u", "s0"), ("a", "a1")]),
        ("uss", [("u", "u0+s1+s2")]),
        ("suasa", [("u", "s0+u1"), ("a", "a2"), ("u", "s3"), ("a", "a4")]),
    ],
)
def test_none_at_all(roles: str, expected: list[tuple[str, str]]) -> None:
    assert run(roles, SystemRule.USER) == expected


@pytest.mark.parametrize("rule", list(SystemRule))
def test_no_part_is_lost_or_moved(rule: SystemRule) -> None:
    for length in range(1, 6):
        for roles in itertools.product("sua", repeat=length):
            parts = [part for _, text in run("".join(roles), rule) for part in text.split("+")]
            assert parts == [f"{letter}{i}" for i, letter in enumerate(roles)]


def test_merged_texts_are_joined_by_an_empty_line() -> None:
    assert Rendered("user", ("a", "b")).content == "a\n\nb"
