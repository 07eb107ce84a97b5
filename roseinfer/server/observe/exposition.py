"""Text of `/metrics`: numbers counted by processes, and state of engines at scrape time."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, zip_longest
from time import monotonic
from typing import NamedTuple

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest

from roseinfer.cluster.forecast import forecasts, fullness_of
from roseinfer.core.outputs import (
    AdapterStats,
    DraftStats,
    GuideStats,
    OffloadStats,
    PolicyStats,
    SchedulerStats,
    StateStats,
)
from roseinfer.engine.api import EngineInfo, EngineReport, EngineState
from roseinfer.server.observe.metric_registry import LABELS, MetricRegistry, Numbers, total
from roseinfer.server.observe.model_names import ModelNames

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
FORECAST_PROMPT_TOKENS = 1000  # prompt length of the exported time-to-first-token forecast


class Snapshot(msgspec.Struct):
    """Numbers of one process, or of several combined. `engines`: empty if another process reports them.

    `breakers`: engines with an open circuit breaker, each once for every process that opened one.
    """

    numbers: Numbers
    engines: list[EngineReport] = []
    breakers: list[int] = []


def combined(parts: Sequence[Snapshot]) -> Snapshot:
    """Return the sum of all numbers, with the engines of the first part that has any."""
    engines = next((part.engines for part in parts if part.engines), [])
    breakers = sorted(chain.from_iterable(part.breakers for part in parts))
    return Snapshot(total(part.numbers for part in parts), engines, breakers)


class _Sample(NamedTuple):
    """One value of one engine. `extra`: further labels, in their order."""

    kind: type[CounterMetricFamily | GaugeMetricFamily]
    name: str
    help: str
    value: float
    extra: Mapping[str, str]


class Exposition:
    """Writer of `/metrics`."""

    def __init__(self, registry: MetricRegistry, models: ModelNames) -> None:
        self._registry = registry
        self._models = models

    def text(self, shown: Snapshot, infos: Mapping[str, EngineInfo], more: Iterable[Metric] = ()) -> bytes:
        """Return the text. `infos`: by model, for engines whose reports have none; without it they are left out."""
        return generate_latest(_Collected(chain(self._families(shown, infos), more)))

    def _families(self, shown: Snapshot, infos: Mapping[str, EngineInfo]) -> Iterator[Metric]:
        yield from self._registry.metrics(shown.numbers)
        families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        for report in shown.engines:
            model = self._models.of(report.engine)
            known = report.info or infos.get(model)
            if known is None:
                continue
            for sample in _samples(report, known, shown.breakers):
                family = families.get(sample.name)
                if family is None:
                    family = sample.kind(sample.name, sample.help, labels=(*LABELS, *sample.extra))
                    families[sample.name] = family
                family.add_metric((model, str(report.engine), *sample.extra.values()), sample.value)
        yield from families.values()


def _samples(report: EngineReport, info: EngineInfo, breakers: Sequence[int]) -> Iterator[_Sample]:
    up = report.state.is_up
    stats = report.stats if up else _dead(report.stats)
    yield from _health(report, up, breakers)
    yield from _work(stats)
    if up:
        yield from _objectives(stats.policy or PolicyStats())
        yield from _forecasts(report)
    yield from _constraints(stats.guides or GuideStats())
    if stats.offload is not None:
        yield from _host_memory(stats.offload, info.facts.block_bytes)
    if stats.states is not None:
        yield from _states(stats.states)
    if stats.adapters is not None:
        yield from _adapters(stats.adapters)
    if stats.drafts:
        yield from _speculation(stats.drafts)
    yield from _fixed(info, stats)


def _health(report: EngineReport, up: bool, breakers: Sequence[int]) -> Iterator[_Sample]:
    yield _gauge("roseinfer:engine_up", "1 while the engine is up, 0 after it failed", up)
    help = "1 for the engine's current state"
    for state in EngineState:
        yield _gauge("roseinfer:engine_state", help, state is report.state, state=state.value)
    age_s = report.health.heartbeat_age_s
    yield _gauge("roseinfer:engine_heartbeat_age_seconds", "Seconds since the engine's last heartbeat", age_s)
    help = "Restarts of the engine: planned, after a death or after a hang"
    yield _counter("roseinfer:engine_restarts", help, report.restarts)
    help = "Unexpected ends of the engine, kills of hung engines included"
    yield _counter("roseinfer:engine_deaths", help, report.deaths)
    if report.port_stats is not None:
        help = "Processes connected to the engine, from any host"
        yield _gauge("roseinfer:engine_clients", help, report.port_stats.clients)
        help = "Rejected connections to the engine's port: no TLS, wrong certificate or version, or timeout"
        yield _counter("roseinfer:engine_refused_peers", help, report.port_stats.refused)
    help = "API processes whose circuit breaker for the engine is open"
    yield _gauge("roseinfer:router_breakers_open", help, breakers.count(report.engine))


def _work(stats: SchedulerStats) -> Iterator[_Sample]:
    used = stats.blocks_used / stats.blocks_total if stats.blocks_total else 0.0
    yield _gauge("vllm:num_requests_running", "Sequences that hold a seat", stats.running)
    yield _gauge("vllm:num_requests_waiting", "Sequences waiting for a seat", stats.waiting)
    yield _gauge("vllm:kv_cache_usage_perc", "Used share of the KV blocks, 0 to 1", used)
    yield _counter("vllm:prefix_cache_queries", "Prompt tokens looked up", stats.prefix_queries)
    yield _counter("vllm:prefix_cache_hits", "Prompt tokens found in the cache", stats.prefix_hits)
    yield _counter("vllm:num_preemptions", "Preemptions: sequences sent back to the queue", stats.preemptions)
    yield _counter("vllm:generation_tokens", "Tokens generated", stats.generation_tokens)
    help = "Steps scheduled without the policy because it planned nothing while requests waited"
    yield _counter("roseinfer:policy_stalls", help, stats.policy_stalls)
    help = "Invalid decisions of the scheduling policy that were ignored"
    yield _counter("roseinfer:policy_faults", help, stats.policy_faults)
    help = "Failed consistency checks of seats, queues and KV blocks in the idle engine"
    yield _counter("roseinfer:integrity_errors", help, stats.integrity_errors)
    yield _counter("roseinfer:prefill_tokens", "Prompt tokens computed", stats.prompt_tokens)


def _constraints(guides: GuideStats) -> Iterator[_Sample]:
    yield _gauge("roseinfer:engine_grammars", "Compiled grammars in the engine's cache", guides.grammars)
    help = "Requests waiting for the compilation of their grammar"
    yield _gauge("roseinfer:num_requests_compiling", help, guides.waiting)
    yield _counter("roseinfer:constrained_rows", "Rows sampled for requests with a constraint", guides.rows)
    help = "Rows of constrained requests sampled without a mask (trigger not yet seen)"
    yield _counter("roseinfer:dormant_rows", help, guides.dormant_rows)
    help = "Requests ended because their constraint took too much time"
    yield _counter("roseinfer:constraints_too_slow", help, guides.too_slow)
    yield _counter("roseinfer:engine_grammars_compiled", "Grammars compiled by the engine", guides.compiled)
    yield _counter("roseinfer:engine_grammars_cached", "Grammars found in the engine's cache", guides.cached)


def _host_memory(offload: OffloadStats, block_bytes: int) -> Iterator[_Sample]:
    """Yield metrics of KV blocks in host memory."""
    used = offload.blocks_used / offload.blocks_total if offload.blocks_total else 0.0
    yield _gauge("vllm:kv_offload_cpu_cache_usage_perc", "Used share of the host blocks, 0 to 1", used)
    help = "Requests waiting for their prefix to load from host memory, or for their start after it"
    yield _gauge("roseinfer:num_requests_loading", help, offload.waiting)
    help = "Tokens missing in the KV cache and looked up in host memory"
    yield _counter("vllm:external_prefix_cache_queries", help, offload.queries)
    yield _counter("vllm:external_prefix_cache_hits", "Tokens loaded from host memory", offload.hits)
    loads = ("load", "CPU_to_GPU", "to the KV cache", offload.loaded, offload.loads_s)
    stores = ("store", "GPU_to_CPU", "to host memory", offload.stored, offload.stores_s)
    for name, direction, where, blocks, seconds in (loads, stores):
        help = "KV blocks copied between the KV cache and host memory"
        yield _counter("roseinfer:kv_offload_blocks", help, blocks, transfer_type=direction)
        yield _counter(f"vllm:kv_offload_{name}_bytes", f"Bytes of K and V copied {where}", blocks * block_bytes)
        yield _counter(f"vllm:kv_offload_{name}_time", f"Seconds of copies {where}", seconds)


def _states(states: StateStats) -> Iterator[_Sample]:
    """Yield metrics of recurrent states."""
    used = states.slots_used / states.slots_total if states.slots_total else 0.0
    help = "Share of the slots for recurrent states that running sequences hold, 0 to 1"
    yield _gauge("roseinfer:state_slots_usage_perc", help, used)
    help = "Slots that hold the state after a cached prefix"
    yield _gauge("roseinfer:state_snapshots", help, states.snapshots)
    yield _counter("roseinfer:state_snapshots_taken", "Snapshots of recurrent states", states.taken)
    help = "Snapshots that were left undone because no slot was free or those in free slots were worth more"
    yield _counter("roseinfer:state_snapshots_skipped", help, states.skipped)
    if not states.host_total:
        return
    help = "Share of the slots for recurrent states in host memory that are used, 0 to 1"
    yield _gauge("roseinfer:state_host_slots_usage_perc", help, states.host_used / states.host_total)
    for direction, count in (("CPU_to_GPU", states.loaded), ("GPU_to_CPU", states.stored)):
        help = "Recurrent states copied from and to host memory"
        yield _counter("roseinfer:state_offload_snapshots", help, count, transfer_type=direction)


def _adapters(adapters: AdapterStats) -> Iterator[_Sample]:
    """Yield metrics of LoRA adapters."""
    used = adapters.slots_used / adapters.slots_total if adapters.slots_total else 0.0
    help = "Share of the slots for LoRA adapters that running sequences use, 0 to 1"
    yield _gauge("roseinfer:adapter_slots_usage_perc", help, used)
    help = "Bytes of LoRA adapters in host memory"
    yield _gauge("roseinfer:adapter_host_bytes", help, adapters.host_bytes)
    help = "Requests waiting for their LoRA adapter to come to a slot"
    yield _gauge("roseinfer:num_requests_waiting_for_adapter", help, adapters.waiting)
    yield _counter("roseinfer:adapter_loads", "Copies of LoRA adapters to slots", adapters.loads)
    yield _counter("roseinfer:adapter_evictions", "Copies that replaced another adapter", adapters.evictions)
    for result, number in (("read", adapters.reads - adapters.failures), ("failed", adapters.failures)):
        yield _counter("roseinfer:adapter_reads", "Folders of LoRA adapters read", number, result=result)
    yield _counter("roseinfer:adapter_read_seconds", "Seconds of these reads", adapters.reads_s)


def _speculation(drafts: Sequence[DraftStats]) -> Iterator[_Sample]:
    """Yield the counts of drafts: by proposer and position, and their sums under vLLM's names."""
    yield _counter("vllm:spec_decode_num_drafts", "Rows that verified drafts", sum(each.steps for each in drafts))
    help = "Drafts that were verified"
    yield _counter("vllm:spec_decode_num_draft_tokens", help, sum(sum(each.drafted) for each in drafts))
    help = "Drafts that became output"
    yield _counter("vllm:spec_decode_num_accepted_tokens", help, sum(sum(each.accepted) for each in drafts))
    for position, accepted in enumerate(map(sum, zip_longest(*(each.accepted for each in drafts), fillvalue=0))):
        help = "Drafts that became output, by position in their row"
        yield _counter("vllm:spec_decode_num_accepted_tokens_per_pos", help, accepted, position=str(position))
    for each in drafts:
        help = "Rows that verified drafts, by the proposer of the first one"
        yield _counter("roseinfer:spec_steps", help, each.steps, proposer=each.proposer)
        for position, counts in enumerate(zip(each.drafted, each.accepted, strict=True)):
            at = {"proposer": each.proposer, "position": str(position)}
            help = "Drafts that were verified, by proposer and position in their row"
            yield _counter("roseinfer:spec_drafted_tokens", help, counts[0], **at)
            help = "Drafts that became output, by proposer and position in their row"
            yield _counter("roseinfer:spec_accepted_tokens", help, counts[1], **at)


