"""Prometheus metrics in a registry of our own: vLLM's names where it has them, `roseinfer:` for the rest.

Gauges and engine counters are read from `Engine.stats()` when scraped. Buckets keep every bound of vLLM's and add some,
so that dashboards and mixed fleets still aggregate.
"""

from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from roseinfer.core.outputs import FinishReason, SchedulerStats
from roseinfer.engine.api import Engine
from roseinfer.server.account import PromptRun, Sample

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
HTTP_S = (.005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 120, 300)
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
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
    """Answers by route, method and class of status. Exists before the engine does."""

    def __init__(self, registry: CollectorRegistry, routes: Iterable[str]) -> None:
        labels = ("handler", "method", "status")
        self._routes = frozenset(routes)
        self._requests = Counter("http_requests", "HTTP answers", labels, registry=registry)
        self._duration = Histogram(
            "http_request_duration_seconds",
            "From the request's head to the end of the answer",
            labels,
            buckets=HTTP_S,
            registry=registry,
        )

    def observe(self, path: str, method: str, status: int, seconds: float) -> None:
        """`status` 0: the client left before there was an answer, filed under 4xx."""
        labels = (self._handler(path), method if method in _METHODS else "OTHER", f"{status // 100 or 4}xx")
        self._requests.labels(*labels).inc()
        self._duration.labels(*labels).observe(seconds)

    def _handler(self, path: str) -> str:
        """Route names only: a label made of whatever clients ask for would grow without end."""
        if path in self._routes:
            return path
        return "/v1/models/{model_id}" if path.startswith("/v1/models/") else "none"


_METHODS = frozenset({"GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH"})


class EngineCollector(Collector):
    """What the engine's own snapshot says at the moment of the scrape."""

    def __init__(self, engine: Engine, model_name: str) -> None:
        self._engine = engine
        self._values = (model_name, ENGINE_INDEX)

    def collect(self) -> Iterable[Metric]:
        stats, health = self._engine.stats(), self._engine.health()
        used = stats.blocks_used / stats.blocks_total if stats.blocks_total else 0.0
        yield self._gauge("vllm:num_requests_running", "Sequences that hold a seat", stats.running)
        yield self._gauge("vllm:num_requests_waiting", "Sequences that wait for a seat", stats.waiting)
        yield self._gauge("vllm:kv_cache_usage_perc", "Share of the KV blocks in use, 0 to 1", used)
        yield self._counter("vllm:prefix_cache_queries", "Prompt tokens looked up", stats.prefix_queries)
        yield self._counter("vllm:prefix_cache_hits", "Prompt tokens found in the cache", stats.prefix_hits)
        yield self._counter("vllm:num_preemptions", "Sequences sent back to wait", stats.preemptions)
        yield self._counter("vllm:generation_tokens", "Tokens generated", stats.generation_tokens)
        yield self._counter("roseinfer:prefill_tokens", "Prompt tokens computed", stats.prompt_tokens)
        age_s = health.heartbeat_age_s
        yield self._gauge("roseinfer:engine_heartbeat_age_seconds", "Since the engine's last turn", age_s)

    def _gauge(self, name: str, help: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, help, labels=LABELS)
        family.add_metric(self._values, value)
        return family

    def _counter(self, name: str, help: str, value: float) -> Metric:
        family = CounterMetricFamily(name, help, labels=LABELS)
        family.add_metric(self._values, value)
        return family


