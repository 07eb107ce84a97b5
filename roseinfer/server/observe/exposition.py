"""The text of `/metrics`: what processes have counted, and what engines say of themselves when it is asked for."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from time import monotonic
from typing import NamedTuple, Protocol

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest

from roseinfer.cluster.forecast import forecasts
from roseinfer.core.outputs import GuideStats, OffloadStats, PolicyStats, SchedulerStats
from roseinfer.engine.api import EngineInfo, EngineReport, EngineState
from roseinfer.server.observe.metrics import LABELS
from roseinfer.server.observe.tallies import Numbers, Tallies, total

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
TOLD_PROMPT_TOKENS = 1000  # of the prompt whose time to first token is told


class Snapshot(msgspec.Struct):
    """What one process knows at a moment. `engines`: empty before there are any, or if others watch over them.

    `breakers`: the engines that the process sends nothing to because they failed; of several processes, each engine
    once for every process.
    """

    numbers: Numbers
    engines: list[EngineReport] = []
    breakers: list[int] = []


class Observed(Protocol):
    """As much of engines as is shown."""

    def reports(self) -> list[EngineReport]: ...


def combined(parts: Sequence[Snapshot]) -> Snapshot:
    """Numbers add up; of engines the first part that knows of them counts."""
    engines = next((part.engines for part in parts if part.engines), [])
    breakers = sorted(chain.from_iterable(part.breakers for part in parts))
    return Snapshot(total(part.numbers for part in parts), engines, breakers)


class _Sample(NamedTuple):
    """One value of one engine. `extra`: labels beside those that all have, in their order."""

    kind: type[CounterMetricFamily | GaugeMetricFamily]
    name: str
    help: str
    value: float
    extra: Mapping[str, str]


class Exposition:
    """Of all engines, those of another process too."""

    def __init__(self, tallies: Tallies, model_name: str) -> None:
        self._tallies = tallies
        self._model_name = model_name

    def text(self, shown: Snapshot, info: EngineInfo | None, more: Iterable[Metric] = ()) -> bytes:
        """`info`: of engines that do not tell theirs. One that nobody knows has not been up: it is left out."""
        return generate_latest(_Collected(chain(self._families(shown, info), more)))

    def _families(self, shown: Snapshot, info: EngineInfo | None) -> Iterator[Metric]:
        yield from self._tallies.metrics(shown.numbers)
        families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        for report in shown.engines:
            known = report.info or info
            if known is None:
                continue
            for sample in _samples(report, known, shown.breakers):
                family = families.get(sample.name)
                if family is None:
                    family = sample.kind(sample.name, sample.help, labels=(*LABELS, *sample.extra))
                    families[sample.name] = family
                family.add_metric((self._model_name, str(report.engine), *sample.extra.values()), sample.value)
        yield from families.values()


def _samples(report: EngineReport, info: EngineInfo, breakers: Sequence[int]) -> Iterator[_Sample]:
    up = report.state.is_up
    stats = report.stats if up else _dead(report.stats)
    yield from _life(report, up, breakers)
    yield from _work(stats)
    if up:
        yield from _objectives(stats.policy or PolicyStats())
        yield from _prospects(report)
    yield from _constraints(stats.guides or GuideStats())
    if stats.offload is not None:
        yield from _host_memory(stats.offload, info.facts.block_bytes)
    yield from _fixed(info, stats)


def _life(report: EngineReport, up: bool, breakers: Sequence[int]) -> Iterator[_Sample]:
    yield _gauge("roseinfer:engine_up", "1 while the engine lives, 0 when it has failed", up)
    help = "1 for the state that the engine is in"
    for state in EngineState:
        yield _gauge("roseinfer:engine_state", help, state is report.state, state=state.value)
    age_s = report.health.heartbeat_age_s
    yield _gauge("roseinfer:engine_heartbeat_age_seconds", "Since the engine's last turn", age_s)
    help = "Times that the engine was started again, on purpose or because it had ended or hung"
    yield _counter("roseinfer:engine_restarts", help, report.restarts)
    help = "Times that the engine ended by itself, or was killed because it hung"
    yield _counter("roseinfer:engine_deaths", help, report.deaths)
    if report.port_stats is not None:
        help = "Processes that follow the engine from this host or others"
        yield _gauge("roseinfer:engine_clients", help, report.port_stats.clients)
        help = "Connections to the engine's port that were refused: wrong secret, version or words, or too slow"
        yield _counter("roseinfer:engine_refused_peers", help, report.port_stats.refused)
    help = "API processes that send the engine nothing for now because it failed them"
    yield _gauge("roseinfer:router_breakers_open", help, breakers.count(report.engine))


def _work(stats: SchedulerStats) -> Iterator[_Sample]:
    used = stats.blocks_used / stats.blocks_total if stats.blocks_total else 0.0
    yield _gauge("vllm:num_requests_running", "Sequences that hold a seat", stats.running)
    yield _gauge("vllm:num_requests_waiting", "Sequences that wait for a seat", stats.waiting)
    yield _gauge("vllm:kv_cache_usage_perc", "Share of the KV blocks in use, 0 to 1", used)
    yield _counter("vllm:prefix_cache_queries", "Prompt tokens looked up", stats.prefix_queries)
    yield _counter("vllm:prefix_cache_hits", "Prompt tokens found in the cache", stats.prefix_hits)
    yield _counter("vllm:num_preemptions", "Sequences sent back to wait", stats.preemptions)
    yield _counter("vllm:generation_tokens", "Tokens generated", stats.generation_tokens)
    help = "Times the scheduling policy let nobody do anything and the engine went on without it"
    yield _counter("roseinfer:policy_stalls", help, stats.policy_stalls)
    help = "Answers of the scheduling policy that were ignored"
    yield _counter("roseinfer:policy_faults", help, stats.policy_faults)
    help = "Checks of the idle engine that found seats, queues or KV blocks to disagree"
    yield _counter("roseinfer:integrity_errors", help, stats.integrity_errors)
    yield _counter("roseinfer:prefill_tokens", "Prompt tokens computed", stats.prompt_tokens)


def _constraints(guides: GuideStats) -> Iterator[_Sample]:
    """What the engine does for constrained outputs."""
    yield _gauge("roseinfer:engine_grammars", "Compiled grammars that the engine keeps", guides.grammars)
    help = "Requests that wait in the engine until their grammar is compiled"
    yield _gauge("roseinfer:num_requests_compiling", help, guides.waiting)
    yield _counter("roseinfer:constrained_rows", "Rows sampled for requests with a constraint", guides.rows)
    help = "Rows of such requests that nothing constrained: their grammar waits for what wakes it"
    yield _counter("roseinfer:dormant_rows", help, guides.dormant_rows)
    help = "Requests ended because their constraint took too much of the engine's time"
    yield _counter("roseinfer:constraints_too_slow", help, guides.too_slow)
    yield _counter("roseinfer:engine_grammars_compiled", "Grammars that the engine compiled", guides.compiled)
    yield _counter("roseinfer:engine_grammars_cached", "Grammars that it had compiled already", guides.cached)


def _host_memory(offload: OffloadStats, block_bytes: int) -> Iterator[_Sample]:
    """What goes to host memory and comes from there; not of engines without."""
    used = offload.blocks_used / offload.blocks_total if offload.blocks_total else 0.0
    yield _gauge("vllm:kv_offload_cpu_cache_usage_perc", "Share of the host blocks that hold something, 0 to 1", used)
    help = "Requests that wait until K and V of their prefix have come from host memory, or to start behind that"
    yield _gauge("roseinfer:num_requests_loading", help, offload.waiting)
    help = "Tokens looked up in host memory, those that the KV cache did not hold"
    yield _counter("vllm:external_prefix_cache_queries", help, offload.queries)
    yield _counter("vllm:external_prefix_cache_hits", "Tokens loaded from host memory", offload.hits)
    loads = ("load", "CPU_to_GPU", "to the KV cache", offload.loaded, offload.loads_s)
    stores = ("store", "GPU_to_CPU", "to host memory", offload.stored, offload.stores_s)
    for name, way, where, blocks, seconds in (loads, stores):
        help = "KV blocks copied between the KV cache and host memory"
        yield _counter("roseinfer:kv_offload_blocks", help, blocks, transfer_type=way)
        yield _counter(f"vllm:kv_offload_{name}_bytes", f"Bytes of K and V copied {where}", blocks * block_bytes)
        yield _counter(f"vllm:kv_offload_{name}_time", f"Seconds of copies {where}", seconds)


def _objectives(policy: PolicyStats) -> Iterator[_Sample]:
    """What the scheduling policy goes by, as far as it has these figures."""
    utilisation = "Share of the machine that the objectives of running requests ask for; at 1 it is full"
    speed = "Duration of steps lately over what the fitted cost model expects; above 1 the machine is slower"
    margin = "Share by which token deadlines are brought forward so that few are missed"
    budget = "How long the next step may take before the most urgent request is late; absent if none is urgent"
    batch = "Rows in a mean step if every request decodes exactly at the pace of its objective"
    demoted = "Requests served from what is left over because their objective is already lost"
    for name, help, value in (
        ("roseinfer:slo_utilisation", utilisation, policy.utilisation),
        ("roseinfer:slo_speed_ratio", speed, policy.speed),
        ("roseinfer:slo_margin", margin, policy.margin),
        ("roseinfer:slo_step_budget_seconds", budget, policy.step_budget_s),
        ("roseinfer:slo_virtual_batch_size", batch, policy.virtual_batch_size),
        ("roseinfer:slo_demoted_requests", demoted, policy.demoted),
    ):
        if value is not None:
            yield _gauge(name, help, value)


def _prospects(report: EngineReport) -> Iterator[_Sample]:
    """What a request without objectives could expect that came now."""
    for prospect in forecasts([report], monotonic(), TOLD_PROMPT_TOKENS):
        help = "Expected time to first token of a prompt of so many tokens, none of which is in the prefix cache"
        length = str(TOLD_PROMPT_TOKENS)
        yield _gauge("roseinfer:predicted_ttft_seconds", help, prospect.ttft_s, prompt_tokens=length)


def _fixed(info: EngineInfo, stats: SchedulerStats) -> Iterator[_Sample]:
    blocks = str(stats.blocks_total or info.facts.num_blocks)
    size = {"block_size": str(info.block_size), "num_gpu_blocks": blocks}
    yield _gauge("vllm:cache_config_info", "Size of the KV cache", 1, **size)
    yield _gauge("roseinfer:ranks", "Processes that share the model, each with its GPU if there are such", info.ranks)
    for phase, seconds in info.facts.startup_s.items():
        yield _gauge("roseinfer:startup_phase_seconds", "Time to start", seconds, phase=phase)


def _gauge(name: str, help: str, value: float, **extra: str) -> _Sample:
    return _Sample(GaugeMetricFamily, name, help, value, extra)


def _counter(name: str, help: str, value: float, **extra: str) -> _Sample:
    return _Sample(CounterMetricFamily, name, help, value, extra)


def _dead(stats: SchedulerStats) -> SchedulerStats:
    """What is true while the engine is gone: it has counted what it had counted, and nothing runs, waits or is held."""
    guides = stats.guides and stats.guides._replace(grammars=0, waiting=0)
    offload = stats.offload and stats.offload._replace(blocks_used=0, waiting=0)
    return stats._replace(running=0, waiting=0, blocks_used=0, policy=None, guides=guides, offload=offload)


class _Collected:
    """As much of a registry as is needed to write metrics down."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics
