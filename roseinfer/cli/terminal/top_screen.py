"""Live screen of `roseinfer top`. The only module that needs rich."""

import contextlib
import os
import select
import sys
import time
from collections.abc import Iterator, Sequence

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from roseinfer.cli.terminal.remote import Remote
from roseinfer.cli.terminal.screen import printable
from roseinfer.cli.terminal.tables import COLUMN_GAP_CHARS, Row, Sheet, fitting, headline, machine_lines, sheets
from roseinfer.cli.terminal.watching import Watcher, WatchState

REDRAW_INTERVAL_S = 0.2
_BARS = " ▁▂▃▄▅▆▇█"
_BAD, _GOOD = 0.9, 0.99  # shares of kept promises that are coloured as bad and as good


def watch(remote: Remote, interval_s: float, slowest: int) -> None:
    """Show the view until q, Ctrl+C or Ctrl+D. Keep trying while the server is unreachable."""
    console = Console()
    with (
        Watcher(remote, interval_s, slowest) as watching,
        _keys() as pressed,
        contextlib.suppress(KeyboardInterrupt),
        Live(console=console, screen=True, auto_refresh=False) as live,
    ):
        drawn = (0, 0)
        while pressed(REDRAW_INTERVAL_S) not in ("q", "Q", "\x03", "\x04"):
            size = (console.size.width, console.size.height)
            if watching.news.is_set() or size != drawn:
                watching.news.clear()
                drawn = size
                live.update(picture(remote.url, watching.seen, size[0]), refresh=True)


@contextlib.contextmanager
def _keys() -> "Iterator[_Pressed]":
    """Yield a reader of single keys without echo; it reads nothing if standard input is not a terminal.

    Ctrl+C is read as a key: as a signal it would be lost where signals are ignored, as in a script's background jobs.
    """
    try:
        import termios
        import tty

        before = termios.tcgetattr(sys.stdin.fileno())
    except (ImportError, OSError, termios.error):
        yield _Pressed(None)
        return
    try:
        tty.setcbreak(sys.stdin.fileno(), termios.TCSADRAIN)
        keys = termios.tcgetattr(sys.stdin.fileno())
        keys[6][termios.VINTR] = bytes([os.fpathconf(sys.stdin.fileno(), "PC_VDISABLE")])
        termios.tcsetattr(sys.stdin.fileno(), termios.TCSADRAIN, keys)
        yield _Pressed(sys.stdin.fileno())
    finally:
        termios.tcsetattr(sys.stdin.fileno(), termios.TCSADRAIN, before)


class _Pressed:
    """Reader of keys: called with a timeout in seconds, it returns the pressed key or ""."""

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor

    def __call__(self, wait_s: float) -> str:
        if self._descriptor is None:
            time.sleep(wait_s)
            return ""
        ready, _, _ = select.select([self._descriptor], [], [], wait_s)
        return (os.read(self._descriptor, 1).decode("ascii", "replace") or "\x04") if ready else ""


def picture(url: str, seen: WatchState, width: int) -> RenderableType:
    """Draw the whole screen, `width` columns wide."""
    parts: list[RenderableType] = [Text(headline(url, seen.view, time.time()), style="bold", overflow="ellipsis")]
    if seen.error is not None and seen.lost_s is not None:
        ago_s = time.time() - seen.lost_s
        parts.append(Text(f"{printable(seen.error)}; retrying for {ago_s:.0f} s", style="bold red"))
    if seen.view is not None:
        faded = "dim" if seen.error is not None else ""
        parts += [Text(line, style=faded) for line in machine_lines(seen.view)]
        parts.append(Text(_bars(seen.tok_s, width), style="green"))
        parts += [_table(sheet, faded, width) for sheet in sheets(seen.view)]
    elif seen.error is None:
        parts.append(Text("reading ...", style="dim"))
    parts.append(Text("q leaves", style="dim"))
    return Group(*parts)


def _table(sheet: Sheet, style: str, width: int) -> RenderableType:
    if not sheet.rows:
        return Text(f"\n{sheet.title}: {sheet.missing}", style="dim")
    table = Table(
        title=f"\n{sheet.title}",
        title_justify="left",
        title_style="bold",
        box=None,
        padding=(0, COLUMN_GAP_CHARS, 0, 0),
    )
    columns = fitting(sheet, width)
    for column, its_width in columns:
        table.add_column(
            column.title,
            justify="right" if column.right else "left",
            style=style,
            header_style="dim",
            no_wrap=True,
            width=its_width,
            overflow="ellipsis",
        )
    for row in sheet.rows:
        cells = [Text(printable(column.write(row))) for column, _ in columns]
        table.add_row(*cells, style=_colour(row))
    return table


def _colour(row: Row) -> str | None:
    outcome = str(row.get("outcome"))
    if outcome == "rejected":
        return "red"
    if outcome.startswith("missed"):
        return "yellow"
    kept = row.get("attainment_lately")
    if not isinstance(kept, float):
        return None
    return "red" if kept < _BAD else "green" if kept >= _GOOD else "yellow"


def _bars(values: Sequence[float], width: int) -> str:
    """Draw the newest values as bars after their label, scaled to the largest."""
    newest = values[-max(1, min(60, width - 30)) :]
    most = max(newest, default=0.0)
    bars = "".join(_BARS[round(value / most * (len(_BARS) - 1))] if most else " " for value in newest)
    return f"tok/s {bars} {most:,.0f} at most"
