"""Metrics counted by events: vLLM's names where it has them, `roseinfer:` for the rest.

`exposition` adds the engines' own statistics. Buckets keep every bound of vLLM's and add some, so that dashboards and
mixed fleets still aggregate.
"""

from collections.abc import Collection, Mapping, Sequence

from roseinfer.core.outputs import COMPLETE
from roseinfer.core.slo import Cause
from roseinfer.server.observe.metric_registry import LABELS, Counter, Histogram, Labels, MetricRegistry
from roseinfer.server.request.job import PromptRun, SampleRecord

# `engine` label of metrics by request: a request may move between several engines.
ALL_ENGINES = "all"
# Longest length in the buckets of a server with several models, which share their buckets.
MAX_LENGTH_TOKENS = 1_000_000

# fmt: off
TTFT_S = (.001, .005, .01, .02, .04, .06, .08, .1, .15, .2, .25, .3, .4, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160,
          640, 2560)
TOKEN_S = (.001, .002, .003, .004, .005, .0075, .01, .015, .02, .025, .03, .04, .05, .075, .1, .15, .2, .3, .4, .5,
           .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
REQUEST_S = (.001, .0025, .005, .01, .025, .05, .1, .2, .3, .5, .8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60,
             120, 240, 480, 960, 1920, 7680)
HTTP_S = (.005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 120, 300)
LENGTH_RATIO = (.1, .2, .33, .5, .67, .8, .9, 1, 1.1, 1.25, 1.5, 2, 3, 5, 10, 30, 100)
PREDICTION_S = (.0001, .0002, .0003, .0005, .00075, .001, .002, .005, .01, .025, .1)
TEXT_S = (.0005, .001, .002, .005, .01, .02, .05, .1, .25, .5, 1, 2, 5, 10)
GRAMMAR_S = (.0005, .001, .002, .003, .005, .01, .02, .05, .1, .25, .5, 1, 2, 5)
CHOICES = (1, 2, 5, 10, 20)
PREEMPTIONS = (1, 2, 3, 4, 5, 10, 20)
# fmt: on


def length_buckets(longest: int) -> list[int]:
    """Return 1, 2, 5, 10, 20, ... up to `longest`."""
    bounds: list[int] = []
    scale = 1
    while True:
        for step in (1, 2, 5):
            if step * scale > longest:
                return bounds or [1]
            bounds.append(step * scale)
        scale *= 10


class HttpMetrics:
    """Counts and durations of answers by route, method and status class. `routes`: methods by path.

    Unknown paths share the label `none`, unknown methods `OTHER`: clients cannot create series.
    """

    def __init__(self, registry: MetricRegistry, routes: Mapping[str, Collection[str]]) -> None:
        labels = ("handler", "method", "status")
        self._routes = {path: frozenset(methods) for path, methods in routes.items()}
        self._requests = registry.counters("http_requests", "HTTP answers", labels)
        help = "From the request headers to the end of the answer"
        self._duration = registry.histograms("http_request_duration_seconds", help, HTTP_S, labels)

    def observe(self, path: str, method: str, status: int, seconds: float) -> None:
        """Count one answer. `status` 0: the client left before the answer, counted as 4xx."""
        handler = path if path in self._routes else _route_of(path)
        known = method in self._routes.get(handler, ())
        labels = (handler, method if known else "OTHER", f"{status // 100 or 4}xx")
        self._requests.labels(*labels).inc()
        self._duration.labels(*labels).observe(seconds)


def _route_of(path: str) -> str:
    found = next((route for route in _WITH_IDS if path.startswith(route.partition("{")[0])), "none")
    last = path.rpartition("/")[2]
    return f"{found}/{last}" if found == _WITH_IDS[-1] and last in _BELOW_RESPONSES else found


_WITH_IDS = ("/v1/models/{model_id}", "/v1/requests/{request_id}", "/v1/responses/{response_id}")
_BELOW_RESPONSES = ("input_items", "cancel")


class LengthMetrics:
    """Accuracy and duration of length predictions. Only with a predictor."""

    def __init__(self, registry: MetricRegistry, values: Labels) -> None:
        help = "Predicted divided by actual output length, of samples that stopped by themselves"
        ratios = registry.histograms("roseinfer:length_prediction_ratio", help, LENGTH_RATIO, LABELS)
        times = registry.histograms(
            "roseinfer:length_prediction_seconds", "Duration of a prediction", PREDICTION_S, LABELS
        )
        self.was_off, self.took = ratios.labels(*values).observe, times.labels(*values).observe


class TextMetrics:
    """Duration of text work by lane."""

    def __init__(self, registry: MetricRegistry, values: Labels) -> None:
        help = "Time to render and tokenise a text, or to decode token ids, waiting included"
        self._times = registry.histograms("roseinfer:text_seconds", help, TEXT_S, (*LABELS, "lane"))
        self._values = values

    def took(self, lane: str, seconds: float) -> None:
        self._times.labels(*self._values, lane).observe(seconds)


class PoolingMetrics:
    """Metrics of completed requests for embeddings or scores, by API."""

    def __init__(self, registry: MetricRegistry, values: Labels) -> None:
        labels = (*LABELS, "api")
        self._values = values
        self._requests = registry.counters("roseinfer:pooling_requests", "Answered requests for vectors", labels)
        self._inputs = registry.counters("roseinfer:pooling_inputs", "Inputs of these requests", labels)
        self._tokens = registry.counters("roseinfer:pooling_tokens", "Tokens of these inputs", labels)
        help = "Arrival of a request to the results of all its inputs"
        self._seconds = registry.histograms("roseinfer:pooling_result_seconds", help, REQUEST_S, labels)

    def ended(self, api: str, runs: Sequence[PromptRun], seconds: float) -> None:
        """Count a request whose inputs all have results."""
        labels = (*self._values, api)
        self._requests.labels(*labels).inc()
        self._inputs.labels(*labels).inc(len(runs))
        self._tokens.labels(*labels).inc(sum(run.prompt_tokens for run in runs))
        self._seconds.labels(*labels).observe(seconds)


class GrammarMetrics:
    """Metrics of output constraints. See `request.grammars.GrammarObserver`."""

    def __init__(self, registry: MetricRegistry, values: Labels) -> None:
        help = "Time to build and verify the grammar of a constraint that was not cached"
        times = registry.histograms("roseinfer:grammar_compile_seconds", help, GRAMMAR_S, LABELS)
        self.compiled = times.labels(*values).observe
        known = registry.counters("roseinfer:grammars_cached", "Constraints whose grammar was cached", LABELS)
        self.cached = known.labels(*values).inc
        self._values = values
        self._refused = registry.counters("roseinfer:grammars_refused", "Rejected constraints", (*LABELS, "reason"))

    def refused(self, code: str) -> None:
        self._refused.labels(*self._values, code).inc()


class EngineMetrics:
    """Metrics of requests. `values`: of `LABELS`; `max_length`: upper bound of lengths in tokens."""

    def __init__(self, registry: MetricRegistry, max_length: int, values: Labels) -> None:
        self._registry = registry
        self._values = values
        self._latencies()
        self._sizes(length_buckets(max_length))
        self._counters()

    def prompt_done(self, tokens: int, cached_tokens: int) -> None:
        self._prompts.inc(tokens)
        self._cached.inc(cached_tokens)

    def refused(self, reason: str) -> None:
        self._rejections.labels(self._values[0], reason).inc()

    def aborted(self, reason: str) -> None:
        self._aborted.labels(*self._values, reason).inc()

    def prompt_ended(self, run: PromptRun, reason: str, now_s: float) -> None:
        """Count an ended prompt. `reason`: finish reason of samples without one of their own."""
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
            for cause, seconds in sample.why.waited if sample.why is not None else ():
                # A resumed request ran on its earlier engine, so that time was no wait.
                if cause is not Cause.ENGINE or run.route is None or not run.route.resumes:
                    self._waited.labels(*self._values, cause).inc(seconds)
            if finish in COMPLETE:
                self._phases(sample)

    def parsed(self, parser: str, runs: Sequence[PromptRun]) -> None:
        """Count reasoning tokens and tool calls. `parser`: name of the tool call format, or "none"."""
        samples = [sample for run in runs for sample in run.samples]
        self._reasoning.inc(sum(sample.reasoning_tokens for sample in samples))
        self._calls.labels(*self._values, parser).inc(sum(sample.calls for sample in samples))
        self._failures.labels(*self._values, parser).inc(sum(sample.parse_failures for sample in samples))

    def _phases(self, sample: SampleRecord) -> None:
        """Record the durations of the phases that the sample reached, on the engine's clock."""
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
        # Called at least once per token, so these are the histograms' own methods.
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
        self._longest_output = sizes(
            "vllm:request_max_num_generation_tokens", "Tokens of the longest sample of a prompt", lengths
        )
        self._max_tokens = sizes("vllm:request_params_max_tokens", "max_tokens as run", lengths)
        self._n = sizes("vllm:request_params_n", "Samples per prompt", CHOICES)
        self._preemptions = sizes("vllm:request_num_preemptions", "Preemptions of a sample", PREEMPTIONS)

    def _counters(self) -> None:
        self._success = self._registry.counters("vllm:request_success", "Ended samples", (*LABELS, "finished_reason"))
        self._prompts = self._counter("vllm:prompt_tokens", "Tokens of prompts processed, cached ones included")
        self._cached = self._counter("vllm:prompt_tokens_cached", "Prompt tokens found in the cache")
        by_reason = ("model_name", "reason")
        self._rejections = self._registry.counters("vllm:admission_rejections", "Rejected requests", by_reason)
        self._aborted = self._registry.counters("roseinfer:requests_aborted", "Aborted requests", (*LABELS, "reason"))

        help = "Seconds that ended samples spent without a seat, by cause"
        self._waited = self._registry.counters("roseinfer:request_wait_seconds", help, (*LABELS, "cause"))
        self._reasoning = self._counter("roseinfer:reasoning_tokens", "Reasoning tokens generated")
        by_parser = (*LABELS, "parser")
        self._calls = self._registry.counters("roseinfer:tool_calls", "Complete tool calls", by_parser)
        help = "Malformed tool calls in outputs"
        self._failures = self._registry.counters("roseinfer:tool_call_parse_failures", help, by_parser)

    def _histogram(self, name: str, help: str, buckets: Sequence[float]) -> Histogram:
        return self._registry.histograms(name, help, buckets, LABELS).labels(*self._values)

    def _counter(self, name: str, help: str) -> Counter:
        return self._registry.counters(name, help, LABELS).labels(*self._values)
