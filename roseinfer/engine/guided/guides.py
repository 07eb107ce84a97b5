"""Use of guides by the engine core.

A guide belongs to one sequence and ends with it. It receives each committed token once, in order, and returns the mask
of the next one. Preemption does not affect it: it follows the output, not the computation. An error of a guide ends its
sequence with an error, and nothing else.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from roseinfer.core.errors import CONSTRAINT_FAILED, CONSTRAINT_TOO_SLOW, InvalidRequestError
from roseinfer.core.guide import GuideSpec
from roseinfer.core.outputs import GuideStats, SequenceOutput
from roseinfer.core.plan import StepPlan, StepResult, TokenMasks
from roseinfer.core.request import request_id_of
from roseinfer.engine.guided.guide import Guide, GuideFactory, MaskSource, PendingGuide
from roseinfer.engine.guided.look_ahead import Branch, LookAhead
from roseinfer.engine.guided.mask_bits import allow_all, allows
from roseinfer.engine.guided.mask_budget import (
    FREE_ROW_S,
    SHORT_CALL_S,
    TIMED_STEPS,
    UNTIMED_S,
    HostClock,
    MaskBudget,
    Timer,
)

log = logging.getLogger(__name__)

T = TypeVar("T")

# Longest computation of one request's masks between two checks of its budget.
_SLICE_S = 5e-3
_TOO_SLOW = f"{CONSTRAINT_TOO_SLOW}use a smaller or simpler schema or grammar, or a smaller n"


@dataclass(frozen=True, slots=True)
class GuideEnd:
    """End of a sequence by its guide: the output is complete, or `error` says what failed."""

    sequence_id: str
    error: str | None = None


class GuidedSequences:
    """Guides of the sequences of one engine core. `live`: guides by sequence. `used`: a request had a constraint.

    `mask_s`: duration of the last call of `masks`. `clock`: measures the time of constraints.
    """

    def __init__(self, guides: GuideFactory | None, vocab_size: int, clock: HostClock | None = None) -> None:
        self.guides = guides
        self._words = TokenMasks.words_per_row(vocab_size)
        self.live: dict[str, Guide] = {}
        self._clock = clock or HostClock()
        self._budget = MaskBudget()
        self._ahead = LookAhead(guides, self._words, self._clock, self._budget)
        self._timed_steps = 0
        self._masks_ended_s = self._clock.wall_s()
        self._advanced_s = 0.0  # time of `advance`, `forced` and `legal` since the last masks
        self.used = False
        self._rows = self._dormant = self._too_slow = 0
        self.mask_s = 0.0

    def prepare(self, spec: GuideSpec) -> PendingGuide:
        """Start making a request's guides. Raise `InvalidRequestError`."""
        if self.guides is None:
            raise InvalidRequestError(
                "an engine that records (--record) cannot constrain outputs: send no schema, grammar or tools"
            )
        self.used, guides = True, self.guides
        return _typed(lambda: guides.prepare(spec))

    def open(self, sequence_ids: Sequence[str], pending: PendingGuide) -> None:
        """Give each of these sequences a guide, or raise `InvalidRequestError` and give none."""
        made = [_typed(pending.make) for _ in sequence_ids]
        self.live.update(zip(sequence_ids, made, strict=True))

    def close(self, sequence_ids: Iterable[str]) -> None:
        """Remove the guides of sequences, if any."""
        for name in sequence_ids:
            self.live.pop(name, None)
            self._ahead.paths.pop(name, None)

    def wait(self, timeout_s: float) -> None:
        """Wait up to `timeout_s` until another pending guide is ready."""
        if self.guides is not None:
            self.guides.wait(timeout_s)

    def depends_on(self, plan: StepPlan, sampled: Collection[str]) -> bool:
        """True if masks of `plan` depend on the next output of one of the sequences `sampled`."""
        for row in plan.guided:
            name = plan.rows[row].request_id
            if name in sampled:
                guide = self.live.get(name)
                if guide is not None and not guide.ignores_output:
                    return True
        return False

    def advance(self, outputs: Iterable[SequenceOutput]) -> list[GuideEnd]:
        """Pass new tokens to the guides. Remove the guides of sequences that have ended."""
        ends = []
        live, ahead = self.live, self._ahead
        too_slow: set[str] = set()
        wall_s = self._clock.wall_s
        timer = Timer(self._clock)
        began_s = last_s = wall_s()
        for name, token_ids, _, _, _, end, _ in outputs:
            guide = live.get(name)
            if guide is None:
                continue
            if end is not None:
                del live[name]
                ahead.paths.pop(name, None)
            elif token_ids and not (too_slow and request_id_of(name) in too_slow):
                try:
                    if ahead.paths:
                        live[name], complete = ahead.advance(name, guide, token_ids)
                    else:
                        complete = guide.advance(token_ids)
                    if complete:
                        ends.append(GuideEnd(name))
                except Exception as error:
                    ends.append(_failed(name, error))
                now_s = wall_s()
                if now_s - last_s > SHORT_CALL_S:
                    too_slow.update(self._budget.charge(request_id_of(name), min(now_s - last_s, timer.lap_s())))
                last_s = now_s
        self._advanced_s += last_s - began_s
        return ends + self._end_slow(too_slow)

    def replay(self, outputs: Iterable[tuple[str, Sequence[int]]]) -> list[GuideEnd]:
        """Pass earlier output to new guides, of sequences that continue from another engine. A guide that ends its
        sequence gets no more tokens.
        """
        ends = []
        too_slow: set[str] = set()
        for name, token_ids in outputs:
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
        """Return True if the output is complete.

        Guides also learn from masks, so compute those that show more than the tokens: where the grammar may end.
        """
        assert self.guides is not None
        timer = Timer(self._clock)
        for token in token_ids:
            mask = guide.mask() if guide.edits_mask else None
            if mask is not None and not isinstance(mask, memoryview) and (mask.accepting or not mask.allows((token,))):
                mask_row = memoryview(bytearray(4 * self._words)).cast("I")
                self.guides.fill([mask], mask_row)
                if guide.finish_mask(mask_row):
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
        """Return the masks of the plan's guided rows, except dormant guides, and the sequences that end.

        A row with drafts has a mask for each token that may become output. `space`: see `Runner.mask_space`. The mask
        of a row that ends here does not matter: its token is dropped.
        """
        began_s = self._clock.wall_s()
        self._budget.begin_step(began_s - self._masks_ended_s - self._advanced_s)
        self._ahead.begin_step(plan.step)
        self._advanced_s = 0.0
        ends: list[GuideEnd] = []
        rows: list[int] = []  # rows with masks by a grammar, and for each its source, and its name and guide
        sources: list[MaskSource] = []
        named_guides: list[tuple[str, Guide]] = []
        fixed: dict[int, memoryview] = {}
        live, plan_rows = self.live, plan.rows
        for row in plan.guided:
            name = plan_rows[row].request_id
            guide = live.get(name)
            if guide is None:
                continue  # ended while the step was launched: its token is dropped
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
                named_guides.append((name, guide))
        count = len(rows) + len(fixed)
        drafts = sum(len(plan_rows[row].drafts) for row in plan.guided) if plan.num_drafts else 0
        words = space(count + drafts) if count + drafts else memoryview(b"")
        if sources:
            ends += self._fill(sources, named_guides, words[: len(rows) * self._words])
        for at, (row, mask_row) in enumerate(fixed.items(), start=len(rows)):
            try:
                words[at * self._words : (at + 1) * self._words] = mask_row
            except ValueError as error:  # not the size of a mask
                ends.append(_failed(plan_rows[row].request_id, error))
        masks = TokenMasks((*rows, *fixed), words[: count * self._words])
        if drafts:
            masks = self._add_masks(plan, masks, words, ends)
        self._masks_ended_s = self._clock.wall_s()
        self.mask_s = self._masks_ended_s - began_s
        return masks, ends

    def _add_masks(self, plan: StepPlan, masks: TokenMasks, words: memoryview, ends: list[GuideEnd]) -> TokenMasks:
        """Return the masks with those after drafts. Add the sequences that end because of these to `ends`."""
        mask_of = {row: words[at * self._words : (at + 1) * self._words] for at, row in enumerate(masks.rows)}
        ended = {end.sequence_id for end in ends}
        branches = []
        for at in plan.guided:
            row = plan.rows[at]
            guide = self.live.get(row.request_id)
            if row.drafts and guide is not None and row.request_id not in ended:
                branches.append(Branch(at, row.drafts, row.request_id, guide, mask_of.get(at)))
        try:
            masks, too_slow = self._ahead.add_masks(masks, branches, words)
        except Exception as error:  # as in `_fill`
            log.exception("cannot compute masks after drafts")
            ends += [_failed(branch.name, error) for branch in branches]
            return masks
        ends += self._end_slow(too_slow)
        return masks

    def trim(self, plan: StepPlan, result: StepResult) -> None:
        """Remove tokens and errors after the end of a guide's output from a result that is not committed yet."""
        self._ahead.trim(plan, result)

    # --- drafts -------------------------------------------------------------------------------------------------
    def forced(self, sequence_id: str, limit: int) -> tuple[int, ...]:
        """Return up to `limit` next tokens that the guide leaves no choice about; () without a guide.

        Each is the only token that its mask allows. A token that completes the output is left out, see `legal`.
        """
        guide = self.live.get(sequence_id)
        if guide is None:
            return ()
        return self._look_ahead(sequence_id, lambda: _forced(guide, limit), ())

    def legal(self, sequence_id: str, drafts: Sequence[int]) -> int:
        """Return how many of the leading drafts are of use: the guide probably allows them, and continues after them.

        All of them without a guide. A draft that completes the output does not count, since its row samples the token
        at its place in any case. Bans are not checked.
        """
        guide = self.live.get(sequence_id)
        if guide is None:
            return len(drafts)
        return self._look_ahead(sequence_id, lambda: _count_legal(guide, drafts), 0)

    def _look_ahead(self, sequence_id: str, find: Callable[[], T], nothing: T) -> T:
        """Return what `find` returns; `nothing` if the guide is slow, or fails, which its next mask reports."""
        request_id = request_id_of(sequence_id)
        if self._ahead.is_paused(request_id):
            return nothing
        timer = Timer(self._clock)
        try:
            found = find()
        except Exception as error:
            log.debug("no drafts for %s: %s: %s", sequence_id, type(error).__name__, error)
            return nothing
        took_s = timer.lap_s()
        self._advanced_s += took_s
        self._ahead.note_time(request_id, took_s)
        return found

    def _fill(
        self, sources: list[MaskSource], named_guides: list[tuple[str, Guide]], words: memoryview
    ) -> list[GuideEnd]:
        """Let the grammars write their masks. Return the sequences that end."""
        try:
            too_slow = self._compute(sources, named_guides, words)
        except Exception as error:  # the cause is unknown, so all of them end and the engine continues
            log.exception("cannot compute masks")
            allow_all(words)
            return [_failed(name, error) for name, _ in named_guides]
        ends = self._end_slow(too_slow)
        for at, source in enumerate(sources):
            name, guide = named_guides[at]
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

    def _compute(self, sources: list[MaskSource], named_guides: list[tuple[str, Guide]], words: memoryview) -> set[str]:
        """Write all masks, except those of requests that take too long. Return the ids of these."""
        assert self.guides is not None
        if self._timed_steps:
            self._timed_steps -= 1
            return self._compute_timed(sources, named_guides, words, 0)
        until_s = self._clock.wall_s() + UNTIMED_S + len(sources) * FREE_ROW_S
        done = self.guides.fill(sources, words, until_s)
        if self._clock.wall_s() <= until_s:
            return set()
        self._timed_steps = TIMED_STEPS
        return self._compute_timed(sources, named_guides, words, done)

    def _compute_timed(
        self, sources: list[MaskSource], named_guides: list[tuple[str, Guide]], words: memoryview, at: int
    ) -> set[str]:
        """Do `_compute` from source `at` on, one request at a time, and charge each for its masks."""
        assert self.guides is not None
        too_slow: set[str] = set()
        owners = [request_id_of(name) for name, _ in named_guides]
        timer = Timer(self._clock)
        while at < len(sources):
            owner, stop = owners[at], at + 1
            while stop < len(sources) and owners[stop] == owner:
                stop += 1
            mask_rows = words[at * self._words : stop * self._words]
            if owner in too_slow:
                allow_all(mask_rows)  # these sequences end: their tokens are dropped
                at = stop
                continue
            done = self.guides.fill(sources[at:stop], mask_rows, self._clock.wall_s() + _SLICE_S, threads=False)
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
        log.warning("ending requests %s: their constraints take too much time", ", ".join(ended))
        return [GuideEnd(name, _TOO_SLOW) for name in names]

    def stats(self) -> GuideStats:
        """Return counts. Call only if `used`."""
        assert self.guides is not None
        return self.guides.stats()._replace(
            rows=self._rows, dormant_rows=self._dormant, too_slow=self._too_slow, mask_s=self.mask_s
        )


def _typed(make: Callable[[], T]) -> T:
    """Call `make` and convert unexpected errors to `InvalidRequestError`."""
    try:
        return make()
    except InvalidRequestError:
        raise
    except Exception as error:
        log.exception("cannot make a guide")
        raise InvalidRequestError(f"the constraint cannot be used: {error}") from error


def _forced(guide: Guide, limit: int) -> tuple[int, ...]:
    tokens = (*guide.forced(limit),)
    return tokens[:-1] if tokens and guide.fork().advance(tokens) else tokens


def _count_legal(guide: Guide, drafts: Sequence[int]) -> int:
    fork = guide.fork()
    for count, draft in enumerate(drafts):
        mask = fork.mask()
        if mask is not None:
            may = allows(mask, draft) if isinstance(mask, memoryview) else mask.allows((draft,))
            if not may:
                return count
        if fork.advance((draft,)):
            return count
    return len(drafts)


def _failed(name: str, error: Exception) -> GuideEnd:
    log.warning("the guide of %s failed: %s: %s", name, type(error).__name__, error)
    return GuideEnd(name, f"{CONSTRAINT_FAILED}{error}")
