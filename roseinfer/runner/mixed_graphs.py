"""CUDA graphs of steps that mix prompt chunks and decodes, where replaying is faster than launching."""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from operator import add
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from roseinfer.attention.base import CHUNK_FIELD_COUNT, GraphableAttention, ShortRows
from roseinfer.attention.kv_store import KVStore
from roseinfer.core.observer import Span, unobserved
from roseinfer.core.plan import Row
from roseinfer.core.progress import report
from roseinfer.models.base import CausalLM
from roseinfer.runner.cuda_graphs import GraphRecorder
from roseinfer.runner.forward import Columns, Forwarded, ForwardPass, nothing

if TYPE_CHECKING:  # it needs triton
    from roseinfer.runner.cuda_inputs import CudaInputs

# Upper bound of a graph's device time, in multiples of the host's time to launch such a step kernel by kernel. Beyond
# it, padding to the bucket costs more than the launches.
MAX_REPLAY_LAUNCH_RATIO = 1.5
# Launches are timed again where steps are so many times as large: mostly, larger steps take more of them.
_RETIMED_FACTOR = 4
# The largest steps with a form for many short chunks. Larger ones are of prompts, which come before drafts, so few of
# them have many.
_MAX_CROWDED_TOKENS = 1024
# A number of prompts that always fits a graph's map of chunks.
_MAX_TIMED_PROMPTS = 32


def mixed_buckets(max_tokens: int) -> list[int]:
    """Return numbers of tokens to capture. Padding is at most an eighth of a step, except for the smallest.

    With Qwen3-30B-A3B in FP8 on an H200, a step of 536 tokens takes 13 ms; padding to 640 costs .6 ms, to 576 .3 ms.
    """
    sizes = [16, 32, 48, *range(64, 1025, 64), *range(1152, 2049, 128), *range(2304, 4097, 256)]
    return [*(size for size in sizes if size < max_tokens), max_tokens]


def short_row_buckets(max_tokens: int) -> list[int]:
    """Return numbers of tokens to capture for steps of short rows, such as tokens and their drafts."""
    return [size for size in (2, 4, 8, 16, 24, 32) if size <= max_tokens]


class _Form(NamedTuple):
    """A graph's number of tokens, and whether it merges parts of contexts. That takes one more kernel in each layer.

    crowded: its map has room for any number of chunks. short: limits of the rows, if the graph is for steps of short
    rows and has no map of chunks. adapted: rows may have adapters.
    """

    bucket: int
    divided: bool = False
    crowded: bool = False
    short: ShortRows | None = None
    adapted: bool = False


_NO_CHUNKS = np.empty((0, CHUNK_FIELD_COUNT), dtype=np.int32)


