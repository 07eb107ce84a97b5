"""Metrics of engine steps."""

from collections import deque
from collections.abc import Iterable

from roseinfer.engine.api import StepRecord
from roseinfer.server.observe.metric_registry import LABELS, MetricRegistry
from roseinfer.server.observe.model_names import ModelNames

# fmt: off
STEP_S = (.0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5)
STEP_RATIO = (.25, .5, .67, .8, .9, .95, .98, 1, 1.02, 1.05, 1.1, 1.25, 1.5, 2, 4)
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
MASK_S = (.00005, .0001, .0002, .0003, .0005, .00075, .001, .0015, .002, .003, .005, .01, .02, .05, .1)
# fmt: on


class StepMetrics:
    """Metrics of engine steps, kept by the process that owns the engines.

    `count`: all steps so far; `newest`: the last `keep` steps with their engines.
    """

    def __init__(self, registry: MetricRegistry, models: ModelNames, keep: int = 0) -> None:
        tokens, seconds = "Tokens computed in a step", "Duration of an engine step"
        self._tokens = registry.histograms("vllm:iteration_tokens_total", tokens, STEP_TOKENS, LABELS)
        self._times = registry.histograms("roseinfer:step_time_seconds", seconds, STEP_S, LABELS)
        ratio = "Duration of an engine step divided by the cost model's prediction"
        self._ratios = registry.histograms("roseinfer:step_time_ratio", ratio, STEP_RATIO, LABELS)
        help = "Host time for the masks of constrained outputs, per step with such outputs"
        self._masks = registry.histograms("roseinfer:mask_time_seconds", help, MASK_S, LABELS)
        self._models = models
        self.count = 0
        self.newest: deque[tuple[int, StepRecord]] = deque(maxlen=keep)

    def expect(self, engines: Iterable[int]) -> None:
        """Create the series of `engines`, so that they are 0 and not absent before the first step."""
        for engine in engines:
            for family in (self._tokens, self._times, self._ratios, self._masks):
                family.labels(self._models.of(engine), str(engine))

    def forget(self, engine: int) -> None:
        """Drop the series of an engine that will not return."""
        for family in (self._tokens, self._times, self._ratios, self._masks):
            family.drop(self._models.of(engine), str(engine))

    def step(self, engine: int, record: StepRecord) -> None:
        self.count += 1
        self.newest.append((engine, record))
        values = (self._models.of(engine), str(engine))
        self._tokens.labels(*values).observe(record.tokens)
        self._times.labels(*values).observe(record.duration_s)
        if record.predicted_s > 0:
            self._ratios.labels(*values).observe(record.duration_s / record.predicted_s)
        if record.mask_s > 0:
            self._masks.labels(*values).observe(record.mask_s)
