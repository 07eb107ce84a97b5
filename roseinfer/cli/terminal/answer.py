"""One streamed answer of a server: its pieces, and its figures at the end."""

from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, NamedTuple

from roseinfer.cli.terminal.objectives import NAMES
from roseinfer.cli.terminal.remote import Remote


class Piece(NamedTuple):
    """Text of the answer, or of the reasoning before it (`thought`)."""

    text: str
    thought: bool


@dataclass(slots=True)
class Answer:
    """Answer so far, without thoughts; times in seconds as the client saw them, None before the first token.

    `slo` is the server's report on the objectives (`usage.slo`), if requested.
    """

    asked_s: float
    text: str = ""
    first_s: float | None = None
    last_s: float | None = None
    tokens: int = 0
    finish: str | None = None
    slo: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_s is None else self.first_s - self.asked_s

    @property
    def tpot_s(self) -> float | None:
        """Return the mean time per token after the first; None if there is none."""
        if self.first_s is None or self.last_s is None or self.tokens < 2:
            return None
        return (self.last_s - self.first_s) / (self.tokens - 1)

    def seen_ms(self, name: str) -> float | None:
        """Return the server's figure if it sent one, else the client's."""
        if self.slo.get(f"{name}_ms") is not None:
            return float(self.slo[f"{name}_ms"])
        e2e_s = None if self.last_s is None else self.last_s - self.asked_s
        seen_s = {"ttft": self.ttft_s, "tpot": self.tpot_s, "e2e": e2e_s}[name]
        return None if seen_s is None else seen_s * 1000


class AnswerStream:
    """Iterator over the pieces of a streamed answer; `answer` grows with each. Raises what `Remote.stream` raises."""

    def __init__(self, remote: Remote, path: str, body: Mapping[str, Any]) -> None:
        self.answer = Answer(monotonic())
        self._events = remote.stream(path, {**body, "stream_options": {"include_usage": True}})

    def __iter__(self) -> Iterator[Piece]:
        with closing(self._events):  # type: ignore[type-var]
            for event in self._events:
                yield from self._take(event)

    def _take(self, event: Mapping[str, Any]) -> Iterator[Piece]:
        answer = self.answer
        usage = event.get("usage") or {}
        for choice in event.get("choices") or ():
            answer.finish = choice.get("finish_reason") or answer.finish
            if not choice.get("delta", True):  # the chunk that ends a chat; the last token came before it
                continue
            if not (choice.get("delta") or {}).get("role"):  # may come before the first token
                answer.last_s = monotonic()
                answer.first_s = answer.last_s if answer.first_s is None else answer.first_s
                answer.tokens += 1  # one token per chunk, until the usage has the exact number
            yield from self._pieces(choice)
        if usage:
            answer.tokens = int(usage.get("completion_tokens") or answer.tokens)
            answer.slo = usage.get("slo") or {}

    def _pieces(self, choice: Mapping[str, Any]) -> Iterator[Piece]:
        delta = choice.get("delta") or {}
        thought = delta.get("reasoning_content") or delta.get("reasoning") or ""
        text = delta.get("content") or choice.get("text") or ""
        self.answer.text += text
        if thought:
            yield Piece(thought, True)
        if text:
            yield Piece(text, False)


def describe(answer: Answer, promised: Mapping[str, Any]) -> str:
    """Format one line with tokens, pace, times and the request's objectives (`slo`)."""
    parts = [f"{answer.tokens} tokens"]
    tpot_ms = answer.seen_ms("tpot")
    if tpot_ms:
        parts.append(f"{1000 / tpot_ms:.1f} tokens/s")
    for name in NAMES:
        seen, wanted = answer.seen_ms(name), promised.get(f"{name}_ms")
        if seen is not None and (wanted or name == "ttft"):
            parts.append(f"{name.upper()} {seen:.4g} ms" + (f" (promised {wanted:g})" if wanted else ""))
    if promised and answer.slo.get("met") is not None:
        parts.append("promise kept" if answer.slo["met"] else "promise broken")
    if answer.finish not in ("stop", None):
        parts.append(f"ended by {answer.finish}")
    return " · ".join(parts)
