"""Load reports in the headers of answers, for gateways: ORCA, in the formats of vLLM and Triton.

A request with `endpoint-load-metrics-format: TEXT` or `JSON` is answered with `endpoint-load-metrics`. Fields of
`xds.data.orca.v3.OrcaLoadReport` are those that Envoy's balancers use; the rest are named metrics.
"""

from collections import deque
from collections.abc import Sequence

import msgspec

from roseinfer.cluster.forecast import forecasts
from roseinfer.core.errors import InvalidRequestError
from roseinfer.core.outputs import PolicyStats, SchedulerStats
from roseinfer.engine.api import EngineInfo, EngineReport

FORMAT_HEADER = "endpoint-load-metrics-format"
FORMATS = ("TEXT", "JSON")
MAX_WINDOW_S, MIN_WINDOW_S = 10.0, 1.0
_PROMPT_TOKENS = 1000  # of the prompt in `predicted_ttft_ms_1k`
_DIGITS_COUNT = 6


class RateWindow:
    """Growth rate of a counter over the last `MAX_WINDOW_S`, or since an older reading if there is none within."""

    def __init__(self) -> None:
        self._readings: deque[tuple[float, int]] = deque()

    def per_second(self, count: int, now_s: float) -> float | None:
        """Return None until the first reading is `MIN_WINDOW_S` old."""
        readings = self._readings
        if readings and count < readings[-1][1]:
            readings.clear()  # an engine and its count are gone
        while len(readings) > 1 and now_s - readings[1][0] >= MAX_WINDOW_S:
            readings.popleft()
        if not readings or now_s - readings[-1][0] >= MIN_WINDOW_S:
            readings.append((now_s, count))
        since_s, before = readings[0]
        return (count - before) / (now_s - since_s) if now_s - since_s >= MIN_WINDOW_S else None


class LoadHeader:
    """Values of the header `endpoint-load-metrics`."""

    def __init__(self) -> None:
        self._requests = RateWindow()

    def value(self, wanted: str, reports: Sequence[EngineReport], info: EngineInfo | None, now_s: float) -> str:
        """Return the value in the `wanted` format. Raise `InvalidRequestError` if it is not one of `FORMATS`.

        `info`: of engines whose reports have none.
        """
        kind = wanted.strip().upper()
        if kind not in FORMATS:
            raise InvalidRequestError(f"{FORMAT_HEADER} must be TEXT or JSON, got {wanted[:20]!r}", FORMAT_HEADER)
        fields = _rounded(self._fields(reports, info, now_s))
        named = _rounded(named_metrics(reports, now_s))
        if kind == "JSON":
            return "JSON " + msgspec.json.encode({**fields, "named_metrics": named}).decode()
        flat = fields | {f"named_metrics.{name}": value for name, value in named.items()}
        return "TEXT " + ", ".join(f"{name}={value:g}" for name, value in flat.items())

    def _fields(self, reports: Sequence[EngineReport], info: EngineInfo | None, now_s: float) -> dict[str, float]:
        """Return the known fields of an `OrcaLoadReport`."""
        fields = {}
        up = [(report.stats, report.info or info) for report in reports if report.state.is_up]
        shares = [utilisation(stats, its) for stats, its in up if its is not None]
        if shares:
            fields["application_utilization"] = sum(shares) / len(shares)
        rate = self._requests.per_second(sum([one.stats.requests for one in reports]), now_s)
        if rate is not None:
            fields["rps_fractional"] = rate
        return fields


def utilisation(stats: SchedulerStats, info: EngineInfo) -> float:
    """Return the share of the engine that objectives need, or of its seats in use if the policy has no such figure."""
    share = (stats.policy or PolicyStats()).utilisation
    return stats.running / info.max_num_seqs if share is None else share


def _rounded(values: dict[str, float]) -> dict[str, float]:
    return {name: round(value, _DIGITS_COUNT) for name, value in values.items()}


def named_metrics(reports: Sequence[EngineReport], now_s: float) -> dict[str, float]:
    """Return the metrics of all engines that are up: sums of requests, and shares of the whole.

    `slo_utilisation` and `predicted_ttft_ms_1k` are missing if the scheduling policy does not provide them.
    """
    up = [report for report in reports if report.state.is_up]
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
    best = forecasts(up, now_s, _PROMPT_TOKENS)
    if best:
        named["predicted_ttft_ms_1k"] = 1000 * best[0].ttft_s
    return named
