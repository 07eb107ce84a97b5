"""Write the tables of vLLM's options in docs/from-vllm.md: `python .ci/vllm_table.py`.

The tables are made from `roseinfer/config/vllm_names.py`, which the command line reads, so they cannot differ.
"""

import sys
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from roseinfer.config.vllm_names import SECTIONS, Ignored, IgnoredValue, RefusedValue, VllmOption, Works  # noqa: E402

PAGE = ROOT / "docs" / "from-vllm.md"
BEGIN, END = "<!-- written by .ci/vllm_table.py -->", "<!-- end of what .ci/vllm_table.py writes -->"
MAX_NAMED_VALUES = 6


def tables() -> str:
    """Return a heading and a table for each section."""
    return "\n\n".join(f"### {title}\n{_table(options)}" for title, options in SECTIONS.items())


def page(text: str) -> str:
    """Return the page with new tables."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{tables()}\n\n{END}{after}"


def _table(options: Iterable[VllmOption]) -> str:
    rows = [f"| {flags} | {meaning} |" for flags, meaning in _rows(options)]
    return "\n".join(["| vLLM | here |", "| --- | --- |", *rows])


def _rows(options: Iterable[VllmOption]) -> Iterator[tuple[str, str]]:
    """Yield flags and meaning; options of the same meaning share a row."""
    ordered = sorted(options, key=lambda option: _rank(option))
    for meaning, group in groupby(ordered, key=_meaning):
        yield ", ".join(flag for option in group for flag in _flags(option)), meaning


def _rank(option: VllmOption) -> tuple[int, str]:
    kinds = (Works, Ignored)
    return next((place for place, kind in enumerate(kinds) if isinstance(option, kind)), len(kinds)), _meaning(option)


def _flags(option: VllmOption) -> list[str]:
    return [f"`{flag}`" for flag in (f"--{option.name.replace('_', '-')}", *option.short)]


def _meaning(option: VllmOption) -> str:
    if isinstance(option, Ignored):
        return f"ignored: {option.why}"
    if isinstance(option, Works):
        return "; ".join(_how_it_works(option))
    allowed = f" (accepted: {', '.join(f'`{value}`' for value in option.harmless if value)})" if option.harmless else ""
    return f"**not supported**: {option.why}{allowed}"


def _how_it_works(option: Works) -> Iterator[str]:
    ours = f"`--{'no-' if option.inverse else ''}{option.ours.replace('_', '-')}`"
    yield "the same" if option.ours == option.name else ours
    for meant, group in groupby(option.values.items(), key=lambda item: item[1]):
        words = [f"`{word}`" for word, _ in group]
        named = ", ".join(words[:MAX_NAMED_VALUES]) + (" and others" if len(words) > MAX_NAMED_VALUES else "")
        if isinstance(meant, RefusedValue):
            yield f"not supported: {named} ({meant.why})"
        elif isinstance(meant, IgnoredValue):
            yield f"ignored: {named} ({meant.why})"
        else:
            yield f"{named} = {'the default' if meant is None else f'`{meant}`'}"
    if option.note:
        yield option.note


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