class EngineMetrics:
    """Everything that requests leave behind, and the engine's own numbers. One per engine."""

    def __init__(self, registry: CollectorRegistry, engine: Engine, model_name: str) -> None:
        self._registry = registry
        self._values = (model_name, ENGINE_INDEX)
        self._model_name = model_name
        self._latencies()
        self._sizes(length_buckets(engine.info.max_model_len))
        self._counters()
        self._fixed(engine)
        registry.register(EngineCollector(engine, model_name))

    def prompt_done(self, tokens: int, cached_tokens: int) -> None:
        """A prompt has been processed: `tokens` of it, `cached_tokens` of them found in the cache."""
        self._prompts.inc(tokens)
        self._cached.inc(cached_tokens)

    def first_token(self, seconds: float) -> None:
        """From arrival to the first token of a prompt, as the server sees it."""
        self._ttft.observe(seconds)

    def inter_token(self, seconds: float, tokens: int) -> None:
        """`seconds` per token; several `tokens` that came together share their time."""
        for _ in range(tokens):
            self._itl.observe(seconds)

    def step(self, stats: SchedulerStats) -> None:
        self._step_tokens.observe(stats.step_tokens)
        self._step_time.observe(stats.step_duration_s)

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
            if finish in (FinishReason.STOP, FinishReason.LENGTH):
                self._phases(sample)

    def _phases(self, sample: Sample) -> None:
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
        self._ttft = seconds("vllm:time_to_first_token_seconds", "Arrival to first token", TTFT_S)
        self._itl = seconds("vllm:inter_token_latency_seconds", "Between tokens of a sequence", TOKEN_S)
        self._tpot = seconds("vllm:request_time_per_output_token_seconds", "Mean time per later token", TOKEN_S)
        self._e2e = seconds("vllm:e2e_request_latency_seconds", "Arrival to end", REQUEST_S)
        self._queue = seconds("vllm:request_queue_time_seconds", "Arrival to first scheduling", REQUEST_S)
        self._inference = seconds("vllm:request_inference_time_seconds", "First scheduling to end", REQUEST_S)
        self._prefill = seconds("vllm:request_prefill_time_seconds", "First scheduling to first token", REQUEST_S)
        self._decode = seconds("vllm:request_decode_time_seconds", "First token to end", REQUEST_S)
        self._step_time = seconds("roseinfer:step_time_seconds", "Duration of an engine step", STEP_S)

    def _sizes(self, lengths: Sequence[float]) -> None:
        sizes = self._histogram
        self._prompt_tokens = sizes("vllm:request_prompt_tokens", "Tokens of a prompt", lengths)
        self._computed = sizes("vllm:request_prefill_kv_computed_tokens", "Prompt tokens not found cached", lengths)
        self._output_tokens = sizes("vllm:request_generation_tokens", "Tokens generated for a sample", lengths)
        self._longest_output = sizes("vllm:request_max_num_generation_tokens", "Most tokens of a sample", lengths)
        self._max_tokens = sizes("vllm:request_params_max_tokens", "max_tokens as run", lengths)
        self._n = sizes("vllm:request_params_n", "Samples per prompt", CHOICES)
        self._preemptions = sizes("vllm:request_num_preemptions", "Preemptions of a sample", PREEMPTIONS)
        self._step_tokens = sizes("vllm:iteration_tokens_total", "Tokens computed in a step", STEP_TOKENS)

    def _counters(self) -> None:
        self._success = self._counter("vllm:request_success", "Ended samples", (*LABELS, "finished_reason"))
        self._prompts = self._plain_counter("vllm:prompt_tokens", "Tokens of prompts processed, cached ones included")
        self._cached = self._plain_counter("vllm:prompt_tokens_cached", "Prompt tokens not computed anew")
        self._rejections = self._counter("vllm:admission_rejections", "Requests turned away", ("model_name", "reason"))
        self._aborted = self._counter("roseinfer:requests_aborted", "Requests cut short", (*LABELS, "reason"))

    def _fixed(self, engine: Engine) -> None:
        info = engine.info
        cache = {"block_size": str(info.block_size), "num_gpu_blocks": str(info.num_blocks)}
        config = Gauge("vllm:cache_config_info", "Size of the KV cache", (*LABELS, *cache), registry=self._registry)
        config.labels(*self._values, *cache.values()).set(1)
        phases = Gauge("roseinfer:startup_phase_seconds", "Time to start", (*LABELS, "phase"), registry=self._registry)
        for phase, seconds in info.startup_s.items():
            phases.labels(*self._values, phase).set(seconds)

    def _histogram(self, name: str, help: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(name, help, LABELS, buckets=buckets, registry=self._registry).labels(*self._values)

    def _plain_counter(self, name: str, help: str) -> Counter:
        return self._counter(name, help, LABELS).labels(*self._values)

    def _counter(self, name: str, help: str, labels: tuple[str, ...]) -> Counter:
        return Counter(name, help, labels, registry=self._registry)


def scrape(registry: CollectorRegistry) -> bytes:
    return generate_latest(registry)
