"""Lines of the table, and their text."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from benchmarks.ray_faults.load import Seen

STATUSES = (404, 500, 503)
HEADER = ("killed", "same text", "cut", "failed", "pause", "first token", "refused", "404", "500", "503", "whole again")


@dataclass(frozen=True, slots=True)
class Row:
    """One case. `finished`: streams with the text of an undisturbed run. `failed`: before their first token.

    `first_token_s`: the latest. `refused_s`: seconds in which connections were refused. `whole_s`: until all parts were
    there again, None if they never were. `note`: what no column says. `wrong`: what should not have happened, empty if
    all is well.
    """

    case: str
    killed: str
    streams: int = 0
    finished: int = 0
    other_text: int = 0
    cut: int = 0
    failed: int = 0
    waiting: int = 0
    pause_s: float | None = None
    first_token_s: float | None = None
    refused_s: float = 0.0
    statuses: dict[str, int] = field(default_factory=dict)
    errors: dict[str, int] = field(default_factory=dict)
    probes: dict[str, int] = field(default_factory=dict)
    whole_s: float | None = None
    note: str = ""
    wrong: str = ""

    def cells(self) -> list[str]:
        if not self.streams:
            return [self.killed, self.note, *[""] * (len(HEADER) - 3), _seconds(self.whole_s)]
        counts = [f"{self.finished} of {self.streams}", str(self.cut + self.waiting), str(self.failed)]
        times = [_seconds(value) for value in (self.pause_s, self.first_token_s, self.refused_s)]
        statuses = [str(self.statuses.get(str(status), 0)) for status in STATUSES]
        return [self.killed, *counts, *times, *statuses, _seconds(self.whole_s) or "never"]


def row_of(
    case: str, killed: str, seen: Seen, texts: Sequence[str], whole_s: float | None, *, cut: bool, note: str = ""
) -> Row:
    """Return the line of a load. `texts`: of undisturbed streams. `cut`: streams may be cut in this case."""
    finished, begun = seen.finished(), [stream.first_s for stream in seen.streams if stream.first_s is not None]
    same = sum(stream.error == "" and stream.text == text for stream, text in zip(seen.streams, texts, strict=False))
    return Row(
        case,
        killed,
        streams=len(seen.streams),
        finished=same,
        other_text=len(finished) - same,
        cut=len(seen.cut()),
        failed=len(seen.failed()),
        waiting=len(seen.waiting()),
        pause_s=max((stream.longest_gap_s for stream in finished), default=None),
        first_token_s=max(begun, default=None),
        refused_s=seen.refused_s(),
        statuses={str(status): seen.answers(status) for status in STATUSES},
        errors=dict(Counter(stream.error for stream in seen.streams if stream.error)),
        probes={str(end): count for end, count in Counter(end for _, end in seen.probes).items()},
        whole_s=whole_s,
        note=note,
        wrong=", ".join(_wrong(seen, len(finished) - same, whole_s, cut)),
    )


def _wrong(seen: Seen, others: int, whole_s: float | None, cut: bool) -> Iterator[str]:
    counts = {
        "of another text": others,
        "failed before the first token": len(seen.failed()),
        "cut": 0 if cut else len(seen.cut()),
        "without an end": len(seen.waiting()),
        "answers 404": seen.answers(404),
    }
    yield from (f"{count} {name}" for name, count in counts.items() if count)
    if whole_s is None:
        yield "never whole again"


def markdown(rows: Sequence[Row]) -> str:
    lines = [HEADER, ("---",) * len(HEADER), *(row.cells() for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.2f} s" if value < 10 else f"{value:.0f} s"
