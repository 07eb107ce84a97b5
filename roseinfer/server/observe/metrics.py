"""The metrics: vLLM's names where it has them, `roseinfer:` for the rest.

Gauges and engine counters are read from the engine's newest snapshot when scraped. Buckets keep every bound of vLLM's
and add some, so that dashboards and mixed fleets still aggregate.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest

from roseinfer.core.outputs import COMPLETE, GuideStats, PolicyStats, SchedulerStats
from roseinfer.engine.api import EngineHealth, EngineInfo, StepRecord
from roseinfer.server.observe.tallies import Counter, Histogram, Numbers, Tallies, total
from roseinfer.server.request.job import PromptRun, SampleRecord

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
LABELS = ("model_name", "engine")
ENGINE_INDEX = "0"

# fmt: off
TTFT_S = (.001, .005, .01, .02, .04, .06, .08, .1, .15, .2, .25, .3, .4, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160,
          640, 2560)
TOKEN_S = (.001, .002, .003, .004, .005, .0075, .01, .015, .02, .025, .03, .04, .05, .075, .1, .15, .2, .3, .4, .5,
           .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
REQUEST_S = (.001, .0025, .005, .01, .025, .05, .1, .2, .3, .5, .8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60,
             120, 240, 480, 960, 1920, 7680)
STEP_S = (.0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5)
STEP_RATIO = (.25, .5, .67, .8, .9, .95, .98, 1, 1.02, 1.05, 1.1, 1.25, 1.5, 2, 4)
HTTP_S = (.005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 120, 300)
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
LENGTH_RATIO = (.1, .2, .33, .5, .67, .8, .9, 1, 1.1, 1.25, 1.5, 2, 3, 5, 10, 30, 100)
PREDICTION_S = (.0001, .0002, .0003, .0005, .00075, .001, .002, .005, .01, .025, .1)
MASK_S = (.00005, .0001, .0002, .0003, .0005, .00075, .001, .0015, .002, .003, .005, .01, .02, .05, .1)
GRAMMAR_S = (.0005, .001, .002, .003, .005, .01, .02, .05, .1, .25, .5, 1, 2, 5)
CHOICES = (1, 2, 5, 10, 20)
PREEMPTIONS = (1, 2, 3, 4, 5, 10, 20)
# fmt: on


def length_buckets(longest: int) -> list[int]:
    """1, 2, 5, 10, 20, ... up to `longest`."""
    bounds: list[int] = []
    scale = 1
    while True:
        for step in (1, 2, 5):
            if step * scale > longest:
                return bounds or [1]
            bounds.append(step * scale)
        scale *= 10


class HttpMetrics:
    """Answers by route, method and class of status. Exists before the engine does. `routes`: the methods of each.

    What clients make up has one label each: `none` for all paths without a route, `OTHER` for all methods that a route
    does not have. So there are never more series than the server has routes, methods and classes of status.
    """

    def __init__(self, tallies: Tallies, routes: Mapping[str, Collection[str]]) -> None:
        labels = ("handler", "method", "status")
        self._routes = {path: frozenset(methods) for path, methods in routes.items()}
        self._requests = tallies.counters("http_requests", "HTTP answers", labels)
        help = "From the request's head to the end of the answer"
        self._duration = tallies.histograms("http_request_duration_seconds", help, HTTP_S, labels)

    def observe(self, path: str, method: str, status: int, seconds: float) -> None:
        """`status` 0: the client left before there was an answer, filed under 4xx."""
        handler = path if path in self._routes else _MODEL if path.startswith(_MODELS) else "none"
        known = method in self._routes.get(handler, ())
        labels = (handler, method if known else "OTHER", f"{status // 100 or 4}xx")
        self._requests.labels(*labels).inc()
        self._duration.labels(*labels).observe(seconds)


_MODELS, _MODEL = "/v1/models/", "/v1/models/{model_id}"


class StepMetrics:
    """Every step of the engine. Kept by whoever owns the engine, since nobody else is told of each."""

    def __init__(self, tallies: Tallies, model_name: str) -> None:
        values = (model_name, ENGINE_INDEX)
        tokens, seconds = "Tokens computed in a step", "Duration of an engine step"
        steps = tallies.histograms("vllm:iteration_tokens_total", tokens, STEP_TOKENS, LABELS)
        times = tallies.histograms("roseinfer:step_time_seconds", seconds, STEP_S, LABELS)
        said = "Duration of an engine step over what the scheduling policy's cost model predicted"
        ratios = tallies.histograms("roseinfer:step_time_ratio", said, STEP_RATIO, LABELS)
        help = "Time that the masks of constrained outputs took the host in a step that had some"
        masks = tallies.histograms("roseinfer:mask_time_seconds", help, MASK_S, LABELS)
        self._tokens, self._time, self._ratio = (family.labels(*values) for family in (steps, times, ratios))
        self._masks = masks.labels(*values)

    def step(self, record: StepRecord) -> None:
        self._tokens.observe(record.tokens)
        self._time.observe(record.duration_s)
        if record.predicted_s > 0:
            self._ratio.observe(record.duration_s / record.predicted_s)
        if record.mask_s > 0:
            self._masks.observe(record.mask_s)


class LengthMetrics:
    """How well outputs' lengths are predicted, and how long that takes. There only with a predictor."""

    def __init__(self, tallies: Tallies, model_name: str) -> None:
        values = (model_name, ENGINE_INDEX)
        help = "Predicted output length over the true one, of samples that ended by themselves"
        ratios = tallies.histograms("roseinfer:length_prediction_ratio", help, LENGTH_RATIO, LABELS)
        times = tallies.histograms(
            "roseinfer:length_prediction_seconds", "Time a prediction took", PREDICTION_S, LABELS
        )
        self.was_off, self.took = ratios.labels(*values).observe, times.labels(*values).observe


