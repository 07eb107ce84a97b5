"""Table of faults on Ray: what a line says of streams and probes. The cases themselves need a cluster."""

from collections import Counter

from benchmarks.ray_faults.load import REFUSED, Load, Seen, Stream
from benchmarks.ray_faults.rows import HEADER, Row, markdown, row_of

TEXTS = ["one", "two", "three"]


def seen(*streams: Stream) -> Seen:
    return Seen(list(streams))


def well(text: str, pause_s: float = 0.1) -> Stream:
    return Stream(text, first_s=0.2, longest_gap_s=pause_s, error="")


def test_a_line_counts_how_streams_ended() -> None:
    streams = seen(well("one"), Stream("tw", first_s=1.5, error="cut"), Stream(error="refused"))
    streams.statuses = Counter({503: 2, 200: 3})
    streams.probes = [(0.0, 200), (1.0, REFUSED), (1.5, REFUSED), (2.0, 503), (2.5, 200)]
    row = row_of("part", "a part", streams, TEXTS, 4.0, cut=True)
    assert (row.finished, row.cut, row.failed, row.waiting, row.other_text) == (1, 1, 1, 0, 0)
    assert (row.pause_s, row.first_token_s, row.refused_s) == (0.1, 1.5, 1.0)
    assert row.statuses == {"404": 0, "500": 0, "503": 3}
    assert row.wrong == "1 failed before the first token"


def test_a_line_says_what_should_not_have_happened() -> None:
    assert row_of("part", "a part", seen(well("one"), well("two")), TEXTS, 1.0, cut=False).wrong == ""
    other = seen(well("one"), well("2"), Stream("th", first_s=0.1, error="cut"))
    assert row_of("part", "a part", other, TEXTS, 1.0, cut=False).wrong == "1 of another text, 1 cut"
    late = seen(Stream("o", first_s=0.1))
    late.probes = [(0.0, 404)]
    expected = "1 without an end, 1 answers 404, never whole again"
    assert row_of("part", "a part", late, TEXTS, None, cut=True).wrong == expected


def test_each_line_has_all_columns() -> None:
    rows = [row_of("part", "a part", seen(well("one")), TEXTS, None, cut=True), Row("port", "a port", note="one line")]
    assert {line.count("|") for line in markdown(rows).splitlines()} == {len(HEADER) + 1}


def test_a_longer_load_begins_like_a_shorter_one() -> None:
    assert Load(8).arrivals_s()[:4] == Load(4).arrivals_s() == sorted(Load(4).arrivals_s())
    assert Load(4, seed=1).arrivals_s() != Load(4).arrivals_s()
    assert Load(4).prompt(0) != Load(4).prompt(1)
