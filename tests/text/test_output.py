from roseinfer.text.output import CallArguments, CallEnd, CallStart, Reasoning, Text, joined


def test_neighbours_of_one_kind_are_joined() -> None:
    events = [Reasoning("a"), Reasoning("b"), Text("c"), Text("d"), Text("e"), Reasoning("f")]
    assert joined(events) == [Reasoning("ab"), Text("cde"), Reasoning("f")]


def test_calls_are_kept_apart() -> None:
    start = [CallStart(0, "x", "f"), CallArguments(0, "{"), CallArguments(0, "}"), CallEnd(0)]
    other = [CallArguments(1, "{"), CallArguments(2, "["), CallArguments(2, "]")]
    assert joined(start + other) == [
        CallStart(0, "x", "f"),
        CallArguments(0, "{}"),
        CallEnd(0),
        CallArguments(1, "{"),
        CallArguments(2, "[]"),
    ]


def test_joining_twice_changes_nothing() -> None:
    events = [Text("a"), Text("b"), CallEnd(0, complete=False), Text("c")]
    assert joined(joined(events)) == joined(events) == [Text("ab"), CallEnd(0, complete=False), Text("c")]


def test_events_of_different_kinds_differ() -> None:
    assert Text("a") != Reasoning("a")
