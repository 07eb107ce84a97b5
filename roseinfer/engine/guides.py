"""Guides: what decides, token by token, how an output may go on, and how the engine core drives it.

A guide belongs to one sequence. It is told the tokens that were committed, each once and in order, and says which may
come next. Preemption does not touch it: it follows what was said, not what is computed. It ends with its sequence.
Whatever a guide raises ends its sequence with an error, and nothing else.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from time import perf_counter, thread_time
from typing import Protocol, TypeVar

from roseinfer.core.errors import NO_TOKEN_ALLOWED, InvalidRequestError, RoseinferError
from roseinfer.core.guide import GuideSpec
from roseinfer.core.outputs import GuideStats, RequestOutput
from roseinfer.core.plan import StepPlan, TokenMasks

log = logging.getLogger(__name__)

T = TypeVar("T")

# A grammar that takes longer for one mask would hold up everybody else's tokens.
LONGEST_MASK_S = 0.05
# Steps in which masks are timed one by one, after some took too long together.
_SUSPICIOUS_STEPS = 64


class MaskTooSlowError(RoseinferError):
    """A mask took so long that other requests would wait for it."""


class MaskSource(Protocol):
    """Computes the mask that a grammar allows; see `grammar.library.Matcher`. `halted`: it is complete, or failed.
    `accepting`: the output may end here.
    """

    @property
    def accepting(self) -> bool: ...

    def allows(self, token_ids: Sequence[int]) -> bool: ...

    @property
    def halted(self) -> bool: ...

    @property
    def failed(self) -> bool: ...

    def failure(self) -> Exception: ...

    def fill(self, words: memoryview) -> None: ...


class Guide(Protocol):
    """The constraint of one sequence. `blind`: its masks are the same whatever was said. `edits`: it changes masks."""

    @property
    def blind(self) -> bool: ...

    @property
    def edits(self) -> bool: ...

    def advance(self, token_ids: Sequence[int]) -> bool:
        """Take the tokens said since the last call. True: the output is complete, the sequence ends behind them."""
        ...

    def mask(self) -> "MaskSource | memoryview | None":
        """What says which tokens may come next: a grammar, or a line of `TokenMasks`; None: every token may."""
        ...

    def filled(self, words: memoryview) -> bool:
        """The mask of the grammar that `mask` named is in `words`, to be changed if need be.

        Called if the guide `edits` masks, or the grammar has halted. True: the output is complete.
        """
        ...


class Blueprint(Protocol):
    """What the guides of one request's sequences are made from. `ready`: all that takes time is done."""

    @property
    def ready(self) -> bool: ...

    def guide(self) -> Guide:
        """A guide at the start of an output. Raises `InvalidRequestError` for what cannot be enforced after all."""
        ...


class Guides(Protocol):
    """Makes guides from what a request says of its output."""

    def blueprint(self, spec: GuideSpec) -> Blueprint:
        """Begin what takes time. Raises `InvalidRequestError` for a `spec` that cannot be enforced."""
        ...

    def fill(self, sources: Sequence[MaskSource], words: memoryview) -> None:
        """Write the mask of each source to its line of `words`."""
        ...

    def wait(self, timeout_s: float) -> None:
        """Until a blueprint has become ready since the last call, or so long."""
        ...

    def stats(self) -> GuideStats:
        """Of its own work only."""
        ...

    def close(self) -> None:
        """Begin nothing more."""
        ...


@dataclass(frozen=True, slots=True)
class GuideEnd:
    """A guide ends its sequence: the output is complete, or something failed and `error` says what."""

    sequence_id: str
    error: str | None = None


