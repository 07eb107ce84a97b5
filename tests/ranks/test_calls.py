"""Encoding and decoding of a runner's calls."""

from array import array

import pytest

from roseinfer.core.adapters import AdapterLoad
from roseinfer.core.plan import (
    Admission,
    BlockCopy,
    GroupChanges,
    HostCopy,
    Row,
    RowResult,
    SlotChange,
    SlotCopy,
    StateChanges,
    StateSnapshot,
    StepPlan,
    TableChange,
    TokenMasks,
)
from roseinfer.core.sampling import SequenceParams
from roseinfer.ranks.calls import Call, CallReader, CallWriter, SampledDigest

PARAMS = SequenceParams(max_tokens=9, logit_bias=((3, -1.5),), bad_token_ids=((1, 2), (3,)), allowed_token_ids=(5,))
PLAN = StepPlan(
    7,
    [Row("a", 0, 4, 2, 1, True, 4, 1, (8, 9)), Row("b", 1, 0, 3, 3, True, 1, 0, (), (4, 5))],
    [Admission("b", 1, [4, 5, 6], 3, PARAMS, -(2**63), (2,), (1,))],
    [BlockCopy(1, 2, 3)],
    [5],
    5,
    2,
    (1,),
    [HostCopy(1, 2)],
    [HostCopy(3, 4)],
    (2, 0),
    (GroupChanges((TableChange(1, 2, (3, 4)),), (BlockCopy(5, 6, 7),)), GroupChanges()),
    StateChanges((SlotChange(1, 8),), (SlotCopy(2, 8),), (StateSnapshot(0, 2, 9),)),
    (AdapterLoad(2, "ab"),),
)


def test_a_plan_is_decoded_as_it_was_sent() -> None:
    message = CallWriter().submit(PLAN, SampledDigest())
    assert message[0] == Call.SUBMIT
    digest, plan = CallReader().submit(bytearray(message))
    assert plan == PLAN and digest == SampledDigest().digest()
    assert type(plan.rows[0]) is Row and type(plan.admitted[0].params) is SequenceParams
    assert type(plan.groups[0].tables[0]) is TableChange and plan.states is not None


@pytest.mark.parametrize("drafts_before", [(), (0, 7)], ids=["one mask a row", "after drafts"])
def test_masks_are_decoded_with_their_places(drafts_before: tuple[int, ...]) -> None:
    words = memoryview(array("I", [1, 2**32 - 1, 3, 4]))
    message = CallWriter().masked(TokenMasks((300, 1), words, drafts_before))
    assert message[0] == Call.MASKED
    rows, before, data = CallReader().masked(bytearray(message))
    assert (rows, before) == ((300, 1), drafts_before or (0, 0)) and data == words.cast("B")


def test_other_tokens_have_another_checksum() -> None:
    """Row, step and place among drafts all count."""
    histories = [
        [[("a", (1, 2)), ("b", (3,))]],
        [[("a", (1,)), ("b", (2, 3))]],
        [[("a", (1, 2))], [("b", (3,))]],
        [[("a", (1, 2)), ("b", (-1,))]],
    ]
    digests = set()
    for history in histories:
        sampled = SampledDigest()
        for step in history:
            sampled.add([RowResult(*row) for row in step])
        digests.add(sampled.digest())
    assert len(digests) == len(histories)
