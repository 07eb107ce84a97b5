"""Guides: what decides, token by token, how an output may go on, and how the engine core drives it.

A guide belongs to one sequence. It is told the tokens that were committed, each once and in order, and writes the mask
of the next one into `TokenMasks`. Preemption does not touch it: it follows what was said, not what is computed. It ends
with its sequence. Whatever a guide raises ends its sequence with an error, and nothing else.
"""

import logging
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from roseinfer.core.errors import InvalidRequestError
from roseinfer.core.guide import GuideSpec
from roseinfer.core.outputs import RequestOutput
from roseinfer.core.plan import StepPlan, TokenMasks

log = logging.getLogger(__name__)


class Guide(Protocol):
    """The constraint of one sequence."""

    def advance(self, token_ids: Sequence[int]) -> bool:
        """Take the tokens said since the last call. True: the output is complete, the sequence ends behind them."""
        ...

    def fill(self, words: memoryview) -> bool:
        """Write which tokens may come next into `words`, a line of `TokenMasks` whose bits are all 0.

        False, and nothing written, if every token may: the guide is dormant.
        """
        ...


class Guides(Protocol):
    """Makes guides from what a request says of its output."""

    def make(self, spec: GuideSpec) -> Guide:
        """A guide at the start of an output. Raises `InvalidRequestError` for a `spec` that it cannot enforce."""
        ...


@dataclass(frozen=True, slots=True)
class GuideEnd:
    """A guide ends its sequence: the output is complete, or something failed and `error` says what."""

    sequence_id: str
    error: str | None = None


class GuidedSequences:
    """The guides of the sequences of one engine core. `live`: sequence -> its guide."""

    def __init__(self, guides: Guides | None, vocab_size: int) -> None:
        self._guides = guides
        self._words = TokenMasks.words_per_line(vocab_size)
        self.live: dict[str, Guide] = {}

    def open(self, sequence_ids: Sequence[str], spec: GuideSpec) -> None:
        """Give each of these sequences a guide, or raise `InvalidRequestError` and give none."""
        if self._guides is None:
            raise InvalidRequestError("this engine cannot constrain outputs", "guide")
        try:
            made = [self._guides.make(spec) for _ in sequence_ids]
        except InvalidRequestError:
            raise
        except Exception as error:
            log.exception("a guide could not be made")
            raise InvalidRequestError(f"the constraint cannot be used: {error}", "guide") from error
        self.live.update(zip(sequence_ids, made, strict=True))

    def close(self, sequence_ids: Iterable[str]) -> None:
        """Forget the guides of sequences, if they have any."""
        for name in sequence_ids:
            self.live.pop(name, None)

    def advance(self, outputs: Iterable[RequestOutput]) -> list[GuideEnd]:
        """Tell the guides what their sequences said. A sequence that has ended needs no guide any more."""
        ends = []
        for output in outputs:
            guide = self.live.get(output.request_id)
            if guide is None:
                continue
            if output.end is not None:
                del self.live[output.request_id]
            elif output.token_ids:
                try:
                    complete = guide.advance(output.token_ids)
                except Exception as error:
                    ends.append(self._failed(output.request_id, error))
                else:
                    if complete:
                        ends.append(GuideEnd(output.request_id))
        return ends

    def masks(self, plan: StepPlan) -> tuple[TokenMasks, list[GuideEnd]]:
        """Masks of the plan's guided rows whose sequences live and whose guides are not dormant; and who failed."""
        rows: list[int] = []
        ends: list[GuideEnd] = []
        size = self._words
        words = array("I", bytes(4 * size * len(plan.guided)))
        with memoryview(words) as view:
            for row in plan.guided:
                name = plan.rows[row].request_id
                guide = self.live.get(name)
                if guide is None:
                    continue  # ended while the step was launched: its token will be dropped
                at = len(rows) * size
                with view[at : at + size] as line:
                    try:
                        if guide.fill(line):
                            rows.append(row)
                    except Exception as error:
                        line[:] = memoryview(array("I", bytes(4 * size)))
                        ends.append(self._failed(name, error))
        del words[len(rows) * size :]
        return TokenMasks(tuple(rows), words), ends

    def _failed(self, name: str, error: Exception) -> GuideEnd:
        log.warning("the guide of %s failed: %s: %s", name, type(error).__name__, error)
        return GuideEnd(name, f"the output's constraint failed: {error}")