class GrammarMetrics:
    """What became of the constraints of requests. See `request.grammars.GrammarObserver`."""

    def __init__(self, tallies: Tallies, model_name: str) -> None:
        values = (model_name, ENGINE_INDEX)
        help = "Time to build and prove the grammar of a constraint that was not known yet"
        times = tallies.histograms("roseinfer:grammar_compile_seconds", help, GRAMMAR_S, LABELS)
        self.compiled = times.labels(*values).observe
        known = tallies.counters("roseinfer:grammars_cached", "Constraints whose grammar was known already", LABELS)
        self.cached = known.labels(*values).inc
        self._values = values
        self._refused = tallies.counters("roseinfer:grammars_refused", "Constraints refused", (*LABELS, "reason"))

    def refused(self, code: str) -> None:
        self._refused.labels(*self._values, code).inc()


class EngineMetrics:
    """Everything that requests leave behind. One per engine."""

    def __init__(self, tallies: Tallies, info: EngineInfo, model_name: str) -> None:
        self._tallies = tallies
        self._values = (model_name, ENGINE_INDEX)
        self._model_name = model_name
        self._latencies()
        self._sizes(length_buckets(info.max_model_len))
        self._counters()

    def prompt_done(self, tokens: int, cached_tokens: int) -> None:
        """A prompt has been processed: `tokens` of it, `cached_tokens` of them found in the cache."""
        self._prompts.inc(tokens)
        self._cached.inc(cached_tokens)

    def refused(self, reason: str) -> None:
        self._rejections.labels(self._model_name, reason).inc()

    def aborted(self, reason: str) -> None:
        self._aborted.labels(*self._values, reason).inc()

    def prompt_ended(self, run: PromptRun, reason: str, now_s: float) -> None:
        """`reason` is that of the samples without a finish reason of their own."""
        self._prompt_tokens.observe(run.prompt_tokens)
        self._computed.observe(run.prompt_tokens - run.cached_tokens)
        self._n.observe(len(run.samples))
        self._max_tokens.observe(run.max_tokens)
        self._longest_output.observe(max(sample.tokens for sample in run.samples))
        self._e2e.observe(now_s - run.arrival_s)
        for sample in run.samples:
            finish = sample.finish_reason or reason
            self._success.labels(*self._values, str(finish)).inc()
            self._output_tokens.observe(sample.tokens)
            self._preemptions.observe(sample.preemptions)
            if finish in COMPLETE:
                self._phases(sample)

    def parsed(self, parser: str, runs: Sequence[PromptRun]) -> None:
        """Of a request whose outputs were read by a parser; `parser` names that of tool calls, "none" without one."""
        samples = [sample for run in runs for sample in run.samples]
        self._reasoning.inc(sum(sample.reasoning_tokens for sample in samples))
        self._calls.labels(*self._values, parser).inc(sum(sample.calls for sample in samples))
        self._failures.labels(*self._values, parser).inc(sum(sample.parse_failures for sample in samples))

    def _phases(self, sample: SampleRecord) -> None:
        """Times on the engine's clock; those of a phase that was never reached are left out."""
        times = sample.times
        if times is None or not times.scheduled_s:
            return
        self._queue.observe(times.scheduled_s - times.arrival_s)
        self._inference.observe(times.finished_s - times.scheduled_s)
        if times.first_token_s:
            decode_s = times.finished_s - times.first_token_s
            self._prefill.observe(times.first_token_s - times.scheduled_s)
            self._decode.observe(decode_s)
            if sample.tokens > 1:
                self._tpot.observe(decode_s / (sample.tokens - 1))

    def _latencies(self) -> None:
        seconds = self._histogram
        # These two, once or more per token, are calls of the histogram itself: see `request.generation.Observer`.
        self.first_token = seconds("vllm:time_to_first_token_seconds", "Arrival to first token", TTFT_S).observe
        self.inter_token = seconds("vllm:inter_token_latency_seconds", "Between tokens of a sequence", TOKEN_S).observe
        self._tpot = seconds("vllm:request_time_per_output_token_seconds", "Mean time per later token", TOKEN_S)
        self._e2e = seconds("vllm:e2e_request_latency_seconds", "Arrival to end", REQUEST_S)
        self._queue = seconds("vllm:request_queue_time_seconds", "Arrival to first scheduling", REQUEST_S)
        self._inference = seconds("vllm:request_inference_time_seconds", "First scheduling to end", REQUEST_S)
        self._prefill = seconds("vllm:request_prefill_time_seconds", "First scheduling to first token", REQUEST_S)
        self._decode = seconds("vllm:request_decode_time_seconds", "First token to end", REQUEST_S)

    def _sizes(self, lengths: Sequence[float]) -> None:
        sizes = self._histogram
        self._prompt_tokens = sizes("vllm:request_prompt_tokens", "Tokens of a prompt", lengths)
        self._computed = sizes("vllm:request_prefill_kv_computed_tokens", "Prompt tokens not found cached", lengths)
        self._output_tokens = sizes("vllm:request_generation_tokens", "Tokens generated for a sample", lengths)
        self._longest_output = sizes("vllm:request_max_num_generation_tokens", "Most tokens of a sample", lengths)
        self._max_tokens = sizes("vllm:request_params_max_tokens", "max_tokens as run", lengths)
        self._n = sizes("vllm:request_params_n", "Samples per prompt", CHOICES)
        self._preemptions = sizes("vllm:request_num_preemptions", "Preemptions of a sample", PREEMPTIONS)

    def _counters(self) -> None:
        self._success = self._tallies.counters("vllm:request_success", "Ended samples", (*LABELS, "finished_reason"))
        self._prompts = self._counter("vllm:prompt_tokens", "Tokens of prompts processed, cached ones included")
        self._cached = self._counter("vllm:prompt_tokens_cached", "Prompt tokens not computed anew")
        turned_away = ("model_name", "reason")
        self._rejections = self._tallies.counters("vllm:admission_rejections", "Requests turned away", turned_away)
        self._aborted = self._tallies.counters("roseinfer:requests_aborted", "Requests cut short", (*LABELS, "reason"))

        self._reasoning = self._counter("roseinfer:reasoning_tokens", "Tokens that models thought with")
        by_parser = (*LABELS, "parser")
        self._calls = self._tallies.counters("roseinfer:tool_calls", "Complete tool calls", by_parser)
        help = "Outputs, or parts of them, that began as a tool call and were none"
        self._failures = self._tallies.counters("roseinfer:tool_call_parse_failures", help, by_parser)

    def _histogram(self, name: str, help: str, buckets: Sequence[float]) -> Histogram:
        return self._tallies.histograms(name, help, buckets, LABELS).labels(*self._values)

    def _counter(self, name: str, help: str) -> Counter:
        return self._tallies.counters(name, help, LABELS).labels(*self._values)


