"""CUDA graphs of decode steps: kernels are recorded once and replayed as a whole."""

from bisect import bisect_left
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import torch

from roseinfer.attention.base import GraphableAttention
from roseinfer.attention.kv_store import KVStore
from roseinfer.core.observer import Span, unobserved
from roseinfer.core.progress import report
from roseinfer.models.base import CausalLM
from roseinfer.runner.forward import Columns, Forwarded, ForwardPass, nothing
from roseinfer.runner.timing import device_seconds

if TYPE_CHECKING:  # it needs triton
    from roseinfer.runner.cuda_inputs import CudaInputs

# Rows up to which a graph also finds the likeliest tokens. In such small steps the host is the bottleneck, and a
# separate launch takes it longer than the device needs, even if tokens are then drawn instead.
MAX_GREEDY_GRAPH_ROWS = 16
# Up to so many rows, steps of models whose padded rows are costly have graphs of exactly their size: five rows of
# Qwen3.6-35B-A3B take 3.89 ms instead of 4.31, and of gpt-oss-20b 3.52 instead of 3.74 (H200, 2026-11-29).
MAX_EXACT_ROWS = 8
_TIMED_RUN_COUNT = 3

Result = TypeVar("Result")


def decode_buckets(max_rows: int, *, costly_padding: bool = False) -> list[int]:
    """Return the batch sizes to capture: close together where a padded row costs most, up to `max_rows`.

    costly_padding: a padded row takes almost as long as any other, as with experts and recurrent states.
    """
    few = range(1, MAX_EXACT_ROWS) if costly_padding else (1, 2, 4)
    sizes = [*few, *range(8, 257, 8), *range(272, 1025, 16)]
    return [*(size for size in sizes if size < max_rows), max_rows]


class TokenChooser(Protocol):
    """Interface of `CudaTokenChooser`."""

    def choose(self, logits: torch.Tensor, seats: torch.Tensor, ends: torch.Tensor, features: int) -> torch.Tensor: ...


class GraphRecorder:
    """Recorder of CUDA graphs, which also times launches and replays."""

    def record(self, launch: Callable[[], Result], pool: Any) -> tuple[torch.cuda.CUDAGraph, Result]:
        """Capture what `launch` launches. Return the graph, and the result of the captured call."""
        launch()  # allocates memory and library handles, which must exist before capture
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            result = launch()
        return graph, result

    def launch_seconds(self, launch: Callable[[], object]) -> float:
        """Return the host's time for `launch`, without the device's."""
        best = float("inf")
        for _ in range(_TIMED_RUN_COUNT):
            torch.cuda.synchronize()
            began = perf_counter()
            launch()
            best = min(best, perf_counter() - began)
        torch.cuda.synchronize()
        return best

    def replay_seconds(self, graph: torch.cuda.CUDAGraph) -> float:
        """Return the device's time for a replay."""
        graph.replay()
        return device_seconds(graph.replay)


class _Kind(NamedTuple):
    """A graph's number of rows, and whether rows may have adapters."""

    bucket: int
    adapted: bool


class DecodeGraphs:
    """Replays a captured graph for a step with one token per row; passes other steps to `others`.

    Graphs of up to `MAX_GREEDY_GRAPH_ROWS` rows end with the likeliest tokens, written where the next step reads them.
    The sampler keeps or overwrites them.

    A step is padded to the next bucket with rows of the spare seat, whose K/V goes to a block that no request owns. All
    buckets share one memory pool, the largest captured first, and one buffer of logits. Nothing is captured while
    serving. Steps with adapters have a graph of their own for each bucket.
    """

    def __init__(
        self,
        others: ForwardPass,
        model: CausalLM,
        attention: GraphableAttention,
        store: KVStore,
        inputs: "CudaInputs",
        buckets: list[int],
        choice: TokenChooser,
        recorder: GraphRecorder,
    ) -> None:
        self._others = others
        self._model = model
        self._attention = attention
        self._store = store
        self._inputs = inputs
        self._buckets = buckets
        self._logits = torch.empty((buckets[-1], model.padded_vocab), dtype=model.dtype, device=model.device)
        self._choice = choice
        self._recorder = recorder
        self._greedy: dict[_Kind, torch.Tensor] = {}
        self._graphs: dict[_Kind, torch.cuda.CUDAGraph] = {}
        self._span: Span = unobserved

    def observe(self, span: Span) -> None:
        self._span = span
        self._others.observe(span)

    @torch.inference_mode()
    def capture(self, pool: Any) -> None:
        """Record every bucket. Run each kind of step before, so that its kernels are compiled."""
        padding = Columns.of([])
        kinds = [_Kind(bucket, adapted) for bucket in reversed(self._buckets) for adapted in self._adapted()]
        for done, kind in enumerate(kinds):
            report("capturing CUDA graphs of decode steps", done, len(kinds))
            self._inputs.stage_decodes(padding, kind.bucket)
            self._graphs[kind], greedy = self._recorder.record(partial(self._launch, kind), pool)
            if greedy is not None:
                self._greedy[kind] = greedy

    def _adapted(self) -> tuple[bool, ...]:
        return (False, True) if self._inputs.has_adapters else (False,)

    def run(self, columns: Columns, staged: Callable[[], None] = nothing) -> Forwarded:
        num_rows = len(columns.seat)
        if not self._graphs or not columns.only_decodes or num_rows > self._buckets[-1]:
            return self._others.run(columns, staged)
        kind = _Kind(self._buckets[bisect_left(self._buckets, num_rows)], self._inputs.adapted(columns))
        with self._span("prepare"):
            sample_at = self._inputs.stage_decodes(columns, kind.bucket)
        staged()
        self._graphs[kind].replay()
        greedy = self._greedy.get(kind)
        return Forwarded(
            logits=self._logits[:num_rows, : self._model.spec.vocab_size],
            sample_at=sample_at,
            greedy=None if greedy is None else greedy[:num_rows],
        )

    def _launch(self, kind: "_Kind") -> torch.Tensor | None:
        """Launch a step. Return the likeliest tokens if the step is small enough for them."""
        bucket = kind.bucket
        batch = self._inputs.decode_batch(bucket, kind.adapted)
        self._attention.begin(batch, self._store)
        hidden = self._model.forward(batch, self._attention)
        self._model.logits(hidden, out=self._logits[:bucket])
        if bucket > MAX_GREEDY_GRAPH_ROWS:
            return None
        seats, ends = self._inputs.decode_samples(bucket)
        logits = self._logits[:bucket, : self._model.spec.vocab_size]
        return self._choice.choose(logits, seats, ends, 0)
