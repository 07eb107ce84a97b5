"""The requests of a recorded run (`engine/record.py`) as rows to learn from.

An output that ended by itself has its length. One that `max_tokens` cut is at least that long. All others say nothing:
what a client or a stop string cut short (the engine cannot tell the two apart), what was rejected, ran out of time or
failed, and what was told to go on past its end.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any

_KINDS = ("setup", "request", "end", "abort", "step")


def is_recorded(line: dict[str, Any]) -> bool:
    return "output_len" not in line and any(kind in line for kind in _KINDS)


@dataclass(frozen=True, slots=True)
class FinishedOutput:
    """An output with its prompt. `cut`: it would have continued."""

    prompt: list[int]
    length: int
    cut: bool


@dataclass(slots=True)
class _Open:
    prompt: list[int]
    endless: bool
    left: int


class RecordedOutputs:
    """`take` line by line. `left_out`: outputs by the reason why they say nothing."""

    def __init__(self) -> None:
        self.left_out: Counter[str] = Counter()
        self._open: dict[str, _Open] = {}

    def take(self, line: dict[str, Any]) -> FinishedOutput | None:
        """Return the usable output that this line ended, if any. Raise KeyError, TypeError or ValueError if invalid."""
        if "request" in line:
            params = line["params"]
            self._open[line["request"]] = _Open(line["prompt_ids"], bool(params.get("ignore_eos")), int(line["n"]))
        elif "end" in line:
            return self._ended(line)
        return None

    def close(self) -> None:
        """Finish after the last line."""
        self.left_out["unfinished"] += sum(entry.left for entry in self._open.values())
        self._open.clear()

    def _ended(self, line: dict[str, Any]) -> FinishedOutput | None:
        name, reason, tokens = line["end"].rpartition(":")[0], line["reason"], int(line["tokens"])
        entry = self._open[name]
        entry.left -= 1
        if not entry.left:
            del self._open[name]
        if entry.endless:
            reason = "ignore_eos"
        if reason in ("stop", "length") and tokens > 0 and entry.prompt:
            return FinishedOutput(entry.prompt, tokens, reason == "length")
        self.left_out[reason] += 1
        return None