class Snapshot(msgspec.Struct):
    """What one process knows at a moment. `stats` is None before the engine is up or if the process has none; `alive`:
    whether the engine lives.
    """

    numbers: Numbers
    stats: SchedulerStats | None = None
    heartbeat_age_s: float = 0.0
    alive: bool = True


class Observed(Protocol):
    """As much of an engine as is shown."""

    def health(self) -> EngineHealth: ...

    def stats(self) -> SchedulerStats: ...


def snapshot(tallies: Tallies, engine: Observed | None) -> Snapshot:
    if engine is None:
        return Snapshot(tallies.numbers())
    health = engine.health()
    return Snapshot(tallies.numbers(), engine.stats(), health.heartbeat_age_s, health.alive)


def combined(parts: Sequence[Snapshot]) -> Snapshot:
    """Numbers add up; of several views of the engine the newest one counts."""
    numbers = total(part.numbers for part in parts)
    views = [part for part in parts if part.stats is not None]
    if not views:
        return Snapshot(numbers)
    newest = max((part.stats for part in views if part.stats is not None), key=lambda stats: stats.step)
    heartbeat_age_s = min(part.heartbeat_age_s for part in views)
    return Snapshot(numbers, newest, heartbeat_age_s, all(part.alive for part in views))


class Exposition:
    """The text of `/metrics`."""

    def __init__(self, tallies: Tallies, model_name: str) -> None:
        self._tallies = tallies
        self._values = (model_name, ENGINE_INDEX)

    def text(self, shown: Snapshot, info: EngineInfo | None) -> bytes:
        """`info` is None before the engine is up."""
        return generate_latest(_Collected(self._families(shown, info)))

    def _families(self, shown: Snapshot, info: EngineInfo | None) -> Iterator[Metric]:
        yield from self._tallies.metrics(shown.numbers)
        if info is not None and shown.stats is not None:
            yield self._gauge("roseinfer:engine_up", "1 while the engine lives, 0 when it has failed", shown.alive)
            yield from self._engine(shown.stats if shown.alive else _dead(shown.stats), shown.heartbeat_age_s)
            if shown.alive:
                yield from self._objectives(shown.stats.policy or PolicyStats())
            guides = shown.stats.guides or GuideStats()
            yield from self._constraints(guides if shown.alive else guides._replace(grammars=0, waiting=0))
            yield from self._fixed(info)

    def _engine(self, stats: SchedulerStats, heartbeat_age_s: float) -> Iterator[Metric]:
        used = stats.blocks_used / stats.blocks_total if stats.blocks_total else 0.0
        yield self._gauge("vllm:num_requests_running", "Sequences that hold a seat", stats.running)
        yield self._gauge("vllm:num_requests_waiting", "Sequences that wait for a seat", stats.waiting)
        yield self._gauge("vllm:kv_cache_usage_perc", "Share of the KV blocks in use, 0 to 1", used)
        yield self._counter("vllm:prefix_cache_queries", "Prompt tokens looked up", stats.prefix_queries)
        yield self._counter("vllm:prefix_cache_hits", "Prompt tokens found in the cache", stats.prefix_hits)
        yield self._counter("vllm:num_preemptions", "Sequences sent back to wait", stats.preemptions)
        yield self._counter("vllm:generation_tokens", "Tokens generated", stats.generation_tokens)
        stalls, faults = stats.policy_stalls, stats.policy_faults
        help = "Times the scheduling policy let nobody do anything and the engine went on without it"
        yield self._counter("roseinfer:policy_stalls", help, stalls)
        yield self._counter("roseinfer:policy_faults", "Answers of the scheduling policy that were ignored", faults)
        help = "Checks of the idle engine that found seats, queues or KV blocks to disagree"
        yield self._counter("roseinfer:integrity_errors", help, stats.integrity_errors)
        yield self._counter("roseinfer:prefill_tokens", "Prompt tokens computed", stats.prompt_tokens)
        help = "Since the engine's last turn"
        yield self._gauge("roseinfer:engine_heartbeat_age_seconds", help, heartbeat_age_s)

    def _constraints(self, guides: GuideStats) -> Iterator[Metric]:
        """What the engine does for constrained outputs."""
        yield self._gauge("roseinfer:engine_grammars", "Compiled grammars that the engine keeps", guides.grammars)
        help = "Requests that wait in the engine until their grammar is compiled"
        yield self._gauge("roseinfer:num_requests_compiling", help, guides.waiting)
        help = "Rows sampled for requests with a constraint"
        yield self._counter("roseinfer:constrained_rows", help, guides.rows)
        help = "Rows of such requests that nothing constrained: their grammar waits for what wakes it"
        yield self._counter("roseinfer:dormant_rows", help, guides.dormant_rows)
        yield self._counter("roseinfer:engine_grammars_compiled", "Grammars that the engine compiled", guides.compiled)
        yield self._counter("roseinfer:engine_grammars_cached", "Grammars that it had compiled already", guides.cached)

    def _objectives(self, policy: PolicyStats) -> Iterator[Metric]:
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
                yield self._gauge(name, help, value)

    def _fixed(self, info: EngineInfo) -> Iterator[Metric]:
        cache = {"block_size": str(info.block_size), "num_gpu_blocks": str(info.num_blocks)}
        config = GaugeMetricFamily("vllm:cache_config_info", "Size of the KV cache", labels=(*LABELS, *cache))
        config.add_metric((*self._values, *cache.values()), 1)
        yield config
        phases = GaugeMetricFamily("roseinfer:startup_phase_seconds", "Time to start", labels=(*LABELS, "phase"))
        for phase, seconds in info.startup_s.items():
            phases.add_metric((*self._values, phase), seconds)
        yield phases

    def _gauge(self, name: str, help: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, help, labels=LABELS)
        family.add_metric(self._values, value)
        return family

    def _counter(self, name: str, help: str, value: float) -> Metric:
        family = CounterMetricFamily(name, help, labels=LABELS)
        family.add_metric(self._values, value)
        return family


def _dead(stats: SchedulerStats) -> SchedulerStats:
    """What is true once the engine is gone: it has counted what it had counted, and nothing runs, waits or is held."""
    return stats._replace(running=0, waiting=0, blocks_used=0, policy=None)


class _Collected:
    """As much of a registry as is needed to write metrics down."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics
