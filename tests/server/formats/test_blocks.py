"""Events of a parser as blocks that open, grow and close."""

import pytest

from roseinfer.server.formats.blocks import Blocks, Change, Closed, Grown, Kind, Opened
from roseinfer.text.output import CallArguments, CallStart, Event, Reasoning, Text, TextBreak
from tests.server.formats.played import BUSY, call


def changes(events: list[Event], complete: bool = True) -> list[Change]:
    blocks = Blocks()
    return [change for event in events for change in blocks.add(event)] + list(blocks.end(complete))


def left(events: list[Event], complete: bool = True) -> list[tuple[str, str, bool]]:
    """(kind, text, complete) of the blocks that are left behind."""
    blocks = Blocks()
    for event in events:
        list(blocks.add(event))
    list(blocks.end(complete))
    return [(block.kind.value, block.text, block.complete) for block in blocks.all]


def test_every_block_opens_grows_and_closes_before_the_next() -> None:
    found = changes(BUSY)
    order = [(type(change), change.block.index) for change in found]
    assert order == [
        (Opened, 0), (Grown, 0), (Grown, 0), (Closed, 0),
        (Opened, 1), (Grown, 1), (Grown, 1), (Closed, 1),
        (Opened, 2), (Grown, 2), (Grown, 2), (Closed, 2),
        (Opened, 3), (Closed, 3),
    ]  # fmt: skip
    texts = [change.text for change in found if isinstance(change, Grown)]
    assert texts == ["Hm, ", "so.", "\n\nLet me", " see.\n", '{"at":', ' "x"}']
    assert [change.block.kind for change in found if isinstance(change, Opened)] == [
        Kind.REASONING, Kind.TEXT, Kind.CALL, Kind.CALL,
    ]  # fmt: skip
    assert [(b.name, b.call_id) for b in (found[-1].block, found[-3].block)] == [("wait", "call_1"), ("look", "call_0")]


@pytest.mark.parametrize(
    ("events", "texts"),
    [
        ([Text("\n\n"), *call(0, "f", "{}")], [("call", "{}", True)]),
        ([*call(0, "f", "{}"), Text("\n")], [("call", "{}", True)]),
        ([Reasoning("a"), Text(" "), Reasoning("b")], [("reasoning", "ab", True)]),
        ([Text(" "), Text("\n"), Text("a "), Text("\n")], [("text", " \na \n", True)]),
        ([Reasoning("a"), Text("\n")], [("reasoning", "a", True), ("text", "\n", True)]),
        ([Text(" ")], [("text", " ", True)]),
        ([Text("a"), TextBreak(), Text("b")], [("text", "a", True), ("text", "b", True)]),
        ([Text("")], []),
        ([], []),
    ],
)
def test_white_space_alone_before_or_behind_a_call_is_no_text(
    events: list[Event], texts: list[tuple[str, str, bool]]
) -> None:
    assert left(events) == texts


def test_what_was_cut_is_not_complete() -> None:
    assert left([Reasoning("a"), Text("b")], complete=False) == [("reasoning", "a", True), ("text", "b", False)]
    cut = [*call(0, "f", "{}"), *call(1, "g", '{"a', complete=False)]
    assert left(cut, complete=False) == [("call", "{}", True), ("call", '{"a', False)]


def test_text_behind_a_call_is_a_block_of_its_own() -> None:
    events = [Text("a"), *call(0, "f", "{}"), Text("b")]
    assert left(events) == [("text", "a", True), ("call", "{}", True), ("text", "b", True)]


def test_a_call_without_arguments_does_not_grow() -> None:
    found = changes([CallStart(0, "c", "f"), CallArguments(0, "")])
    assert [type(change) for change in found] == [Opened, Closed]
