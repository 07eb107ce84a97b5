"""Load in the headers of answers, for gateways that ask for it: ORCA, as vLLM and Triton write it.

A request with `endpoint-load-metrics-format: TEXT` or `JSON` is answered with `endpoint-load-metrics`. Names that are
those of `xds.data.orca.v3.OrcaLoadReport` are what Envoy's balancers weigh; the rest are named metrics.
"""

from collections import deque
from collections.abc import Sequence

import msgspec

from roseinfer.cluster.forecast import forecasts
from roseinfer.core.outputs import PolicyStats, SchedulerStats
from roseinfer.engine.api import EngineInfo, EngineReport
from roseinfer.server.http.errors import bad_request
from roseinfer.server.observe.exposition import TOLD_PROMPT_TOKENS, UP

ASKED_BY = "endpoint-load-metrics-format"
FORMATS = ("TEXT", "JSON")
WINDOW_S, LEAST_S = 10.0, 1.0
_PLACES = 6


class Rate:
    """How fast a count grows: over the last `WINDOW_S`, or since somebody looked before that."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def per_second(self, count: int, now_s: float) -> float | None:
        """None until it has been looked at for `LEAST_S`."""
        seen = self._seen
        if seen and count < seen[-1][1]:
            seen.clear()  # an engine that counted has gone
        while len(seen) > 1 and now_s - seen[1][0] >= WINDOW_S:
            seen.popleft()
        if not seen or now_s - seen[-1][0] >= LEAST_S:
            seen.append((now_s, count))
        since_s, before = seen[0]
        return (count - before) / (now_s - since_s) if now_s - since_s >= LEAST_S else None


class LoadHeader:
    """The values of `endpoint-load-metrics`, one after the other."""

    def __init__(self) -> None:
        self._requests = Rate()

    def value(self, wanted: str, reports: Sequence[EngineReport], info: EngineInfo | None, now_s: float) -> str:
        """`info`: of engines that do not tell theirs. Raises `ApiError` 400 for a format that is none of `FORMATS`."""
        kind = wanted.strip().upper()
        if kind not in FORMATS:
            raise bad_request(f"{ASKED_BY} must be TEXT or JSON, got {wanted[:20]!r}", ASKED_BY)
        told = _rounded(self._report(reports, info, now_s))
        named = _rounded(named_metrics(reports, now_s))
        if kind == "JSON":
            return "JSON " + msgspec.json.encode({**told, "named_metrics": named}).decode()
        every = told | {f"named_metrics.{name}": value for name, value in named.items()}
        return "TEXT " + ", ".join(f"{name}={value:g}" for name, value in every.items())

    def _report(self, reports: Sequence[EngineReport], info: EngineInfo | None, now_s: float) -> dict[str, float]:
        """The fields of an `OrcaLoadReport` that are known."""
        known = {}
        up = [(report.stats, report.info or info) for report in reports if report.state in UP]
        shares = [utilisation(stats, its) for stats, its in up if its is not None]
        if shares:
            known["application_utilization"] = sum(shares) / len(shares)
        rate = self._requests.per_second(sum([one.stats.requests for one in reports]), now_s)
        if rate is not None:
            known["rps_fractional"] = rate
        return known


def utilisation(stats: SchedulerStats, info: EngineInfo) -> float:
    """The share of an engine that promises ask for; where there is no such figure, of its seats that are taken."""
    share = (stats.policy or PolicyStats()).utilisation
    return stats.running / info.max_num_seqs if share is None else share


def _rounded(values: dict[str, float]) -> dict[str, float]:
    return {name: round(value, _PLACES) for name, value in values.items()}


def named_metrics(reports: Sequence[EngineReport], now_s: float) -> dict[str, float]:
    """Of all engines that are up together: requests are added up, shares are those of the whole. There is no
    `slo_utilisation` and no `predicted_ttft_ms_1k` where the scheduling policy knows no such thing.
    """
    up = [report for report in reports if report.state in UP]
    stats = [report.stats for report in up]
    blocks = sum([one.blocks_total for one in stats])
    named = {
        "kv_cache_usage_perc": sum([one.blocks_used for one in stats]) / blocks if blocks else 0.0,
        "num_requests_waiting": float(sum([one.waiting for one in stats])),
        "num_requests_running": float(sum([one.running for one in stats])),
    }
    busy = [one.policy.utilisation for one in stats if one.policy is not None and one.policy.utilisation is not None]
    if busy:
        named["slo_utilisation"] = sum(busy) / len(busy)
    best = forecasts(up, now_s, TOLD_PROMPT_TOKENS)
    if best:
        named["predicted_ttft_ms_1k"] = 1000 * best[0].ttft_s
    return named