class GuidedSequences:
    """The guides of the sequences of one engine core. `live`: sequence -> its guide. `used`: somebody wanted one.

    `mask_s`: seconds that the last `masks` took.
    """

    def __init__(self, guides: Guides | None, vocab_size: int) -> None:
        self.guides = guides
        self._words = TokenMasks.words_per_line(vocab_size)
        self.live: dict[str, Guide] = {}
        self._suspicious = 0
        self.used = False
        self._rows = self._dormant = 0
        self.mask_s = 0.0

    def blueprint(self, spec: GuideSpec) -> Blueprint:
        """What a request's guides will be made from. Raises `InvalidRequestError`."""
        if self.guides is None:
            raise InvalidRequestError("this engine cannot constrain outputs", "guide")
        self.used, guides = True, self.guides
        return _typed(lambda: guides.blueprint(spec))

    def open(self, sequence_ids: Sequence[str], blueprint: Blueprint) -> None:
        """Give each of these sequences a guide, or raise `InvalidRequestError` and give none."""
        made = [_typed(blueprint.guide) for _ in sequence_ids]
        self.live.update(zip(sequence_ids, made, strict=True))

    def close(self, sequence_ids: Iterable[str]) -> None:
        """Forget the guides of sequences, if they have any."""
        for name in sequence_ids:
            self.live.pop(name, None)

    def wait(self, timeout_s: float) -> None:
        """Until another blueprint is ready, or so long."""
        if self.guides is not None:
            self.guides.wait(timeout_s)

    def sees(self, plan: StepPlan, sampled: Collection[str]) -> bool:
        """Whether masks of `plan` depend on what one of the sequences `sampled` says."""
        for row in plan.guided:
            name = plan.rows[row].request_id
            if name in sampled:
                guide = self.live.get(name)
                if guide is not None and not guide.blind:
                    return True
        return False

    def advance(self, outputs: Iterable[RequestOutput]) -> list[GuideEnd]:
        """Tell the guides what their sequences said. A sequence that has ended needs no guide any more."""
        ends = []
        live = self.live
        for name, token_ids, _, _, _, end in outputs:
            guide = live.get(name)
            if guide is None:
                continue
            if end is not None:
                del live[name]
            elif token_ids:
                try:
                    if guide.advance(token_ids):
                        ends.append(GuideEnd(name))
                except Exception as error:
                    ends.append(_failed(name, error))
        return ends

    def repeat(self, said: Iterable[tuple[str, Sequence[int]]]) -> list[GuideEnd]:
        """Tell new guides what their sequences said in another engine. A sequence whose guide ends it has no more."""
        ends = []
        for name, token_ids in said:
            guide = self.live.get(name)
            if guide is None:
                continue
            try:
                if self._repeat(guide, token_ids):
                    ends.append(GuideEnd(name))
            except Exception as error:
                ends.append(_failed(name, error))
        return ends

    def _repeat(self, guide: Guide, token_ids: Sequence[int]) -> bool:
        """Whether the output is complete. A guide also learns from its masks, so it is shown those that tell it more
        than the tokens do: where its grammar may end, or did.
        """
        assert self.guides is not None
        for token in token_ids:
            mask = guide.mask() if guide.edits else None
            if mask is not None and not isinstance(mask, memoryview) and (mask.accepting or not mask.allows((token,))):
                line = memoryview(bytearray(4 * self._words)).cast("I")
                self.guides.fill([mask], line)
                if guide.filled(line):
                    return True
            if guide.advance((token,)):
                return True
        return False

    def masks(self, plan: StepPlan, space: Callable[[int], memoryview]) -> tuple[TokenMasks, list[GuideEnd]]:
        """Masks of the plan's guided rows whose sequences live and whose guides are not dormant; and who ends.

        `space`: as `Runner.mask_space`. A row that ends here may get any mask: its token will be dropped.
        """
        began_s = perf_counter()
        ends: list[GuideEnd] = []
        rows: list[int] = []  # those whose masks a grammar computes; with its source, name and guide
        sources: list[MaskSource] = []
        asking: list[tuple[str, Guide]] = []
        fixed: dict[int, memoryview] = {}
        live, plan_rows = self.live, plan.rows
        for row in plan.guided:
            name = plan_rows[row].request_id
            guide = live.get(name)
            if guide is None:
                continue  # ended while the step was launched: its token will be dropped
            self._rows += 1
            try:
                mask = guide.mask()
            except Exception as error:
                ends.append(_failed(name, error))
                continue
            if mask is None:
                self._dormant += 1
            elif isinstance(mask, memoryview):
                fixed[row] = mask
            else:
                rows.append(row)
                sources.append(mask)
                asking.append((name, guide))
        words = space(len(rows) + len(fixed)) if rows or fixed else memoryview(b"")
        if sources:
            ends += self._fill(sources, asking, words[: len(rows) * self._words])
        for at, (row, line) in enumerate(fixed.items(), start=len(rows)):
            try:
                words[at * self._words : (at + 1) * self._words] = line
            except ValueError as error:  # not a line
                ends.append(_failed(plan_rows[row].request_id, error))
        self.mask_s = perf_counter() - began_s
        return TokenMasks((*rows, *fixed), words), ends

    def _fill(self, sources: list[MaskSource], asking: list[tuple[str, Guide]], words: memoryview) -> list[GuideEnd]:
        """Have the grammars write their masks. Returns who ends."""
        try:
            late = self._compute(sources, words)
        except Exception as error:  # nobody knows whose: the engine goes on without all of them
            log.exception("masks could not be computed")
            words.cast("B")[:] = b"\xff" * words.nbytes
            return [_failed(name, error) for name, _ in asking]
        ends = []
        for at, source in enumerate(sources):
            name, guide = asking[at]
            if late is None and not source.halted and not guide.edits:
                continue
            try:
                if source.failed:
                    raise source.failure()
                if late is not None and late[at] > LONGEST_MASK_S:
                    raise MaskTooSlowError(f"its grammar takes more than {1000 * LONGEST_MASK_S:.0f} ms a token")
                if guide.filled(words[at * self._words : (at + 1) * self._words]):
                    ends.append(GuideEnd(name))
            except Exception as error:
                ends.append(_failed(name, error))
        return ends

    def _compute(self, sources: list[MaskSource], words: memoryview) -> list[float] | None:
        """The seconds that each mask took, of the processor's time; None: they were not timed one by one."""
        assert self.guides is not None
        if self._suspicious:
            self._suspicious -= 1
            return [self._timed(source, at, words) for at, source in enumerate(sources)]
        began_s = perf_counter()
        self.guides.fill(sources, words)
        if perf_counter() - began_s > LONGEST_MASK_S:
            self._suspicious = _SUSPICIOUS_STEPS
        return None

    def _timed(self, source: MaskSource, at: int, words: memoryview) -> float:
        assert self.guides is not None
        began_s = thread_time()
        self.guides.fill([source], words[at * self._words : (at + 1) * self._words])
        return thread_time() - began_s

    def stats(self) -> GuideStats:
        """Once it is `used`."""
        assert self.guides is not None
        return self.guides.stats()._replace(rows=self._rows, dormant_rows=self._dormant, mask_s=self.mask_s)


def _typed(make: Callable[[], T]) -> T:
    """What `make` returns; whatever it raises is the request's error."""
    try:
        return make()
    except InvalidRequestError:
        raise
    except Exception as error:
        log.exception("a guide could not be made")
        raise InvalidRequestError(f"the constraint cannot be used: {error}", "guide") from error


def _failed(name: str, error: Exception) -> GuideEnd:
    log.warning("the guide of %s failed: %s: %s", name, type(error).__name__, error)
    return GuideEnd(name, f"{NO_TOKEN_ALLOWED}the output's constraint failed: {error}")
