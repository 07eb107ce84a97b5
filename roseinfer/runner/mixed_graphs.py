"""Steps that mix prompt chunks and decodes as CUDA graphs, where that is faster than launching kernel by kernel."""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import add
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from roseinfer.attention.base import GraphableAttention
from roseinfer.attention.kv_store import KVStore
from roseinfer.core.observer import Span, unobserved
from roseinfer.core.plan import Row
from roseinfer.core.progress import report
from roseinfer.models.base import CausalLM
from roseinfer.runner.forward import Columns, Forwarded, ForwardPass
from roseinfer.runner.timing import device_seconds

if TYPE_CHECKING:  # needs triton
    from roseinfer.runner.cuda_inputs import CudaInputs

# A graph is replayed for steps whose kernels take less than this many times what the host needs to launch them one by
# one: then the host sets the pace. Beyond it, the padding to the bucket would cost more than the launches.
WORTH = 1.5
_TIMED_RUNS = 3
# Prompts of a timed replay: as many as surely fit a graph's map of chunks.
_TIMED_PROMPTS = 32


def mixed_buckets(max_tokens: int) -> list[int]:
    """Numbers of tokens to capture: a step is padded by an eighth or less, but for the smallest.

    536 tokens padded to 640 cost .6 ms more in a step of 13 of Qwen3-30B-A3B in FP8 on an H200, padded to 576 .3.
    """
    sizes = [16, 32, 48, *range(64, 1025, 64), *range(1152, 2049, 128), *range(2304, 4097, 256)]
    return [*(size for size in sizes if size < max_tokens), max_tokens]


class MixedGraphs:
    """Replays a captured graph for a step of up to some number of tokens; hands larger ones to `eager`, and those of
    more small chunks than a graph has room for.

    The graph ends with the hidden states; the head and sampling follow for the rows that sample. Which tokens belong to
    which row, and which rows decode, is on the device, so that one graph serves every step of a bucket's size.
    """

    def __init__(
        self,
        eager: ForwardPass,
        model: CausalLM,
        attention: GraphableAttention,
        store: KVStore,
        inputs: "CudaInputs",
        buckets: list[int],
        agree: Callable[[int], int],
    ) -> None:
        """agree: the least of what all processes say that share the model, and that must replay the same graphs."""
        self._eager = eager
        self._model = model
        self._attention = attention
        self._store = store
        self._inputs = inputs
        self._candidates = buckets
        self._agree = agree
        self._buckets: list[int] = []
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._hidden: dict[int, torch.Tensor] = {}
        self._span: Span = unobserved

    def observe(self, span: Span) -> None:
        self._span = span
        self._eager.observe(span)

    @torch.inference_mode()
    def capture(self, pool: Any) -> None:
        """Record buckets from the smallest on, until replaying one takes longer than is worth it; and the largest."""
        report("capturing CUDA graphs of mixed steps")
        launch_s = self._launch_seconds()
        with self._different_tokens():
            for bucket in self._candidates[:-1]:
                graph = self._record(bucket, pool)
                if not self._agree(self._replay_seconds(bucket, graph) <= WORTH * launch_s):
                    self._hidden.pop(bucket)
                    break
                self._graphs[bucket] = graph
                self._buckets.append(bucket)
        full = self._candidates[-1]
        self._graphs[full] = self._record(full, pool)
        if self._buckets == self._candidates[:-1]:
            self._buckets.append(full)

    def run(self, columns: Columns) -> Forwarded:
        bucket = self._bucket(sum(columns.count))
        if bucket is None:
            return self._eager.run(columns)
        room = self._chunks(bucket)
        chunk_map = self._map(columns, bucket, room)
        if len(chunk_map) > room:
            return self._eager.run(columns)
        with self._span("prepare"):
            staged = self._inputs.stage_mixed(columns, bucket, chunk_map, room)
        self._graphs[bucket].replay()
        return Forwarded(hidden=self._hidden[bucket].index_select(0, staged.logits_at), sample_at=staged.sample_at)

    def _bucket(self, num_tokens: int) -> int | None:
        """The graph for a step of so many tokens; None for an eager one.

        Under load steps use up their budget: the graph of that size needs no padding, and so is worth it for any model.
        """
        if num_tokens == self._candidates[-1] and num_tokens in self._graphs:
            return num_tokens
        if not self._buckets or num_tokens > self._buckets[-1]:
            return None
        return self._buckets[bisect_left(self._buckets, num_tokens)]

    def _map(self, columns: Columns, bucket: int, room: int) -> np.ndarray:
        first = columns.num_decodes
        counts = columns.count[first:]
        return self._attention.map_chunks(bucket, first, counts, list(map(add, columns.start[first:], counts)), room)

    def _chunks(self, bucket: int) -> int:
        return self._attention.max_chunks(bucket, min(bucket, self._inputs.max_rows))

    def _record(self, bucket: int, pool: Any) -> torch.cuda.CUDAGraph:
        self._stage_padding(bucket)
        self._launch(bucket)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            self._hidden[bucket] = self._launch(bucket)
        return graph

    def _launch(self, bucket: int) -> torch.Tensor:
        batch = self._inputs.mixed_batch(bucket, self._chunks(bucket))
        self._attention.begin(batch, self._store)
        return self._model.forward(batch, self._attention)

    def _stage_padding(self, bucket: int) -> None:
        padding, room = Columns.of([]), self._chunks(bucket)
        self._inputs.stage_mixed(padding, bucket, self._map(padding, bucket, room), room)

    def _launch_seconds(self) -> float:
        """Host time of launching a small step kernel by kernel; what it computes belongs to the spare seat.

        Of four tokens, whose kernels are compiled already.
        """
        seat = self._inputs.seats.spare
        step = Columns.of([Row("spare", seat, 0, count, 1, True, count, 0, ()) for count in (1, 3)])
        best = float("inf")
        for _ in range(_TIMED_RUNS):
            torch.cuda.synchronize()
            began = perf_counter()
            self._eager.run(step)
            best = min(best, perf_counter() - began)
        torch.cuda.synchronize()
        return best

    def _replay_seconds(self, bucket: int, graph: torch.cuda.CUDAGraph) -> float:
        """Device time of one replay of a full bucket.

        Of prompts, not of padding: its tokens are all the same, and would all read the same few of a model's experts.
        """
        self._stage_prompts(bucket)
        graph.replay()
        return device_seconds(graph.replay)

    def _stage_prompts(self, bucket: int) -> None:
        """The spare seat's tokens from position 0 on, so often as fills the bucket; no K/V is written."""
        seats, rows = self._inputs.seats, min(self._inputs.max_rows, _TIMED_PROMPTS)
        starts = range(0, bucket, seats.max_model_len)[:rows]
        counts = [min(seats.max_model_len, bucket - start) for start in starts]
        columns = Columns.of([Row("spare", seats.spare, 0, count, 1, True, count, 0, ()) for count in counts])
        room = self._chunks(bucket)
        self._inputs.stage_mixed(columns, bucket, self._map(columns, bucket, room), room)

    @contextmanager
    def _different_tokens(self) -> Iterator[None]:
        """The spare seat's tokens are drawn, in all processes alike; then they are zeros again."""
        seats = self._inputs.seats
        generator = torch.Generator().manual_seed(0)
        drawn = torch.randint(seats.vocab_size, seats.tokens.shape[1:], generator=generator, dtype=torch.int32)
        seats.tokens[seats.spare] = drawn.to(seats.device)
        try:
            yield
        finally:
            seats.tokens[seats.spare] = 0
