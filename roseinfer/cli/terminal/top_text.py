"""Text output of `roseinfer top --once`, without colours and rich."""

from collections.abc import Mapping, Sequence
from typing import Any

from roseinfer.cli.terminal.screen import printable
from roseinfer.cli.terminal.tables import Sheet, headline, machine_lines, sheets


def as_text(view: Mapping[str, Any]) -> str:
    parts = [headline(view["url"], view, view["at"]), *machine_lines(view)]
    for sheet in sheets(view):
        parts += ["", sheet.title, *_table(sheet)]
    return "\n".join(parts)


def _table(sheet: Sheet) -> Sequence[str]:
    if not sheet.rows:
        return [f"  {sheet.missing}"]
    titles = [column.title for column in sheet.columns]
    cells = [titles, *([printable(column.write(row)) for column in sheet.columns] for row in sheet.rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  " + _line(line, widths, sheet) for line in cells]


def _line(cells: Sequence[str], widths: Sequence[int], sheet: Sheet) -> str:
    padded = [
        cell.rjust(width) if column.right else cell.ljust(width)
        for cell, width, column in zip(cells, widths, sheet.columns, strict=True)
    ]
    return "  ".join(padded).rstrip()