def _objectives(policy: PolicyStats) -> Iterator[_Sample]:
    """Yield the figures that the scheduling policy reports."""
    utilisation = "Share of the machine needed for the objectives of running requests; 1 = full"
    speed = (
        "Duration of recent steps divided by the fitted cost model's; above 1 = slower than earlier steps, "
        "to which the model is fitted, not than the calibration"
    )
    margin = "Safety margin on token deadlines, as a share of the objective"
    budget = "Time of the next step until the most urgent request is late; absent without urgent requests"
    batch = "Mean rows per step if each request decodes at exactly the pace of its objective"
    demoted = "Requests whose objective is already missed, served with spare capacity"
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


def _forecasts(report: EngineReport) -> Iterator[_Sample]:
    """Yield the engine's fullness, and the forecast for a new request without objectives."""
    full = fullness_of(report, monotonic())
    if full is not None:
        help = "How full autoscaling counts the engine: 0 = idle, 1 = full, above 1 = more than one engine is needed"
        yield _gauge("roseinfer:engine_fullness", help, full)
    for forecast in forecasts([report], monotonic(), FORECAST_PROMPT_TOKENS):
        help = "Predicted time to first token of an uncached prompt of `prompt_tokens` tokens"
        length = str(FORECAST_PROMPT_TOKENS)
        yield _gauge("roseinfer:predicted_ttft_seconds", help, forecast.ttft_s, prompt_tokens=length)


