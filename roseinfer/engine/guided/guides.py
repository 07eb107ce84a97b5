"""GuideFactory: what decides, token by token, how an output may go on, and how the engine core drives it.

A guide belongs to one sequence. It is told the tokens that were committed, each once and in order, and says which may
come next. Preemption does not touch it: it follows what was said, not what is computed. It ends with its sequence.
Whatever a guide raises ends its sequence with an error, and nothing else.
"""

import logging
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from roseinfer.core.errors import CONSTRAINT_TOO_SLOW, NO_TOKEN_ALLOWED, InvalidRequestError
from roseinfer.core.guide import GuideSpec
from roseinfer.core.outputs import GuideStats, RequestOutput
from roseinfer.core.plan import StepPlan, TokenMasks
from roseinfer.core.request import request_id_of
from roseinfer.engine.guided.mask_budget import FREE_ROW_S, SHORT_CALL_S, HostClock, MaskBudget, Timer

log = logging.getLogger(__name__)

T = TypeVar("T")

# Masks of a step that stay within this time, and that of their rows, are not timed one by one.
_UNTIMED_S = 2e-3
# Steps in which masks are timed request by request, after some took longer.
_TIMED_STEPS = 64
# A request's masks are computed for at most so long before its budget is looked at.
_SLICE_S = 5e-3
_TOO_SLOW = f"{CONSTRAINT_TOO_SLOW}use a smaller or simpler schema or grammar, or a smaller n"


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
    """Constraint of one sequence. `ignores_output`: no mask depends on the output. `edits_mask`: it changes masks."""

    @property
    def ignores_output(self) -> bool: ...

    @property
    def edits_mask(self) -> bool: ...

    def advance(self, token_ids: Sequence[int]) -> bool:
        """Take the tokens said since the last call. True: the output is complete, the sequence ends behind them."""
        ...

    def mask(self) -> "MaskSource | memoryview | None":
        """What says which tokens may come next: a grammar, or a line of `TokenMasks`; None: every token may."""
        ...

    def finish_mask(self, words: memoryview) -> bool:
        """The mask of the grammar that `mask` named is in `words`, to be changed if need be.

        Called if the guide `edits` masks, or the grammar has halted. True: the output is complete.
        """
        ...


class PendingGuide(Protocol):
    """What the guides of one request's sequences are made from. `ready`: all that takes time is done."""

    @property
    def ready(self) -> bool: ...

    def make(self) -> Guide:
        """A guide at the start of an output. Raises `InvalidRequestError` for what cannot be enforced after all."""
        ...


class GuideFactory(Protocol):
    """Makes guides from what a request says of its output."""

    def prepare(self, spec: GuideSpec) -> PendingGuide:
        """Begin what takes time. Raises `InvalidRequestError` for a `spec` that cannot be enforced."""
        ...

    def fill(
        self, sources: Sequence[MaskSource], words: memoryview, until_s: float = math.inf, *, threads: bool = True
    ) -> int:
        """Write the masks of the first sources to their lines of `words`. Return how many, at least 1.

        Few masks are begun after `until_s`, on the clock of `perf_counter`. `threads` False: on this thread alone.
        """
        ...

    def wait(self, timeout_s: float) -> None:
        """Until a pending has become ready since the last call, or so long."""
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

    `mask_s`: seconds that the last `masks` took. `clock` measures what constraints take.
    """

    def __init__(self, guides: GuideFactory | None, vocab_size: int, clock: HostClock | None = None) -> None:
        self.guides = guides
        self._words = TokenMasks.words_per_row(vocab_size)
        self.live: dict[str, Guide] = {}
        self._clock = clock or HostClock()
        self._budget = MaskBudget()
        self._timed_steps = 0
        self._masks_ended_s = self._clock.wall_s()
        self._advanced_s = 0.0  # time of `advance` since the last masks
        self.used = False
        self._rows = self._dormant = self._too_slow = 0
        self.mask_s = 0.0

    def prepare(self, spec: GuideSpec) -> PendingGuide:
        """What a request's guides will be made from. Raises `InvalidRequestError`."""
        if self.guides is None:
            raise InvalidRequestError("this engine cannot constrain outputs", "guide")
        self.used, guides = True, self.guides
        return _typed(lambda: guides.prepare(spec))

    def open(self, sequence_ids: Sequence[str], pending: PendingGuide) -> None:
        """Give each of these sequences a guide, or raise `InvalidRequestError` and give none."""
        made = [_typed(pending.make) for _ in sequence_ids]
        self.live.update(zip(sequence_ids, made, strict=True))

    def close(self, sequence_ids: Iterable[str]) -> None:
        """Forget the guides of sequences, if they have any."""
        for name in sequence_ids:
            self.live.pop(name, None)

    def wait(self, timeout_s: float) -> None:
        """Until another pending is ready, or so long."""
        if self.guides is not None:
            self.guides.wait(timeout_s)

    def depends_on(self, plan: StepPlan, sampled: Collection[str]) -> bool:
        """Whether masks of `plan` depend on what one of the sequences `sampled` says."""
        for row in plan.guided:
            name = plan.rows[row].request_id
            if name in sampled:
                guide = self.live.get(name)
                if guide is not None and not guide.ignores_output:
                    return True
        return False

    def advance(self, outputs: Iterable[RequestOutput]) -> list[GuideEnd]:
        """Tell the guides what their sequences said. A sequence that has ended needs no guide any more."""
        ends = []
        live = self.live
        too_slow: set[str] = set()
        wall_s = self._clock.wall_s
        timer = Timer(self._clock)
        began_s = last_s = wall_s()
        for name, token_ids, _, _, _, end in outputs:
            guide = live.get(name)
            if guide is None:
                continue
            if end is not None:
                del live[name]
            elif token_ids and not (too_slow and request_id_of(name) in too_slow):
                try:
                    if guide.advance(token_ids):
                        ends.append(GuideEnd(name))
                except Exception as error:
                    ends.append(_failed(name, error))
                now_s = wall_s()
                if now_s - last_s > SHORT_CALL_S:
                    too_slow.update(self._budget.charge(request_id_of(name), min(now_s - last_s, timer.lap_s())))
                last_s = now_s
        self._advanced_s += last_s - began_s
        return ends + self._end_slow(too_slow)

    def replay(self, said: Iterable[tuple[str, Sequence[int]]]) -> list[GuideEnd]:
        """Tell new guides what their sequences said in another engine. A sequence whose guide ends it has no more."""
        ends = []
        too_slow: set[str] = set()
        for name, token_ids in said:
            guide = self.live.get(name)
            if guide is None or request_id_of(name) in too_slow:
                continue
            try:
                if self._replay(name, guide, token_ids, too_slow):
                    ends.append(GuideEnd(name))
            except Exception as error:
                ends.append(_failed(name, error))
        return ends + self._end_slow(too_slow)

    def _replay(self, name: str, guide: Guide, token_ids: Sequence[int], too_slow: set[str]) -> bool:
        """Whether the output is complete. A guide also learns from its masks, so it is shown those that tell it more
        than the tokens do: where its grammar may end, or did.
        """
        assert self.guides is not None
        timer = Timer(self._clock)
        for token in token_ids:
            mask = guide.mask() if guide.edits_mask else None
            if mask is not None and not isinstance(mask, memoryview) and (mask.accepting or not mask.allows((token,))):
                line = memoryview(bytearray(4 * self._words)).cast("I")
                self.guides.fill([mask], line)
                if guide.finish_mask(line):
                    return True
            if guide.advance((token,)):
                return True
            took_s = timer.lap_s()
            if took_s > SHORT_CALL_S:
                too_slow.update(self._budget.charge(request_id_of(name), took_s))
                if request_id_of(name) in too_slow:
                    return False
        return False

    def masks(self, plan: StepPlan, space: Callable[[int], memoryview]) -> tuple[TokenMasks, list[GuideEnd]]:
        """Masks of the plan's guided rows whose sequences live and whose guides are not dormant; and who ends.

        `space`: as `Runner.mask_space`. A row that ends here may get any mask: its token will be dropped.
        """
        began_s = self._clock.wall_s()
        self._budget.begin_step(began_s - self._masks_ended_s - self._advanced_s)
        self._advanced_s = 0.0
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
        self._masks_ended_s = self._clock.wall_s()
        self.mask_s = self._masks_ended_s - began_s
        return TokenMasks((*rows, *fixed), words), ends

    def _fill(self, sources: list[MaskSource], asking: list[tuple[str, Guide]], words: memoryview) -> list[GuideEnd]:
        """Have the grammars write their masks. Return the sequences that end."""
        try:
            too_slow = self._compute(sources, asking, words)
        except Exception as error:  # it is unknown whose fault it is: all of them end, and the engine runs on
            log.exception("masks could not be computed")
            _allow_all(words)
            return [_failed(name, error) for name, _ in asking]
        ends = self._end_slow(too_slow)
        for at, source in enumerate(sources):
            name, guide = asking[at]
            if not source.halted and not guide.edits_mask:
                continue
            if too_slow and request_id_of(name) in too_slow:
                continue
            try:
                if source.failed:
                    raise source.failure()
                if guide.finish_mask(words[at * self._words : (at + 1) * self._words]):
                    ends.append(GuideEnd(name))
            except Exception as error:
                ends.append(_failed(name, error))
        return ends

    def _compute(self, sources: list[MaskSource], asking: list[tuple[str, Guide]], words: memoryview) -> set[str]:
        """Write all masks but those of requests that take too long. Return the ids of these."""
        assert self.guides is not None
        if self._timed_steps:
            self._timed_steps -= 1
            return self._compute_timed(sources, asking, words, 0)
        until_s = self._clock.wall_s() + _UNTIMED_S + len(sources) * FREE_ROW_S
        done = self.guides.fill(sources, words, until_s)
        if self._clock.wall_s() <= until_s:
            return set()
        self._timed_steps = _TIMED_STEPS
        return self._compute_timed(sources, asking, words, done)

    def _compute_timed(
        self, sources: list[MaskSource], asking: list[tuple[str, Guide]], words: memoryview, at: int
    ) -> set[str]:
        """`_compute` from source `at` on, one request after the other, each charged with what its masks took."""
        assert self.guides is not None
        too_slow: set[str] = set()
        owners = [request_id_of(name) for name, _ in asking]
        timer = Timer(self._clock)
        while at < len(sources):
            owner, stop = owners[at], at + 1
            while stop < len(sources) and owners[stop] == owner:
                stop += 1
            lines = words[at * self._words : stop * self._words]
            if owner in too_slow:
                _allow_all(lines)  # these sequences end: what they sample now is dropped
                at = stop
                continue
            done = self.guides.fill(sources[at:stop], lines, self._clock.wall_s() + _SLICE_S, threads=False)
            too_slow.update(self._budget.charge(owner, timer.lap_s(), done))
            at += done
        return too_slow

    def _end_slow(self, request_ids: Collection[str]) -> list[GuideEnd]:
        """End all sequences of these requests."""
        if not request_ids:
            return []
        names = [name for name in self.live if request_id_of(name) in request_ids]
        ended = sorted({request_id_of(name) for name in names})
        self._too_slow += len(ended)
        log.warning("requests %s ended: their constraints take too much time", ", ".join(ended))
        return [GuideEnd(name, _TOO_SLOW) for name in names]

    def stats(self) -> GuideStats:
        """Once it is `used`."""
        assert self.guides is not None
        return self.guides.stats()._replace(
            rows=self._rows, dormant_rows=self._dormant, too_slow=self._too_slow, mask_s=self.mask_s
        )


def _typed(make: Callable[[], T]) -> T:
    """What `make` returns; whatever it raises is the request's error."""
    try:
        return make()
    except InvalidRequestError:
        raise
    except Exception as error:
        log.exception("a guide could not be made")
        raise InvalidRequestError(f"the constraint cannot be used: {error}", "guide") from error


def _allow_all(words: memoryview) -> None:
    words.cast("B")[:] = b"\xff" * words.nbytes


def _failed(name: str, error: Exception) -> GuideEnd:
    log.warning("the guide of %s failed: %s: %s", name, type(error).__name__, error)
    return GuideEnd(name, f"{NO_TOKEN_ALLOWED}the output's constraint failed: {error}")
