"""Writes roseinfer.json, the Grafana dashboard beside this file: python deploy/grafana/dashboard.py

Each panel is a line below. Counted and timed is over all servers that are scraped; what engines say of themselves is
shown for each of them. Means and quantiles are made of sums over all servers, never of the servers' own means.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

TARGET = Path(__file__).with_name("roseinfer.json")
WIDTH, COLUMNS, HEIGHT = 24, 3, 8
DATA = {"type": "prometheus", "uid": "${datasource}"}
MODEL = 'model_name="$model_name"'
ENGINE = f'{MODEL}, engine=~"$engine"'
OVER = "[$__rate_interval]"
MET, LATE, DONE = 'outcome="met"', 'outcome=~"missed_.*"', 'outcome=~"met|missed_.*"'
SEEN = 'outcome!="aborted"'


class Query(NamedTuple):
    expr: str
    legend: str = ""


class Panel(NamedTuple):
    title: str
    queries: tuple[Query, ...]
    unit: str = "short"
    about: str = ""
    kind: str = "timeseries"
    stacked: bool = False
    most: float | None = None


def rate(metric: str, by: str, more: str = "", where: str = MODEL) -> str:
    labels = f"{where}, {more}" if more else where
    return f"sum by ({by}) (rate({metric}{{{labels}}}{OVER}))"


def total(metric: str, more: str = "") -> str:
    labels = f"{MODEL}, {more}" if more else MODEL
    return f"sum(rate({metric}{{{labels}}}{OVER}))"


def share(part: str, whole: str) -> str:
    """0 where there is nothing of the part: a series exists once something has happened."""
    return f"({part} or 0 * {whole}) / {whole}"


def mean(metric: str) -> Query:
    return Query(f"{total(metric + '_sum')} / {total(metric + '_count')}", "mean")


def quantile(share: float, metric: str) -> Query:
    return Query(f"histogram_quantile({share}, {rate(metric + '_bucket', 'le')})", f"P{share * 100:g}")


def latency(title: str, metric: str, about: str = "") -> Panel:
    return Panel(title, (*(quantile(share, metric) for share in (0.5, 0.9, 0.99)), mean(metric)), "s", about)


def gauge(metric: str) -> Query:
    return Query(f"{metric}{{{ENGINE}}}", "{{instance}} {{engine}}")


def per_engine(metric: str) -> str:
    return rate(metric, "instance, engine", where=ENGINE)


def copied(what: str) -> tuple[Query, Query]:
    """K and V between the KV cache and host memory, each way."""
    ways = ("load", "to the KV cache"), ("store", "to host memory")
    load, store = (
        Query(per_engine(f"vllm:kv_offload_{way}_{what}_total"), f"{where} {{{{instance}}}} {{{{engine}}}}")
        for way, where in ways
    )
    return load, store


def heat(title: str, metric: str, unit: str, more: str = "", about: str = "") -> Panel:
    labels = f"{MODEL}, {more}" if more else MODEL
    expr = f"sum by (le) (increase({metric}_bucket{{{labels}}}{OVER}))"
    return Panel(title, (Query(expr, "{{le}}"),), unit, about, "heatmap")


DRAFTED, ACCEPTED = "roseinfer:spec_drafted_tokens_total", "roseinfer:spec_accepted_tokens_total"
REQUESTS, REFUSED = "roseinfer:slo_requests_total", "roseinfer:slo_rejections_total"

ROWS: dict[str, tuple[Panel, ...]] = {
    "Promises": (
        Panel(
            "Attainment by class",
            (
                Query(
                    share(rate(REQUESTS, "slo_class", MET), rate(REQUESTS, "slo_class", SEEN)),
                    "{{slo_class}}",
                ),
            ),
            "percentunit",
            "Requests that kept all their objectives, of all but those whose clients left",
            most=1,
        ),
        Panel("Outcomes", (Query(rate(REQUESTS, "outcome"), "{{outcome}}"),), "reqps", stacked=True),
        Panel(
            "Promises broken, by class",
            (
                Query(
                    share(rate(REQUESTS, "slo_class", LATE), rate(REQUESTS, "slo_class", DONE)),
                    "{{slo_class}}",
                ),
            ),
            "percentunit",
            "Late ones of those that were admitted and finished: what was promised and not kept",
        ),
        Panel(
            "Refused, by what stood against them",
            (Query(rate(REFUSED, "reason, cause"), "{{reason}}: {{cause}}"),),
            "reqps",
            "idle: an idle machine would have missed the objective as well; all others: more machines would help",
            stacked=True,
        ),
        Panel(
            "Late, by objective",
            (Query(rate(REQUESTS, "slo_class, outcome", LATE), "{{slo_class}} {{outcome}}"),),
            "reqps",
        ),
        heat(
            "Slack: objective less what was seen",
            "roseinfer:slo_slack_seconds",
            "s",
            'objective=~"$objective"',
            "Below 0 is late",
        ),
    ),
    "Machines": (
        Panel(
            "Utilisation by objectives",
            (gauge("roseinfer:slo_utilisation"),),
            "percentunit",
            "Share of the machine that the objectives of running requests ask for; near 1 it is full",
        ),
        Panel(
            "Fullness",
            (gauge("roseinfer:engine_fullness"),),
            "percentunit",
            "How full autoscaling counts the engine: seats, memory, prompts, objectives or queue; 1 is full",
        ),
        Panel(
            "Speed against the cost model",
            (gauge("roseinfer:slo_speed_ratio"),),
            about="Recent step time divided by the fitted cost model's; above 1: slower than earlier steps",
        ),
        Panel(
            "Step time over prediction",
            (
                Query(
                    f"{per_engine('roseinfer:step_time_ratio_sum')} / {per_engine('roseinfer:step_time_ratio_count')}",
                    "mean {{instance}} {{engine}}",
                ),
                quantile(0.95, "roseinfer:step_time_ratio"),
            ),
        ),
        Panel(
            "Step time and budget",
            (
                Query(
                    f"{per_engine('roseinfer:step_time_seconds_sum')} / "
                    f"{per_engine('roseinfer:step_time_seconds_count')}",
                    "mean step {{instance}} {{engine}}",
                ),
                Query(f"roseinfer:slo_step_budget_seconds{{{ENGINE}}}", "budget {{instance}} {{engine}}"),
            ),
            "s",
            "The budget is what the most urgent request leaves the newest step; absent while nobody is owed a token",
        ),
        Panel(
            "Demoted requests and preemptions",
            (
                Query(f"roseinfer:slo_demoted_requests{{{ENGINE}}}", "demoted {{instance}} {{engine}}"),
                Query(per_engine("vllm:num_preemptions_total"), "preemptions/s {{instance}} {{engine}}"),
            ),
        ),
        Panel("Heartbeat age", (gauge("roseinfer:engine_heartbeat_age_seconds"),), "s", "Above 10 s it hangs"),
        Panel(
            "Engine states",
            (
                Query(
                    f"sum by (state) (roseinfer:engine_state{{{ENGINE}}})",
                    "{{state}}",
                ),
            ),
            stacked=True,
        ),
        Panel(
            "Deaths and restarts",
            (
                Query(
                    f"sum by (instance, engine) (increase(roseinfer:engine_deaths_total{{{ENGINE}}}{OVER}))",
                    "deaths {{instance}} {{engine}}",
                ),
                Query(
                    f"sum by (instance, engine) (increase(roseinfer:engine_restarts_total{{{ENGINE}}}{OVER}))",
                    "restarts {{instance}} {{engine}}",
                ),
            ),
        ),
        Panel(
            "Prompt tokens computed",
            (Query(per_engine("roseinfer:prefill_tokens_total"), "{{instance}} {{engine}}"),),
            "short",
            "Without cached ones, again after a preemption",
        ),
    ),
    "Router": (
        Panel(
            "Placements by engine and reason",
            (Query(rate("roseinfer:router_placements_total", "engine, reason"), "{{engine}} {{reason}}"),),
            "reqps",
            "With several engines, like the rest of this row",
            stacked=True,
        ),
        Panel(
            "Retried, placed again, resumed",
            (
                Query(rate("roseinfer:router_retries_total", "engine"), "retried {{engine}}"),
                Query(rate("roseinfer:router_placed_again_total", "engine, cause"), "again {{engine}} {{cause}}"),
                Query(rate("roseinfer:router_resumes_total", "engine, cause"), "resumed {{engine}} {{cause}}"),
            ),
            "reqps",
        ),
        Panel(
            "Prompt tokens found in the cache",
            (
                Query(
                    f"{per_engine('vllm:prefix_cache_hits_total')} / {per_engine('vllm:prefix_cache_queries_total')}",
                    "{{instance}} {{engine}}",
                ),
            ),
            "percentunit",
            most=1,
        ),
        Panel(
            "Breakers open",
            (gauge("roseinfer:router_breakers_open"),),
            about="API processes that send the engine nothing for now because it failed them",
        ),
    ),
    "K and V in host memory": (
        Panel(
            "Host memory in use",
            (gauge("vllm:kv_offload_cpu_cache_usage_perc"),),
            "percentunit",
            "Share of the host blocks that hold something; with --kv-offloading-size, like the rest of this row",
            most=1,
        ),
        Panel(
            "Prompt tokens that were not computed",
            (
                Query(total("vllm:prefix_cache_hits_total"), "found in the KV cache"),
                Query(total("vllm:external_prefix_cache_hits_total"), "loaded from host memory"),
            ),
            "short",
            "A second",
            stacked=True,
        ),
        Panel(
            "Bytes copied",
            copied("bytes"),
            "Bps",
        ),
        Panel(
            "Time of copies",
            copied("time"),
            "percentunit",
            "Share of the time that the link is busy in that direction",
        ),
        Panel("Requests that wait for a load", (gauge("roseinfer:num_requests_loading"),)),
    ),
    "Speculation": (
        Panel(
            "Tokens per verifying row",
            (Query(f"1 + {total(ACCEPTED)} / {total('roseinfer:spec_steps_total')}", "mean"),),
            "short",
            "Without drafts a row yields one token; with --speculation, like the rest of this row",
        ),
        Panel(
            "Drafts that became output, by proposer",
            (Query(f"{rate(ACCEPTED, 'proposer')} / {rate(DRAFTED, 'proposer')}", "{{proposer}}"),),
            "percentunit",
            most=1,
        ),
        Panel(
            "Drafts that became output, by position",
            (Query(f"{rate(ACCEPTED, 'position')} / {rate(DRAFTED, 'position')}", "{{position}}"),),
            "percentunit",
            "0 is the first draft of a row",
            most=1,
        ),
        Panel(
            "Drafts",
            (Query(total(DRAFTED), "drafted"), Query(total(ACCEPTED), "accepted")),
            "short",
            "A second",
        ),
    ),
    "Requests": (
        latency("Time to first token", "vllm:time_to_first_token_seconds"),
        latency("Inter-token latency", "vllm:inter_token_latency_seconds"),
        latency("End to end", "vllm:e2e_request_latency_seconds"),
        Panel(
            "Tokens",
            (
                Query(total("vllm:prompt_tokens_total"), "prompt"),
                Query(total("vllm:generation_tokens_total"), "generated"),
            ),
            "short",
            "A second",
        ),
        Panel(
            "Running and waiting",
            (
                Query(f"sum(vllm:num_requests_running{{{MODEL}}})", "running"),
                Query(f"sum(vllm:num_requests_waiting{{{MODEL}}})", "waiting"),
            ),
        ),
        Panel("KV cache in use", (gauge("vllm:kv_cache_usage_perc"),), "percentunit", most=1),
        Panel(
            "What requests wait for",
            (Query(rate("roseinfer:request_wait_seconds_total", "cause"), "{{cause}}"),),
            "s",
            "Seconds without a seat of all that ended in a second: so many wait on average",
            stacked=True,
        ),
        heat("Prompt length", "vllm:request_prompt_tokens", "short"),
        heat("Output length", "vllm:request_generation_tokens", "short"),
        Panel(
            "Finish reasons",
            (Query(rate("vllm:request_success_total", "finished_reason"), "{{finished_reason}}"),),
            "reqps",
            stacked=True,
        ),
        Panel(
            "Where the time goes",
            tuple(
                Query(
                    f"{total(f'vllm:request_{phase}_time_seconds_sum')} / "
                    f"{total(f'vllm:request_{phase}_time_seconds_count')}",
                    phase,
                )
                for phase in ("queue", "prefill", "decode")
            ),
            "s",
            "Means of finished requests",
            stacked=True,
        ),
        Panel(
            "HTTP answers",
            (
                Query(
                    f"sum by (handler, status) (rate(http_requests_total{OVER}) "
                    f"and on (instance, job) roseinfer:engine_up{{{MODEL}}})",
                    "{{handler}} {{status}}",
                ),
            ),
            "reqps",
            "Of servers of this model; other programs may have a metric of this name",
        ),
        Panel(
            "Turned away before the scheduler",
            (Query(rate("vllm:admission_rejections_total", "reason"), "{{reason}}"),),
            "reqps",
        ),
    ),
}


def panels() -> Iterator[dict[str, Any]]:
    number = y = 0
    for row, shown in ROWS.items():
        number += 1
        yield {
            "id": number,
            "type": "row",
            "title": row,
            "collapsed": False,
            "panels": [],
            "gridPos": {"h": 1, "w": WIDTH, "x": 0, "y": y},
        }
        y += 1
        width = WIDTH // COLUMNS
        for index, panel in enumerate(shown):
            number += 1
            place = {"h": HEIGHT, "w": width, "x": index % COLUMNS * width, "y": y + index // COLUMNS * HEIGHT}
            yield drawn(panel, number, place)
        y += -(-len(shown) // COLUMNS) * HEIGHT


def drawn(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    heatmap = panel.kind == "heatmap"
    targets = [
        {
            "refId": chr(ord("A") + index),
            "datasource": DATA,
            "expr": query.expr,
            "legendFormat": query.legend,
            "format": "heatmap" if heatmap else "time_series",
            "range": True,
        }
        for index, query in enumerate(panel.queries)
    ]
    made: dict[str, Any] = {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.about,
        "datasource": DATA,
        "gridPos": place,
        "targets": targets,
    }
    if heatmap:
        made["options"] = {
            "calculate": False,
            "yAxis": {"axisPlacement": "left", "unit": panel.unit},
            "color": {"mode": "scheme", "scheme": "Oranges", "scale": "exponential", "exponent": 0.5, "steps": 64},
            "filterValues": {"le": 1e-9},
            "tooltip": {"mode": "single", "yHistogram": True},
            "legend": {"show": True},
        }
        return made
    custom: dict[str, Any] = {"fillOpacity": 25 if panel.stacked else 0, "showPoints": "never"}
    if panel.stacked:
        custom["stacking"] = {"mode": "normal"}
    bounds = {"min": 0} | ({} if panel.most is None else {"max": panel.most})
    made["fieldConfig"] = {"defaults": {"unit": panel.unit, "custom": custom, **bounds}, "overrides": []}
    made["options"] = {
        "tooltip": {"mode": "multi", "sort": "desc"},
        "legend": {"displayMode": "list", "placement": "bottom"},
    }
    return made


def variable(name: str, query: str, several: bool) -> dict[str, Any]:
    made: dict[str, Any] = {"name": name, "type": "query", "datasource": DATA, "query": query, "refresh": 2, "sort": 1}
    return made | {"multi": True, "includeAll": True, "current": ALL} if several else made


ALL = {"text": "All", "value": "$__all"}
VARIABLES = [
    {"name": "datasource", "type": "datasource", "query": "prometheus"},
    variable("model_name", "label_values(vllm:num_requests_running, model_name)", False),
    variable("engine", f"label_values(roseinfer:engine_up{{{MODEL}}}, engine)", True),
    variable("objective", f"label_values(roseinfer:slo_slack_seconds_bucket{{{MODEL}}}, objective)", True),
]


def dashboard() -> dict[str, Any]:
    return {
        "uid": "roseinfer",
        "title": "roseinfer",
        "tags": ["roseinfer", "llm"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": VARIABLES},
        "panels": list(panels()),
    }


def text() -> str:
    return json.dumps(dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    TARGET.write_text(text(), encoding="utf-8")