def _fixed(info: EngineInfo, stats: SchedulerStats) -> Iterator[_Sample]:
    blocks = str(stats.blocks_total or info.facts.num_blocks)
    size = {"block_size": str(info.facts.block_size), "num_gpu_blocks": blocks}
    yield _gauge("vllm:cache_config_info", "Size of the KV cache", 1, **size)
    yield _gauge("roseinfer:ranks", "Processes that share the model, on GPU machines each with its GPU", info.ranks)
    for phase, seconds in info.facts.startup_s.items():
        yield _gauge("roseinfer:startup_phase_seconds", "Duration of a startup phase", seconds, phase=phase)


def _gauge(name: str, help: str, value: float, **extra: str) -> _Sample:
    return _Sample(GaugeMetricFamily, name, help, value, extra)


def _counter(name: str, help: str, value: float, **extra: str) -> _Sample:
    return _Sample(CounterMetricFamily, name, help, value, extra)


def _dead(stats: SchedulerStats) -> SchedulerStats:
    """Return the statistics of a dead engine: counters stay, nothing runs, waits or is held."""
    guides = stats.guides and stats.guides._replace(grammars=0, waiting=0)
    offload = stats.offload and stats.offload._replace(blocks_used=0, waiting=0)
    states = stats.states and stats.states._replace(slots_used=0, snapshots=0)
    adapters = stats.adapters and stats.adapters._replace(slots_used=0, host_bytes=0, waiting=0)
    stats = stats._replace(guides=guides, offload=offload, states=states, adapters=adapters)
    return stats._replace(running=0, waiting=0, blocks_used=0, policy=None)


class _Collected:
    """Minimal prometheus_client collector of ready-made metrics."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics
