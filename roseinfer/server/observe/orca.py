"""Load in the headers of answers, for gateways that ask for it: ORCA, as vLLM and Triton write it.

A request with `endpoint-load-metrics-format: TEXT` or `JSON` is answered with `endpoint-load-metrics`.
"""

from collections.abc import Sequence

import msgspec

from roseinfer.engine.api import EngineReport
from roseinfer.engine.prospects import prospects
from roseinfer.server.http.errors import bad_request
from roseinfer.server.observe.exposition import TOLD_PROMPT_TOKENS, UP

ASKED_BY = "endpoint-load-metrics-format"
FORMATS = ("TEXT", "JSON")
_PLACES = 6


def load_header(wanted: str, reports: Sequence[EngineReport], now_s: float) -> str:
    """The value of `endpoint-load-metrics`. Raises `ApiError` 400 for a format that is none of `FORMATS`."""
    kind = wanted.strip().upper()
    if kind not in FORMATS:
        raise bad_request(f"{ASKED_BY} must be TEXT or JSON, got {wanted[:20]!r}", ASKED_BY)
    named = {name: round(value, _PLACES) for name, value in named_metrics(reports, now_s).items()}
    if kind == "JSON":
        return "JSON " + msgspec.json.encode({"named_metrics": named}).decode()
    return "TEXT " + ", ".join(f"named_metrics.{name}={value:g}" for name, value in named.items())


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
    best = prospects(up, now_s, TOLD_PROMPT_TOKENS)
    if best:
        named["predicted_ttft_ms_1k"] = 1000 * best[0].ttft_s
    return named
