"""Prices of machine work over a run, and the bound that they give."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, floor, inf, sqrt
from operator import mul

from benchmarks.research.demands import Demand

_GOLDEN = (sqrt(5) - 1) / 2
_GAP, _PATIENCE, _KEPT = 0.2, 15, 0.6
Grad = list[float]


@dataclass(frozen=True, slots=True)
class Span:
    """Demand on the windows from `begin` on: prefill ends before `first`, decoding before `end`.

    0 = no deadline and no price. Decoding takes at least `parts` windows: the share `part` of it in each but the last,
    and `rest` of such a share in that one. The request certainly runs from window `runs` to `ran`. `tries`: as in
    `Demand`.
    """

    level: int
    prefill_s: float
    tries: tuple[tuple[float, float], ...]
    begin: int
    first: int
    end: int
    parts: int
    part: float
    rest: float
    runs: int
    ran: int


class Windows:
    """Run in `count` windows of equal length.

    `room(at_s, pace_s)`: seconds of work per second at that time and pace. `fastest_s`: minimum time per token of any
    request.
    """

    def __init__(
        self,
        demands: Sequence[Demand],
        paces: Sequence[float],
        room: Callable[[float, float], float],
        fastest_s: float,
        count: int,
    ) -> None:
        ends = [each.at_s + due for each in demands for due in (each.first_s, each.end_s) if due < inf]
        self._start = min(each.at_s for each in demands)
        self._width = max(max(ends, default=self._start) - self._start, 1e-9) / count
        self._count = count
        self._paces = paces
        self._fastest_s = fastest_s
        middles = [self._start + (i + 0.5) * self._width for i in range(count)]
        self._room = [[self._width * room(at_s, pace) for at_s in middles] for pace in paces]
        self._full = [room(middles[0], inf) / max(room(middles[0], pace), 1e-9) for pace in paces]
        self._spans = [self._span(each) for each in demands]

    def _span(self, each: Demand) -> Span:
        def window(after_s: float) -> float:
            return (each.at_s + after_s - self._start) / self._width

        level, count = bisect_left(self._paces, each.pace_s), self._count
        begin = min(floor(window(0.0)), count - 1)
        first = min(ceil(window(min(each.first_s, each.end_s))), count) if min(each.first_s, each.end_s) < inf else 0
        end = min(ceil(window(each.end_s)), count) if each.end_s < inf and each.steps else 0
        first, end = (max(value, begin + 1) if value else 0 for value in (first, end))
        least_s = max(each.steps * self._fastest_s, each.least_s)
        parts = min(ceil(least_s / self._width), end - begin) if end else 0
        part = min(1.0, self._width / least_s) if parts else 0.0
        rest = max(0.0, 1.0 / part - (parts - 1)) if parts else 0.0
        runs = ran = 0
        if each.pace_s < inf and each.first_s < inf:
            runs = ceil(window(each.first_s) - 1e-9)
            ran = min(floor(window(each.prefill_s + least_s) + 1e-9), count)
        return Span(
            level, each.prefill_s, each.tries, begin, first, end, parts, part, min(rest, 1.0), runs, max(ran, runs)
        )

    def at(self, prices: Sequence[float], lift: float) -> tuple[float, Grad]:
        """Return the bound on good requests at these prices, and its gradient. `lift`: as in `ratios`.

        A request's value beyond the price of its work is divided equally among the windows in which it certainly runs
        and that hold its pace.
        """
        ratios = self.ratios(lift)
        order = sorted(range(self._count), key=prices.__getitem__)
        rank = [0] * self._count
        for place, t in enumerate(order):
            rank[t] = place
        gains = [[0.0] * (self._count + 1) for _ in self._paces]  # changes from window to window, by level
        total, grad, paced = 0.0, [0.0] * self._count, []
        for span in self._spans:
            prefill, each, cheap = 0.0, 0.0, -1
            if span.first:
                cheap = order[min(rank[span.begin : span.first])]
                prefill = prices[cheap] * span.prefill_s
            chosen: list[int] = []
            if span.parts:
                chosen = [order[place] for place in sorted(rank[span.begin : span.end])[: span.parts]]
                rest = (1.0 - span.rest) * prices[chosen[-1]]
                each = ratios[span.level] * span.part * (sum([prices[t] for t in chosen]) - rest)
            gain, decode_s = max([(share - each * decode_s, decode_s) for share, decode_s in span.tries])
            gain -= prefill
            if gain <= 0.0:
                continue
            part = ratios[span.level] * span.part * decode_s
            if span.ran > span.runs:
                line = gains[span.level]
                line[span.runs] += gain / (span.ran - span.runs)
                line[span.ran] -= gain / (span.ran - span.runs)
                paced.append((span, cheap, chosen, part))
            else:
                total += gain
                _charge(grad, span, cheap, chosen, part, 1.0)
        held, worth = self._hold(prices, ratios, gains, grad)
        for span, cheap, chosen, part in paced:
            windows = held[span.level]
            share = (windows[span.ran] - windows[span.runs]) / (span.ran - span.runs)
            if share:
                _charge(grad, span, cheap, chosen, part, share)
        return total + worth, grad

    def ratios(self, lift: float) -> list[float]:
        """Return prices of decoding by level: equal at 0; at 1, a second is worth the same at every level."""
        return [1.0 + lift * (full - 1.0) for full in self._full]

    def _hold(
        self, prices: Sequence[float], ratios: Sequence[float], gains: Sequence[Grad], grad: Grad
    ) -> tuple[list[list[int]], float]:
        """Assign each window to its most valuable level.

        Returns, by level, the number of windows before each one that hold its pace, and the total value.
        """
        levels = range(len(ratios))
        now = [0.0] * len(ratios)
        held = [[0] for _ in levels]
        total = 0.0
        for t, price in enumerate(prices):
            most, chosen, above = -inf, 0, 0.0
            for level in reversed(levels):
                now[level] += gains[level][t]
                above += now[level]
                value = price * ratios[level] * self._room[level][t] + above
                if value > most:
                    most, chosen = value, level
            total += most
            grad[t] += ratios[chosen] * self._room[chosen][t]
            for level in levels:
                held[level].append(held[level][-1] + (chosen <= level))
        return held, total

    def bound(self, lifts: Sequence[float], rounds: int) -> float:
        """Return the smallest bound that was found."""
        found = [self._flat(lift, until) for until in self._untils() for lift in lifts]
        best, prices, lift = min(found)
        return min(best, self._descend(prices, lift, best, rounds))

    def _untils(self) -> list[int]:
        """Return windows after which little work may remain."""
        last = max(span.begin for span in self._spans) + 1
        ends = sorted(span.end or self._count for span in self._spans)
        marks = [last, *(max(last, ends[int(share * (len(ends) - 1))]) for share in (0.9, 0.97, 1.0))]
        return sorted(set(marks))

    def _flat(self, lift: float, until: int) -> tuple[float, list[float], float]:
        """Try one price for all work before window `until` and none after it: (bound, prices, lift)."""
        works = [span.prefill_s * bool(span.first) + span.tries[-1][1] * bool(span.parts) for span in self._spans]
        busy = [work_s for work_s in works if work_s > 0.0]
        if not busy:
            return float(len(self._spans)), [0.0] * self._count, lift
        low, high = 0.0, min(1.0 / min(busy), 20.0 * len(busy) / sum(busy))

        def prices(price: float) -> list[float]:
            return [price] * until + [0.0] * (self._count - until)

        def at(price: float) -> float:
            return self.at(prices(price), lift)[0]

        a, b = high - _GOLDEN * high, _GOLDEN * high
        at_a, at_b = at(a), at(b)
        for _ in range(14):
            if at_a < at_b:
                high, b, at_b = b, a, at_a
                a = high - _GOLDEN * (high - low)
                at_a = at(a)
            else:
                low, a, at_a = a, b, at_b
                b = low + _GOLDEN * (high - low)
                at_b = at(b)
        return min((at_a, prices(a), lift), (at_b, prices(b), lift))

    def _descend(self, prices: list[float], lift: float, best: float, rounds: int) -> float:
        """Take subgradient steps of Polyak's length towards a target below the best bound, with momentum.

        When the target is not approached, it moves halfway closer, and the search continues from the best prices.
        """
        gap, kept, since = _GAP * best, prices, 0
        pull = [0.0] * self._count
        for _ in range(rounds):
            value, grad = self.at(prices, lift)
            since = 0 if value < best - 0.05 * gap else since + 1
            if value < best:
                best, kept = value, prices
            if since >= _PATIENCE:
                gap, since, prices, pull = gap / 2, 0, kept, [0.0] * self._count
                continue
            grad = [g if p > 0.0 or g < 0.0 else 0.0 for g, p in zip(grad, prices, strict=True)]
            pull = [_KEPT * before + g for before, g in zip(pull, grad, strict=True)]
            size = sum(map(mul, pull, pull))
            if not size:
                break
            step = (value - best + gap) / size
            prices = [max(0.0, price - step * g) for price, g in zip(prices, pull, strict=True)]
        return best


def _charge(grad: Grad, span: Span, cheap: int, chosen: Sequence[int], part: float, share: float) -> None:
    """Charge a share of a request where its work is done. `part`: of its decoding, in each window but the last."""
    if cheap >= 0:
        grad[cheap] -= share * span.prefill_s
    if chosen:
        for t in chosen:
            grad[t] -= share * part
        grad[chosen[-1]] += share * part * (1.0 - span.rest)
