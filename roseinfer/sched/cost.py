"""What a step costs: a linear model of its work, fitted to measured steps while the engine runs.

    seconds = rho * (c0 + cp * Np + ca * X + cd * Nd + ck * K + cb * B + ce * R)

Np: prompt tokens computed. X: for those, the positions they attend to, summed. Nd: rows that decode. K: context tokens
that these attend to. B: tokens before each prompt chunk, summed over the chunks: a chunk reads them once, however short
it is. R, for models with experts only: how many of these a layer reads for all tokens of the step
(`ExpertChoice.read`). It is linear in the first few tokens and ends where all experts are read, so what one more row or
a prompt costs depends on what the step holds already. Recursive least squares learn the shape; `rho` follows the
present speed, a change by more than noise within 4 steps (`Speed`).

What else a step does is counted apart (`Work.draft_tokens`), has a price, and is not learnt from: a row that verifies
drafts is neither a prompt chunk nor a decode, and the constants of these would drift to explain it.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf, sqrt
from statistics import median
from typing import NamedTuple

from roseinfer.core.experts import ExpertChoice
from roseinfer.core.plan import Row

# What one unit of each feature is scaled by, so that those of a busy step are about 1. Experts: by their number.
_SCALES = (1.0, 512.0, 131_072.0, 64.0, 32_768.0, 16_384.0)
_DRIFT = 1e-6  # of the noise, per step: how fast the machine's shape may change
_CLIP_MADS = 3.0
_LEAST_CLIP = 0.01  # relative
_NOISE = 0.03  # of a measured step, relative
_LEAST_SURE = 1.0  # of the noise: what steps do not show does not become a guess
_SURE = 0.2  # standard deviation of a step's time, relative, up to which a much longer one is a stall
_LEAST_STEP_S, _LEAST_TOKEN_S = 1e-6, 1e-8  # policies divide by what a prompt token costs

_GAIN = 0.02  # of a step's error: how fast small changes are followed
_LARGEST_ERROR = 0.25  # relative, of one step, as far as it counts
_WINDOW = 7  # steps of which the median tells a change of speed from a stall
_NEWEST = 4  # of these: as many as make a median, and what the new speed is taken from
_LEAST_CHANGE = 0.1  # relative, of that median
_CLEARLY = 4.5  # times the median's usual deviation
_USUAL_GAIN = 1 / 64

_CHUNK_WORTH = 4.0  # times what it takes to read the context before it
_HALVINGS = 32  # of the interval in which the tokens are that fit a time
_TANGENTS = 8

STALL_FACTOR = 2.0  # times what a step should have taken
STALLS_WINDOW_S = 120.0
_LEAST_WINDOW_S = 30.0  # one stall in the first second says little of how many there will be
_MOST_STALLS = 64
_STALL_SHARE = 0.125  # of the steps: were there more, it would be the model that is wrong
_SHARE_GAIN = 1 / 64
_SETTLED = 50  # steps, before which a model that has just begun to learn is wrong more often than a machine stalls


class Work(NamedTuple):
    """What one step does: Np, X, Nd, K, B, and what the model has no constant for.

    A row that verifies drafts counts as one that decodes; `draft_tokens` are the tokens that it computes beyond that.
    """

    prompt_tokens: int = 0
    prompt_pairs: float = 0.0
    decode_rows: int = 0
    decode_context: int = 0
    prompt_context: int = 0
    draft_tokens: int = 0

    @property
    def features(self) -> tuple[float, float, float, float, float]:
        """What the model is fitted to, experts aside."""
        return self[:5]

    @property
    def tokens(self) -> int:
        """All that the step computes."""
        return self.prompt_tokens + self.decode_rows + self.draft_tokens

    @property
    def fits(self) -> bool:
        """Whether the features are all that the step does, so that its time says something of their constants."""
        return not self.draft_tokens


@dataclass(frozen=True, slots=True)
class CostParams:
    """Seconds: of any step, per prompt token, per pair of prompt tokens, per decode row, per context token of these,
    and per token that comes before a chunk of a prompt, for each chunk.

    A draft costs what a prompt token does, which is more than it takes in small steps.

    `load_s`, `store_s`: per KV block that is copied from host memory and to it, beside the rows. They are measured, not
    fitted; to begin with, those of 2.25 MiB (16 tokens of 8B parameters in 16 bits) over PCIe 5.

    `expert_s`: per expert that a layer reads in a step, for all layers. `experts`: of how many, and how many a token
    needs; None for a model without experts, of which `expert_s` says nothing.

    What something adds to a step depends with experts on what that has already: `beside` are its other tokens, of which
    the experts are read anyway; inf: all are.
    """

    step_s: float = 5e-3
    token_s: float = 20e-6
    pair_s: float = 0.0
    row_s: float = 20e-6
    context_s: float = 20e-9
    chunk_context_s: float = 0.0
    load_s: float = 50e-6
    store_s: float = 50e-6
    expert_s: float = 0.0
    experts: ExpertChoice | None = None

    def seconds(self, work: Work) -> float:
        linear_s = (
            self.step_s
            + self.token_s * work.prompt_tokens
            + self.pair_s * work.prompt_pairs
            + self.row_s * work.decode_rows
            + self.context_s * work.decode_context
            + self.chunk_context_s * work.prompt_context
            + self.token_s * work.draft_tokens
        )
        return linear_s if self.experts is None else linear_s + self.experts_s(work.tokens)

    def copies_s(self, loads: int, stores: int) -> float:
        """What so many blocks take, the two directions at the same time."""
        return max(self.load_s * loads, self.store_s * stores)

    def experts_s(self, tokens: float, beside: float = 0.0) -> float:
        """What reading their experts adds to a step, 0 for a model without experts."""
        if self.experts is None:
            return 0.0
        read = self.experts.read
        return self.expert_s * (read(beside + tokens) - read(beside))

    def rows_s(self, rows: float, context: float) -> float:
        """A step of so many decoding rows, which attend to `context` tokens in all, and of nothing else."""
        return self.step_s + self.row_s * rows + self.context_s * context + self.experts_s(rows)

    def one_row_s(self, context: int, beside: float) -> float:
        """What a decoding row with so much context adds to a step."""
        return self.row_s + self.context_s * context + self.experts_s(1, beside)

    def line(self, pace_s: float, context: float) -> tuple[float, float]:
        """Near a full machine, what any step costs, and what the experts of each row cost: those of the straight line
        that touches what rows cost where they fill a step of `pace_s` seconds, each with so much context.

        So a machine with a step every `pace_s` is full by the line when it is by the curve, and what one thing takes
        from another there is right; with fewer rows the line says more. Without experts: `step_s` and 0.
        """
        if self.experts is None:
            return self.step_s, 0.0
        if pace_s == inf:
            return self.step_s + self.experts_s(inf), 0.0
        each_s, rows = self.row_s + self.context_s * context, 0.0
        for _ in range(_TANGENTS):  # what rows cost is concave: Newton's way comes from below
            left_s = pace_s - self.rows_s(rows, rows * context)
            next_s = each_s + self.experts_s(1, rows)
            if left_s <= 0 or next_s <= 0:
                break
            rows += left_s / next_s
        row_s = self.experts_s(1, rows)
        return self.step_s + self.experts_s(rows) - rows * row_s, row_s

    def prefill_s(self, start: int, count: int, beside: float = 0.0) -> float:
        """What a chunk of `count` prompt tokens from position `start` on adds to a step."""
        if not count:
            return 0.0
        seconds = self.token_s * count + self.pair_s * pairs(start, count) + self.chunk_context_s * start
        return seconds if self.experts is None else seconds + self.experts_s(count, beside)

    def prefill_tokens(self, start: int, seconds: float, beside: float = 0.0) -> float:
        """How many prompt tokens from position `start` on add so many seconds to a step; 0 if those are too few: the
        count with `prefill_s(start, count, beside) = seconds`.
        """
        seconds -= self.chunk_context_s * start
        if seconds <= 0:
            return 0.0
        most = self._linear_tokens(start, seconds)
        if self.experts is None:
            return most
        least = self._linear_tokens(start, max(0.0, seconds - self.experts_s(inf, beside)))
        each_s, half_s = self.token_s + self.pair_s * (start + 0.5), 0.5 * self.pair_s
        for _ in range(_HALVINGS):
            middle = (least + most) / 2
            if middle * (each_s + half_s * middle) + self.experts_s(middle, beside) > seconds:
                most = middle
            else:
                least = middle
        return least

    def _linear_tokens(self, start: int, seconds: float) -> float:
        """The same if no expert is read for them, nor what comes before them: the root of a square equation."""
        each, half = self.token_s + self.pair_s * (start + 0.5), 0.5 * self.pair_s
        return 2 * seconds / (each + sqrt(each * each + 4 * half * seconds))

    def worth_a_chunk(self, start: int, seconds: float, beside: float = 0.0) -> bool:
        """Whether so many seconds for a prompt are well spent on a chunk from position `start` on.

        No more than a quarter of them may go into reading what comes before it, and experts that nobody else needs:
        each chunk does that, so that many small ones behind a long context would take far longer than a few larger ones
        later.
        """
        return _CHUNK_WORTH * (self.chunk_context_s * start + self.experts_s(inf, beside)) <= seconds

    def slower(self, factor: float) -> "CostParams":
        """Those of a machine that takes `factor` times as long, for copies too."""
        scaled = self.with_values([factor * value for value in self.values()])
        return replace(scaled, load_s=factor * self.load_s, store_s=factor * self.store_s)

    def values(self) -> tuple[float, ...]:
        """The constants that are fitted to steps: those of rows and, where there are any, of experts."""
        fitted = self.step_s, self.token_s, self.pair_s, self.row_s, self.context_s, self.chunk_context_s
        return fitted if self.experts is None else (*fitted, self.expert_s)

    def features(self, work: Work) -> tuple[float, ...]:
        """What a step has of each of these."""
        linear = 1.0, *work.features
        return linear if self.experts is None else (*linear, self.experts.read(work.tokens))

    def with_values(self, values: Sequence[float]) -> "CostParams":
        """With others of these."""
        step_s, token_s, pair_s, row_s, context_s, before_s, *rest = values
        expert_s = rest[0] if rest else self.expert_s
        return CostParams(
            step_s, token_s, pair_s, row_s, context_s, before_s, self.load_s, self.store_s, expert_s, self.experts
        )


def pairs(start: int, count: int) -> float:
    """Pairs of tokens (X) that `count` prompt tokens from position `start` on make: position p attends to p + 1."""
    return count * start + count * (count + 1) / 2


def work_of(rows: Sequence[Row]) -> Work:
    """Position p attends to p + 1 tokens. A row of one token counts as decoding, which is what it costs."""
    several = [row for row in rows if row[3] != 1]
    decodes = len(rows) - len(several)
    context = sum([row[2] for row in rows]) + decodes
    tokens, found, before, draft_tokens = 0, 0.0, 0, 0
    for _, _, start, count, _, _, _, _, _, drafts in several:
        if drafts:  # reads its context once, as a row that decodes
            decodes += 1
            context += 1
            draft_tokens += len(drafts)
        else:
            tokens += count
            found += pairs(start, count)
            before += start
    return Work(tokens, found, decodes, context - before, before, draft_tokens)


class Speed:
    """`rho`: seconds that steps take per second of the fitted shape. `level` is what jumped of it: the shape is fitted
    to seconds / level, so that a machine that is slow for a while does not bend it.

    The median of the last 7 ratios says whether the speed changed: one that lasts is followed after 4 steps, and up to
    3 outliers in 7 steps move nothing. What is clearly more than usual depends on how far that median strays otherwise,
    be it for noise or for work that the model does not describe well.
    """

    def __init__(self) -> None:
        self.rho = self.level = 1.0
        self._ratios: deque[float] = deque(maxlen=_WINDOW)
        self._usual = 0.025

    def observe(self, ratio: float, largest_error: float) -> bool:
        """A step took `ratio` times what the shape says at this level. True if the level changed.

        `largest_error`: relative, as far as this step may count by itself; 0 = it was a stall.
        """
        fine = self.rho / self.level
        most = min(largest_error, _LARGEST_ERROR)
        self.rho *= 1 + _GAIN * max(-most, min(most, ratio / fine - 1))
        ratios = self._ratios
        ratios.append(ratio)
        if len(ratios) <= _NEWEST:
            return False
        middle = sorted(ratios)[len(ratios) // 2] / fine
        change = abs(middle - 1) if middle > 1 else abs(1 / middle - 1)
        if change > max(_LEAST_CHANGE, _CLEARLY * self._usual):
            self.level *= median(list(ratios)[-_NEWEST:])
            self.rho = self.level
            ratios.clear()
            return True
        self._usual += _USUAL_GAIN * (change - self._usual)
        return False


@dataclass(frozen=True, slots=True)
class StallStats:
    """Of the last two minutes in which steps ran. `count`: stalls. `share`: seconds lost in them per second.
    `typical_s`, `longest_s`: lost in the median and in the longest one.
    """

    count: int = 0
    share: float = 0.0
    typical_s: float = 0.0
    longest_s: float = 0.0


class Stalls:
    """Steps that took far longer than they should have, while those around them did not."""

    def __init__(self) -> None:
        self._steps = 0
        self._busy_s = 0.0
        self._often = 0.0  # share of the steps lately
        self._found: deque[tuple[int, float, float]] = deque(maxlen=_MOST_STALLS)  # step, when, seconds lost

    def observe(self, seconds: float, expected_s: float, *, sure: bool) -> bool:
        """Whether this step is one; the first 50 steps are not counted. `sure`: whether the model knows what such
        a step takes.
        """
        self._steps += 1
        self._busy_s += seconds
        stalled = sure and seconds > STALL_FACTOR * expected_s
        self._often += _SHARE_GAIN * (stalled - self._often)
        if not stalled or self._often > _STALL_SHARE:
            return False
        if self._steps > _SETTLED:
            self._found.append((self._steps, self._busy_s, seconds - expected_s))
        return True

    def retract(self) -> None:
        """The newest were no stalls: the machine became slower."""
        while self._found and self._found[-1][0] > self._steps - _WINDOW:
            self._found.pop()

    def stats(self) -> StallStats:
        """As of the newest step."""
        since_s = self._busy_s - STALLS_WINDOW_S
        while self._found and self._found[0][1] < since_s:
            self._found.popleft()
        if not self._found:
            return StallStats()
        lost = [lost_s for _, _, lost_s in self._found]
        span_s = min(STALLS_WINDOW_S, max(_LEAST_WINDOW_S, self._busy_s))
        return StallStats(len(lost), sum(lost) / span_s, median(lost), max(lost))


class CostModel:
    """`params` is the present estimate, `rho` included. `observe` learns from each measured step (`steps` of them).
    `predicted_s`: what the model said of the newest of them, before it learnt from it; 0 = none.

    A step that takes far longer than those around it is a stall: counted (`stalls`), and not learnt from.

    `trust` says how sure the first estimate is: its standard deviation relative to a step.
    """

    def __init__(self, params: CostParams | None = None, *, trust: float = 0.02, fit: bool = True) -> None:
        start = params or CostParams()
        self.params = start
        if start.token_s < _LEAST_TOKEN_S:  # fitted to steps of which experts explain all that prompts took, say
            self.params = replace(start, token_s=_LEAST_TOKEN_S)
        self.errors: deque[float] = deque(maxlen=256)  # relative, signed, before each update
        self._fit = fit
        self._speed = Speed()
        self._stalls = Stalls()
        experts = start.experts
        self._scales = _SCALES if experts is None else (*_SCALES, float(experts.count))
        self._weights = [value * scale for value, scale in zip(start.values(), self._scales, strict=True)]
        spread = (trust * sum(self._weights)) ** 2
        size = len(self._weights)
        self._cov = [[spread if i == j else 0.0 for j in range(size)] for i in range(size)]
        self._noise = (_NOISE * sum(self._weights)) ** 2
        self._residuals: deque[float] = deque(maxlen=64)
        self._clip = float("inf")
        self.steps = 0
        self.predicted_s = 0.0

    @property
    def rho(self) -> float:
        return self._speed.rho

    @property
    def stalls(self) -> StallStats:
        """How often and how long the machine stalled lately."""
        return self._stalls.stats()

    def seconds(self, work: Work) -> float:
        return self.params.seconds(work)

    def observe(self, work: Work, seconds: float) -> None:
        """Learn from a step that took `seconds`. Not for steps with compilation, capture or garbage collection."""
        if seconds <= 0:
            self.predicted_s = 0.0
            return
        self.predicted_s = self.params.seconds(work)
        if not work.fits:
            return
        self.steps += 1
        self.errors.append(seconds / self.predicted_s - 1)
        speed = self._speed
        ratio, counts = self._learn(work, seconds, seconds / speed.level)
        if speed.observe(ratio, self._clip if counts else 0.0):
            self._stalls.retract()
        scaled = [speed.rho * w / scale for w, scale in zip(self._weights, self._scales, strict=True)]
        scaled[0], scaled[1] = max(scaled[0], _LEAST_STEP_S), max(scaled[1], _LEAST_TOKEN_S)
        self.params = self.params.with_values(scaled)

    def _learn(self, work: Work, seconds: float, unit_s: float) -> tuple[float, bool]:
        """Fit the shape to a step of `unit_s` seconds at the present level. Returns that over what the shape now says
        (as far as the fit takes the difference on itself, the machine has not changed), and whether it was no stall.
        """
        x = [f / scale for f, scale in zip(self.params.features(work), self._scales, strict=True)]
        shown = [(i, f) for i, f in enumerate(x) if f]  # in most steps there are no prompts
        mx = [sum([line[i] * f for i, f in shown]) for line in self._cov]
        variance = sum([f * m for f, m in zip(x, mx, strict=True)])
        shape_s = max(sum([w * f for w, f in zip(self._weights, x, strict=True)]), _LEAST_STEP_S)
        sure = variance < (_SURE * shape_s) ** 2
        stalled = self._stalls.observe(seconds, self.predicted_s, sure=sure)
        if self._fit and not stalled:
            taken = self._update(mx, variance, unit_s, unit_s - shape_s)
            shape_s = max(shape_s + taken * (unit_s - shape_s), _LEAST_STEP_S)
        return unit_s / shape_s, not stalled

    def _update(self, mx: list[float], variance: float, seconds: float, residual: float) -> float:
        """One step of recursive least squares. A residual counts in full up to 3 median deviations, beyond linearly.

        `mx`: the step's features times the covariance, `variance` that times the features again. Returns the share of
        the residual that the fit has taken on itself.

        Forgetting is a little uncertainty added per step, not a factor: on a machine that does the same for hours a
        factor would grow rounding errors, and doubt about all that these steps do not show, without bound.
        """
        cov, size = self._cov, abs(residual)
        self._residuals.append(size / seconds)
        if self.steps % 16 == 0:
            self._clip = max(_CLIP_MADS * 1.4826 * median(self._residuals), _LEAST_CLIP)
        noise = max(self._noise, (_NOISE * seconds) ** 2)
        if size > self._clip * seconds:
            noise *= size / (self._clip * seconds)  # Huber's weight
        denominator = noise + variance
        gain = [m / denominator for m in mx]
        self._weights = [w + g * residual for w, g in zip(self._weights, gain, strict=True)]
        drift, ceiling = _DRIFT * self._noise, _LEAST_SURE * self._noise
        for i, line in enumerate(cov):
            for j in range(i, len(cov)):
                line[j] = cov[j][i] = line[j] - gain[i] * mx[j]
            if line[i] < ceiling:
                line[i] += drift
        self._forbid_negative()
        return variance / denominator

    def _forbid_negative(self) -> None:
        """Set negative weights to 0, and move the others as their covariance with these says.

        What was learnt of sums of weights is kept that way. Were they only cut off, the others would keep what they had
        given to them, and each step would add more: on a real machine the model grew without bound.
        """
        for _ in range(2 * len(self._weights)):
            least = min(self._weights)
            if least >= 0:
                return
            i = self._weights.index(least)
            line = self._cov[i]
            share = least / line[i] if line[i] > 0 else 0.0
            self._weights = [w - share * c for w, c in zip(self._weights, line, strict=True)]
            self._weights[i] = 0.0
        self._weights = [max(0.0, w) for w in self._weights]


class StepClock:
    """How long steps take as whoever waits for them sees it: with what the host does around them.

    Follows the steps of one scheduler: `planned` and `done` for each, in order, `paused` when nothing was planned.

    A step that has the engine to itself lasts from the end of the one before it, if the engine went straight on, or
    else from its plan. One that is planned while others are in flight lasts as long as the device says: what the host
    did meanwhile did not delay it.
    """

    def __init__(self) -> None:
        self._began_s: dict[int, float | None] = {}  # step -> when, None if others were in flight
        self._last_s: float | None = None  # when the last step ended, if there was more to do

    def planned(self, step: int, now_s: float) -> None:
        began_s = now_s if self._last_s is None else self._last_s
        self._began_s[step] = None if self._began_s else began_s

    def paused(self) -> None:
        self._last_s = None

    def done(self, step: int, now_s: float, duration_s: float, *, more: bool) -> float:
        """Seconds that the step took. `duration_s`: on the device. `more`: whether requests are left that run."""
        began_s = self._began_s.pop(step, None)
        self._last_s = now_s if more else None
        return duration_s if began_s is None else max(duration_s, now_s - began_s)
