"""Rows and table of the clients' results."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from benchmarks.clients.proxy import Exchange

MAX_ERROR_CHARS = 600
COLUMNS = ("client", "version", "turns", "tool round trips", "second prefix cached", "errors")


@dataclass(slots=True)
class Row:
    """Result of a client. `errors`: reported by the client itself.

    cached: share of a second conversation's prompt that was found in the prefix cache; None without such a
    conversation.
    """

    client: str
    version: str
    exchanges: list[Exchange]
    errors: list[str] = field(default_factory=list)
    cached: float | None = None

    @property
    def turns(self) -> int:
        return sum(exchange.is_answer and exchange.is_good for exchange in self.exchanges)

    @property
    def round_trips(self) -> int:
        return sum(exchange.is_continuation and exchange.is_good for exchange in self.exchanges)

    @property
    def all_errors(self) -> list[str]:
        """Errors that the client reported, and failed requests that it did not report."""
        failed = [(one, message) for one in self.exchanges for message in one.errors]
        reported = "\n".join(self.errors)
        unreported = ((one, message) for one, message in failed if message not in reported)
        return self.errors + [f"{one.method} {one.path}: {one.status} {message}" for one, message in unreported]

    def cells(self) -> Sequence[str]:
        cached = "" if self.cached is None else f"{self.cached:.1%}"
        counts = [str(self.turns), str(self.round_trips), cached, str(len(self.all_errors))]
        return [self.client, self.version, *counts]


def table(rows: Iterable[Row]) -> str:
    """Return the rows in markdown, then each error on a line of its own."""
    rows = list(rows)
    lines = [" | ".join(COLUMNS), " | ".join("---" for _ in COLUMNS)]
    lines += [" | ".join(row.cells()) for row in rows]
    errors = [f"{row.client}: {error[:MAX_ERROR_CHARS]}" for row in rows for error in row.all_errors]
    return "\n".join([f"| {line} |" for line in lines] + ([""] if errors else []) + errors)
