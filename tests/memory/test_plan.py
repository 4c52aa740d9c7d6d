"""Step plans: padding, buckets, dtypes."""

import numpy as np
import pytest

from inms_jax.errors import InvalidRequestError
from inms_jax.memory.plan import Copy, DecodeSlot, PrefillChunk, Row, Span, plan_decode, plan_prefill
from inms_jax.memory.tier import Scope


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


ROW = Row(ints(5, 6), ints(0, 0), ints(4, 2), ints(0, 4))
CHUNK = PrefillChunk(ints(8, 9), 4, ints(4, 5), ints(6, 6), ints(0, 1), (Copy(3, 6),), True)


def test_prefill_is_padded_with_the_null_page():
    plan = plan_prefill(CHUNK, ROW, num_tokens=4, num_entries=3, num_copies=2)
    assert plan.tokens.tolist() == [8, 9, 0, 0]
    assert plan.positions.tolist() == [4, 5, 0, 0]
    assert plan.write_page.tolist() == [6, 6, 0, 0]
    assert plan.write_slot.tolist() == [0, 1, 0, 0]
    assert plan.page.tolist() == [[5, 6, 0]]
    assert plan.begin.tolist() == [[0, 0, 0]]
    assert plan.end.tolist() == [[4, 2, 0]]
    assert plan.position.tolist() == [[0, 4, 0]]
    assert plan.shift.tolist() == [[0, 0, 0]]
    assert plan.num_entries.tolist() == [2]
    assert (plan.copy_src.tolist(), plan.copy_dst.tolist()) == ([3, 0], [6, 0])
    assert {getattr(plan, name).dtype for name in plan.__dataclass_fields__} == {np.dtype(np.int32)}


def test_decode_has_one_row_per_sequence():
    slots = [DecodeSlot(7, 6, 6, 2, (Copy(1, 6),)), DecodeSlot(8, 3, 9, 3, ())]
    other = Row(ints(9), ints(0), ints(4), ints(0))
    plan = plan_decode(slots, [ROW, other], num_rows=4, num_entries=2, num_copies=1)
    assert plan.tokens.tolist() == [7, 8, 0, 0]
    assert plan.page.tolist() == [[5, 6], [9, 0], [0, 0], [0, 0]]
    assert plan.num_entries.tolist() == [2, 1, 0, 0]
    assert plan.copy_dst.tolist() == [6]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [((1, 3, 1), "2 tokens .* bucket of 1"), ((2, 1, 1), "2 page entries .* of 1"), ((2, 2, 0), "1 copies .* of 0")],
)
def test_what_does_not_fit_its_bucket_is_refused_with_the_numbers(sizes, message):
    tokens, entries, copies = sizes
    with pytest.raises(InvalidRequestError, match=message):
        plan_prefill(CHUNK, ROW, num_tokens=tokens, num_entries=entries, num_copies=copies)


@pytest.mark.parametrize("token", [-1, 2**31])
def test_token_ids_outside_int32_are_refused(token):
    with pytest.raises(InvalidRequestError, match=str(token)):
        Span((1, token), Scope("t"))
