"""Masks after drafts. A row with drafts samples several tokens, each under the mask that its guide has after the drafts
before it.

Forks of the guide take the drafts; the guide itself takes output only. When drafts have become output, the fork that
took them replaces the guide. So the guide has also learned what it would have learned from its own masks.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from roseinfer.core.plan import StepPlan, StepResult, TokenMasks
from roseinfer.core.request import request_id_of
from roseinfer.engine.guided.guide import Guide, GuideFactory, MaskSource
from roseinfer.engine.guided.mask_bits import allow_all, allows
from roseinfer.engine.guided.mask_budget import (
    FREE_ROW_S,
    TIMED_STEPS,
    UNTIMED_S,
    HostClock,
    MaskBudget,
    Timer,
)

# A request whose guide looks ahead for longer than this in a step, without the free time of its calls, is paused: it
# gets no drafts for some steps.
MAX_REQUEST_S = 2e-3
PAUSE_STEPS = 32
# Time of masks after drafts, per step, that no request is charged for: its output must not depend on drafts.
MAX_UNCHARGED_S = 0.1


@dataclass(slots=True)
class Branch:
    """State of a guide after some of the `drafts` of its row. `mask`: of the next token; None = any token."""

    row: int
    drafts: tuple[int, ...]
    name: str
    guide: Guide
    mask: memoryview | None = None


@dataclass(slots=True)
class Path:
    """Guides of a sequence after 1, 2, ... drafts of the step in flight, as far as its output may continue.

    Further drafts are forbidden, or the guide ends the output before the next token. It is then complete, or the guide
    has failed with `error`. `ended`: the step's tokens have got there.
    """

    guides: list[Guide] = field(default_factory=list)
    error: Exception | None = None
    ended: bool = False


class LookAhead:
    """Guides of one engine core as they will be if drafts become output. `paths`: by sequence with drafts in flight."""

    def __init__(self, guides: GuideFactory | None, words_per_mask: int, clock: HostClock, budget: MaskBudget) -> None:
        self.paths: dict[str, Path] = {}
        self._guides = guides
        self._words = words_per_mask
        self._clock = clock
        self._budget = budget
        self._step = self._timed_until = 0
        self._paused: dict[str, int] = {}  # by request id: the step that ends its pause
        self._spent_s: dict[str, float] = {}  # in this step, by request id
        self._total_s = self._untimed_until_s = 0.0
        self._too_slow: set[str] = set()

    def begin_step(self, step: int) -> None:
        self._step, self._total_s = step, 0.0
        self._spent_s.clear()
        if self._paused:
            self._paused = {name: until for name, until in self._paused.items() if until > step}

    def is_paused(self, request_id: str) -> bool:
        """True if the request should get no drafts now, because its guide is slow."""
        return request_id in self._paused or self._budget.owes(request_id)

    def note_time(self, request_id: str, seconds: float) -> None:
        """Note the time of one look ahead, and pause the request if it has looked ahead for too long."""
        seconds -= FREE_ROW_S
        if seconds <= 0.0:
            return
        self._spent_s[request_id] = self._spent_s.get(request_id, 0.0) + seconds
        if self._spent_s[request_id] > MAX_REQUEST_S:
            self._paused[request_id] = self._step + PAUSE_STEPS

    # --- results ------------------------------------------------------------------------------------------------
    def trim(self, plan: StepPlan, result: StepResult) -> None:
        """Remove tokens and errors after the end of a guide's output: they were sampled without a mask."""
        for index in plan.guided:
            row, got = plan.rows[index], result.rows[index]
            path = self.paths.get(row.request_id)
            count = 1 + len(path.guides) if path is not None else 0  # tokens with a mask
            if path is None or not count <= min(len(row.drafts), len(got.token_ids)):
                continue
            if got.token_ids[count - 1] == row.drafts[count - 1]:
                path.ended = True
                logprobs = got.logprobs[:count] if got.logprobs is not None else None
                result.rows[index] = got._replace(token_ids=got.token_ids[:count], logprobs=logprobs, error=None)

    def advance(self, name: str, guide: Guide, token_ids: Sequence[int]) -> tuple[Guide, bool]:
        """Advance a guide, as `Guide.advance` does. Return the guide to use from now on, and True if it is complete."""
        path = self.paths.pop(name, None)
        if path is None:
            return guide, guide.advance(token_ids)
        if len(token_ids) > 1:
            guide = path.guides[len(token_ids) - 2]
        complete = guide.advance(token_ids[-1:])
        if path.ended and path.error is not None:
            raise path.error
        return guide, complete or path.ended

    # --- masks --------------------------------------------------------------------------------------------------
    def add_masks(
        self, masks: TokenMasks, branches: list[Branch], words: memoryview
    ) -> tuple[TokenMasks, Collection[str]]:
        """Return the masks of all tokens, and the ids of requests that take too long.

        `masks`: those of the first tokens, at the beginning of `words`. `branches`: states before any draft.
        """
        rows, drafts_before = [*masks.rows], [0] * len(masks.rows)
        self._too_slow = set()
        num_drafts = sum(len(branch.drafts) for branch in branches)
        self._untimed_until_s = self._clock.wall_s() + UNTIMED_S + num_drafts * FREE_ROW_S
        self.paths.update((branch.name, Path()) for branch in branches)
        count = 0
        while branches:
            branches = [*self._after_draft(branches, count)]
            count += 1
            masked, branches = self._mask(branches, words[len(rows) * self._words :])
            rows += masked
            drafts_before += [count] * len(masked)
            for branch in branches:
                self.paths[branch.name].guides.append(branch.guide)
        return TokenMasks((*rows,), words[: len(rows) * self._words], (*drafts_before,)), self._too_slow

    def _mask(self, branches: list[Branch], words: memoryview) -> tuple[list[int], list[Branch]]:
        """Write the masks of states to `words`. Return the rows of the masks, and the states whose output continues.

        The masks of the other states do not matter.
        """
        by_grammar: list[tuple[Branch, MaskSource]] = []
        fixed: list[tuple[Branch, memoryview]] = []
        continued: list[Branch] = []
        for branch in branches:
            try:
                mask = branch.guide.mask()
            except Exception as error:
                self.paths[branch.name].error = error
                continue
            if mask is None:
                continued.append(branch)
            elif not isinstance(mask, memoryview):
                by_grammar.append((branch, mask))
            else:
                fixed.append((branch, mask))
        rows = [words[at * self._words : (at + 1) * self._words] for at in range(len(by_grammar) + len(fixed))]
        self._fill(by_grammar, rows, words[: len(by_grammar) * self._words])
        for (branch, source), branch.mask in zip(by_grammar, rows, strict=False):
            if not self._ends(branch, source):
                continued.append(branch)
        for (branch, mask), branch.mask in zip(fixed, rows[len(by_grammar) :], strict=True):
            try:
                branch.mask[:] = mask
                continued.append(branch)
            except ValueError as error:  # not the size of a mask
                self.paths[branch.name].error = error
        return [branch.row for branch, _ in (*by_grammar, *fixed)], continued

    def _ends(self, branch: Branch, source: MaskSource) -> bool:
        """True if the output ends in this state, because it is complete or the guide fails."""
        assert branch.mask is not None
        if request_id_of(branch.name) in self._too_slow:
            return True
        try:
            if source.failed:
                raise source.failure()
            return (source.halted or branch.guide.edits_mask) and branch.guide.finish_mask(branch.mask)
        except Exception as error:
            self.paths[branch.name].error = error
            return True

    def _fill(self, by_grammar: list[tuple[Branch, MaskSource]], rows: Sequence[memoryview], words: memoryview) -> None:
        """Let grammars write their masks: all at once, or one by one after that has taken too long."""
        assert self._guides is not None
        done = 0
        if by_grammar and self._step >= self._timed_until:
            done = self._guides.fill([source for _, source in by_grammar], words, self._untimed_until_s)
            if self._clock.wall_s() <= self._untimed_until_s:
                return
            self._timed_until = self._step + TIMED_STEPS
        timer = Timer(self._clock)
        for (branch, source), row in zip(by_grammar[done:], rows[done:], strict=False):
            owner = request_id_of(branch.name)
            if owner in self._too_slow:
                allow_all(row)
                continue
            self._guides.fill([source], row, threads=False)
            self._charge(owner, timer.lap_s())

    def _charge(self, request_id: str, seconds: float) -> None:
        self.note_time(request_id, seconds)
        self._total_s += seconds
        if self._total_s > MAX_UNCHARGED_S:
            self._too_slow.update(self._budget.charge(request_id, seconds))

    def _after_draft(self, branches: Iterable[Branch], count: int) -> Iterator[Branch]:
        """Yield the states after one more draft than `count`, if there is one and the output may continue after it."""
        for branch in branches:
            if count == len(branch.drafts):
                continue
            draft = branch.drafts[count]
            if branch.mask is not None and not allows(branch.mask, draft):
                continue
            guide = branch.guide.fork()
            try:
                complete = guide.advance((draft,))
            except Exception as error:
                self.paths[branch.name].error = error
                continue
            if not complete:
                yield Branch(branch.row, branch.drafts, branch.name, guide)
