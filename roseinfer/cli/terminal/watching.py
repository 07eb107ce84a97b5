"""Repeated readings of a server in a thread, so that a hanging server does not block the user."""

import threading
import time
from collections import deque
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from roseinfer.cli.terminal.metrics import Scrape, Window
from roseinfer.cli.terminal.overview import overview, records_of, scrape
from roseinfer.cli.terminal.remote import Remote, RemoteError

MAX_RATES = 120  # number of kept token rates


@dataclass(frozen=True, slots=True)
class WatchState:
    """Newest view. If the server does not respond, `error` and the Unix time since when. `tok_s`: recent token
    rates.
    """

    view: dict[str, Any] | None = None
    error: str | None = None
    lost_s: float | None = None
    tok_s: tuple[float, ...] = field(default=())


class Watcher:
    """Background reader, used as a context manager. `seen` is the newest state; `news` is set when it changes."""

    def __init__(self, remote: Remote, interval_s: float, slowest: int) -> None:
        self.seen = WatchState()
        self.news = threading.Event()
        self._remote = remote
        self._interval_s = interval_s
        self._slowest = slowest
        self._last: Scrape | None = None
        self._tok_s: deque[float] = deque(maxlen=MAX_RATES)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watching", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()

    def look(self) -> None:
        """Read once. A view needs two readings, so the first one after an outage has no rates."""
        try:
            now = scrape(self._remote)
            records = records_of(self._remote)
        except RemoteError as error:
            lost_s = self.seen.lost_s if self.seen.lost_s is not None else time.time()
            self._last = None
            self.seen = WatchState(self.seen.view, str(error), lost_s, self.seen.tok_s)
        else:
            window = Window(now if self._last is None else self._last, now)
            self._last = now
            view = overview(window, records, self._slowest, time.time())
            self._tok_s.append(view["machine"]["generation_tok_s"] or 0.0)
            self.seen = WatchState(view, tok_s=tuple(self._tok_s))
        self.news.set()

    def _run(self) -> None:
        while not self._over.is_set():
            began_s = time.monotonic()
            self.look()
            self._over.wait(max(0.0, self._interval_s - (time.monotonic() - began_s)))