class MixedGraphs:
    """Replays a captured graph for steps up to some number of tokens; passes other steps to `eager`.

    Steps with more small chunks than a graph supports are passed on, too. If rows have drafts, which makes them small
    chunks, there are graphs for any number of them. The graph ends with the hidden states; head and sampling follow for
    the rows that sample. The device holds which tokens belong to which row and which rows decode, so one graph serves
    every step of a bucket's size. Small steps whose rows are all short have graphs of their own, with fewer and faster
    kernels. Steps with adapters have a second set of all graphs.
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
        recorder: GraphRecorder,
        *,
        drafts: bool = False,
    ) -> None:
        """`agree`: return the least value among the processes that share the model, which must replay
        the same graphs. `drafts`: rows may have some.
        """
        self._eager = eager
        self._model = model
        self._attention = attention
        self._store = store
        self._inputs = inputs
        self._candidates = buckets
        self._agree = agree
        self._recorder = recorder
        self._drafts = drafts
        self._buckets: list[int] = []
        self._short: list[_Form] = []  # for steps of short rows, the smallest first
        self._graphs: dict[_Form, torch.cuda.CUDAGraph] = {}
        self._hidden: dict[_Form, torch.Tensor] = {}
        self._span: Span = unobserved

    def observe(self, span: Span) -> None:
        self._span = span
        self._eager.observe(span)

    @torch.inference_mode()
    def capture(self, pool: Any) -> None:
        """Record buckets from the smallest on, until a replay takes longer than is worth it; and the largest."""
        report("capturing CUDA graphs of mixed steps")
        launch_s, timed = 0.0, 0
        with self._different_tokens():
            for bucket in self._candidates[:-1]:
                form = _Form(bucket)
                self._record(form, pool)
                if bucket >= _RETIMED_FACTOR * timed:
                    launch_s, timed = max(launch_s, self._launch_seconds(bucket)), bucket
                if not self._agree(self._replay_seconds(form) <= MAX_REPLAY_LAUNCH_RATIO * launch_s):
                    del self._graphs[form], self._hidden[form]
                    break
                self._buckets.append(bucket)
        full = self._candidates[-1]
        self._record(_Form(full), pool)
        if self._buckets == self._candidates[:-1]:
            self._buckets.append(full)
        for bucket in {*self._buckets, full}:
            if self._attention.may_divide(bucket):
                self._record(_Form(bucket, divided=True), pool)
            crowded = _Form(bucket, crowded=True)
            if self._drafts and bucket <= _MAX_CROWDED_TOKENS and self._room(crowded) > self._room(_Form(bucket)):
                self._record(crowded, pool)
        for bucket in short_row_buckets(full):
            form = _Form(bucket, short=self._attention.short_rows(bucket))
            if form.short is not None:
                self._record(form, pool)
                self._short.append(form)
        if self._inputs.has_adapters:
            for form in list(self._graphs):
                self._record(form._replace(adapted=True), pool)

    def run(self, columns: Columns, staged: Callable[[], None] = nothing) -> Forwarded:
        num_tokens = sum(columns.count)
        short = self._short_form(columns, num_tokens)
        if short is not None:
            return self._replay(short, columns, _NO_CHUNKS, 0, staged)
        bucket = self._bucket(num_tokens)
        if bucket is None or not self._inputs.fits_states(columns, bucket):
            return self._eager.run(columns, staged)
        chunk_map = self._map(columns, bucket)
        form = _Form(bucket, self._attention.is_divided(chunk_map))
        if len(chunk_map) > self._room(form):
            form = _Form(bucket, crowded=True)
            if form not in self._graphs:
                return self._eager.run(columns, staged)
        return self._replay(form, columns, chunk_map, self._room(form), staged)

    def _replay(
        self, form: "_Form", columns: Columns, chunk_map: np.ndarray, room: int, staged: Callable[[], None]
    ) -> Forwarded:
        form = form._replace(adapted=self._inputs.adapted(columns))
        with self._span("prepare"):
            found = self._inputs.stage_mixed(columns, form.bucket, chunk_map, room)
        staged()
        self._graphs[form].replay()
        return Forwarded(hidden=self._hidden[form].index_select(0, found.logits_at), sample_at=found.sample_at)

    def _short_form(self, columns: Columns, num_tokens: int) -> "_Form | None":
        """Return the graph for a step of short rows; None for other steps."""
        if not self._short or num_tokens > self._short[-1].bucket:
            return None
        form = next(form for form in self._short if form.bucket >= num_tokens)
        assert form.short is not None
        rows, tokens = form.short
        fits = len(columns.count) <= rows and max(columns.count) <= tokens
        return form if fits and self._inputs.fits_states(columns, form.bucket) else None

    def _bucket(self, num_tokens: int) -> int | None:
        """Return the graph for a step of `num_tokens`; None for an eager step.

        Under load, steps use up their budget. The graph of that size needs no padding, so it is always worth it.
        """
        if num_tokens == self._candidates[-1] and _Form(num_tokens) in self._graphs:
            return num_tokens
        if not self._buckets or num_tokens > self._buckets[-1]:
            return None
        return self._buckets[bisect_left(self._buckets, num_tokens)]

    def _map(self, columns: Columns, bucket: int) -> np.ndarray:
        first = columns.num_decodes
        counts = columns.count[first:]
        contexts = list(map(add, columns.start[first:], counts))
        room = self._room(_Form(bucket, self._attention.may_divide(bucket)))
        return self._attention.map_chunks(bucket, first, counts, contexts, room)

    def _room(self, form: "_Form") -> int:
        rows = min(form.bucket, self._inputs.max_rows)
        return self._attention.max_chunks(form.bucket, rows, form.divided, form.crowded)

    def _record(self, form: "_Form", pool: Any) -> None:
        padding = Columns.of([])
        if form.short is not None:
            self._inputs.stage_mixed(padding, form.bucket, _NO_CHUNKS, 0)
        else:
            self._inputs.stage_mixed(padding, form.bucket, self._map(padding, form.bucket), self._room(form))
        self._graphs[form], self._hidden[form] = self._recorder.record(partial(self._launch, form), pool)

    def _launch(self, form: "_Form") -> torch.Tensor:
        if form.short is not None:
            batch = self._inputs.short_row_batch(form.bucket, form.short, form.adapted)
        else:
            batch = self._inputs.mixed_batch(form.bucket, self._room(form), form.divided, form.adapted)
        self._attention.begin(batch, self._store)
        return self._model.forward(batch, self._attention)

    def _launch_seconds(self, bucket: int) -> float:
        """Return the host's time to launch a full bucket kernel by kernel; no K/V is written.

        It has prompts and, if there is room, a decoding row, which has kernels of its own.
        """
        decoding = [1] if self._inputs.max_rows > 1 else []
        prompts = self._prompts(bucket - len(decoding))
        step = self._rows([*decoding, *prompts][: self._inputs.max_rows])
        return self._recorder.launch_seconds(lambda: self._eager.run(step))

    def _replay_seconds(self, form: "_Form") -> float:
        """Return the device time of one replay of a full bucket.

        It replays prompts, since padding tokens are all equal and would read only a few of a model's experts.
        """
        self._stage_prompts(form)
        return self._recorder.replay_seconds(self._graphs[form])

    def _stage_prompts(self, form: "_Form") -> None:
        """Stage the prompts that fill a bucket; no K/V is written."""
        columns = self._rows(self._prompts(form.bucket))
        self._inputs.stage_mixed(columns, form.bucket, self._map(columns, form.bucket), self._room(form))

    def _prompts(self, tokens: int) -> list[int]:
        """Return lengths of prompts with so many tokens in all, as far as a step has room for them."""
        longest, rows = self._inputs.seats.max_model_len, min(self._inputs.max_rows, _MAX_TIMED_PROMPTS)
        return [min(longest, tokens - start) for start in range(0, tokens, longest)[:rows]]

    def _rows(self, counts: list[int]) -> Columns:
        """Return rows of the spare seat's tokens from position 0 on."""
        spare = self._inputs.seats.spare
        return Columns.of([Row("spare", spare, 0, count, 1, True, count, 0, ()) for count in counts])

    @contextmanager
    def _different_tokens(self) -> Iterator[None]:
        """Fill the spare seat with random tokens, equal in all processes, and zero it at the end."""
        seats = self._inputs.seats
        generator = torch.Generator().manual_seed(0)
        drawn = torch.randint(seats.vocab_size, seats.tokens.shape[1:], generator=generator, dtype=torch.int32)
        seats.tokens[seats.spare] = drawn.to(seats.device)
        try:
            yield
        finally:
            seats.tokens[seats.spare] = 0
