"""Which segments are read as fragments, after which root: decided from what was declared, and nothing else."""

import pytest

from inms_jax.engine.fragments import Decision, Explanation, Mode, Part, Reason, Rules, decide, place
from inms_jax.memory.plan import Span
from inms_jax.memory.tier import Scope, Tier

T, G, A = Scope("acme#1"), Scope("acme#1", "team#1"), Scope("acme#1", "team#1", "a#1")
RULES = Rules(block_size=16, link_tokens=4, bos=1)
FRAGMENT, PREFIX, DENSE = Mode.FRAGMENT, Mode.PREFIX, Mode.DENSE


def part(length: int, scope: Scope = T, mode: Mode = PREFIX, **options) -> Part:
    return Part(Span(tuple(range(length)), scope, published=scope is not A, name=f"{length}"), mode, **options)


def reasons(*parts: Part, rules: Rules = RULES) -> list[str]:
    return [decision.reason.value for decision in place([*parts, part(3, A)], rules)[1]][:-1]


def roots(*parts: Part, rules: Rules = RULES) -> list[list[int] | None]:
    """Lengths of the texts that each segment stands after; None for what is computed in place."""
    spans, _ = place([*parts, part(3, A)], rules)
    return [None if span.root is None else [len(one.tokens) for one in span.root] for span in spans][:-1]


def test_a_fragment_at_the_head_or_directly_after_its_root_is_computed_in_place_and_exact():
    assert reasons(part(64, T, FRAGMENT)) == ["at_root"]
    assert reasons(part(9), part(64, T, FRAGMENT)) == ["prefix", "at_root"]
    assert roots(part(9), part(64, T, FRAGMENT)) == [None, None]


def test_the_root_is_the_public_head_and_never_holds_a_fragment():
    parts = part(9), part(64, T, FRAGMENT), part(65, T, FRAGMENT), part(8), part(66, T, FRAGMENT)
    assert roots(*parts) == [None, None, [9], None, [9]]


def test_the_root_holds_only_what_every_reader_of_the_fragment_may_see():
    head = part(9), part(7, G), part(5, A)
    assert roots(*head, part(64, T, FRAGMENT))[-1] == [9]
    assert roots(*head, part(64, G, FRAGMENT))[-1] == [9, 7]


def test_dense_text_ends_the_head():
    assert roots(part(9), part(40, T, DENSE), part(8), part(64, T, FRAGMENT))[-1] == [9]
    assert reasons(part(9), part(40, T, DENSE)) == ["prefix", "dense"]


def test_without_a_public_head_the_declared_root_serves_else_bos_alone():
    declared = (Span((5, 6, 7), T, published=True),)
    assert roots(part(5, A), part(64, T, FRAGMENT, root=declared)) == [None, [3]]
    assert reasons(part(5, A), part(64, T, FRAGMENT, root=declared)) == ["private", "placed"]
    assert roots(part(5, A), part(64, T, FRAGMENT)) == [None, [1]]
    assert reasons(part(5, A), part(64, T, FRAGMENT)) == ["private", "no_root"]
    assert reasons(part(5, A), part(64, T, FRAGMENT), rules=Rules(16, 4, None)) == ["private", "no_bos"]


def test_a_declared_root_is_not_the_head_though_it_has_as_many_texts():
    declared = (Span((5, 6, 7), T, published=True),)
    assert roots(part(7, G), part(64, T, FRAGMENT, root=declared)) == [None, [3]]


def test_private_text_is_never_a_fragment():
    assert reasons(part(9), part(5, A), part(64, A, FRAGMENT)) == ["prefix", "private", "private"]


def test_the_end_of_a_context_is_computed_in_place():
    assert place([part(5, A), part(64, T, FRAGMENT)], RULES)[1][-1].reason is Reason.LAST


@pytest.mark.parametrize(
    ("length", "readers", "link", "reason"),
    [
        (64, 2, 4, "placed"),
        (64, 1, 4, "few_readers"),
        (4, 9, 4, "too_short"),  # nothing is left after the link
        (17, 2, 4, "too_short"),  # two pages and 8 link tokens against 34 tokens
        (17, 4, 4, "placed"),
        (64, 2, 32, "placed"),
        (64, 2, 33, "too_short"),
        (64, 2, 0, "placed"),
    ],
)
def test_a_canonical_form_must_take_less_room_than_its_readers_would(length, readers, link, reason):
    assert decide(length, readers, Rules(16, link, 1)).value == reason


def test_without_caching_nothing_is_placed():
    assert reasons(part(5, A), part(64, T, FRAGMENT), rules=Rules(16, 4, 1, caching=False))[-1] == "disabled"


def test_an_explanation_prints_as_a_table() -> None:
    placed = Decision("record", Tier.GROUP, 220, Mode.FRAGMENT, Reason.PLACED, 31, 16, 64)
    notes = Decision(None, Tier.PRIVATE, 7, Mode.PREFIX, Reason.PRIVATE)
    table = str(Explanation([notes, placed]))
    assert table.splitlines() == [
        "segment  tier     tokens  mode      read                  why      computed",
        "(1)      PRIVATE       7  prefix    in place              private         7",
        "record   GROUP       220  fragment  after its root of 31  placed         80",
    ]
