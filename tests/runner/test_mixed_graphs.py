"""Choice of the steps that `MixedGraphs` replays, and what it stages for them. The graphs are fakes."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from roseinfer.attention.base import ShortRows
from roseinfer.core.plan import Row
from roseinfer.kernels.common.inputs import expand_rows_reference
from roseinfer.runner import cuda_inputs
from roseinfer.runner.cuda_inputs import CudaInputs
from roseinfer.runner.forward import Columns, Forwarded
from roseinfer.runner.mixed_graphs import MixedGraphs
from roseinfer.runner.seats import SeatTable
from tests.runner.fake_graphs import FakeRecorder
from tests.runner.test_cuda_inputs import HostStaging

ROOM, DIVIDED_ROOM = 3, 5
LONG_CONTEXT = 1000
EAGER = Forwarded(hidden=torch.zeros(0))


class Attention:
    """Fake backend with a map entry for each chunk row: its row and its context; room for three, if not crowded.

    divides: contexts of `LONG_CONTEXT` tokens are divided, in steps of fewer than 64 tokens. queries: the most tokens
    of a row in steps without a map.
    """

    def __init__(self, divides: bool, queries: int) -> None:
        self.divides, self.queries = divides, queries
        self.mapped: list[int] = []

    def map_chunks(self, tokens, first_row, query_lens, context_lens, room):
        self.mapped.append(tokens)
        assert len(query_lens) == len(context_lens) and room == self.max_chunks(tokens, 1, self.may_divide(tokens))
        return np.array([[first_row + i, context] for i, context in enumerate(context_lens)], np.int32).reshape(-1, 2)

    def max_chunks(self, tokens, rows, divided, crowded=False):
        return tokens // 2 if crowded else DIVIDED_ROOM if divided else ROOM

    def may_divide(self, tokens):
        return self.divides and tokens < 64

    def is_divided(self, chunk_map):
        return self.divides and bool((chunk_map[:, 1] >= LONG_CONTEXT).any())

    def short_rows(self, tokens):
        return ShortRows(3, min(self.queries, tokens)) if self.queries > 1 and tokens <= 16 else None


class Inputs:
    max_rows = 64
    adapted_seat: int | None = None

    @property
    def has_adapters(self):
        return self.adapted_seat is not None

    def adapted(self, columns):
        return self.adapted_seat in columns.seat

    def __init__(self) -> None:
        self.seats = SeatTable(2, 64, 4, 50, torch.device("cpu"))
        self.staged: list[tuple[int, list[list[int]], int]] = []
        self.full: set[int] = set()  # graphs without room for the step's states

    def fits_states(self, columns, bucket):
        return bucket not in self.full

    def stage_mixed(self, columns, bucket, chunk_map, chunks):
        self.staged.append((bucket, chunk_map.tolist(), chunks))
        return SimpleNamespace(logits_at=torch.tensor([sum(columns.count) - 1]), sample_at=None)


class Bench:
    """Captured graphs of some numbers of tokens, as far as `agree` lets them be captured."""

    def __init__(
        self,
        buckets: Sequence[int] = (16, 64),
        agree: Callable[[int], int] = int,
        divides: bool = False,
        queries: int = 1,
        adapted_seat: int | None = None,
        max_rows: int = 64,
        drafts: bool = False,
    ) -> None:
        self.attention, self.inputs = Attention(divides, queries), Inputs()
        self.inputs.max_rows = max_rows
        self.inputs.adapted_seat = adapted_seat
        self.launched: list[int] = []
        eager = SimpleNamespace(run=self.launch)
        self.recorder = FakeRecorder([torch.arange(max(buckets))[:, None]] * (2 * (2 * len(buckets) + 4)))
        attention, inputs, recorder = self.attention, self.inputs, self.recorder
        self.graphs = MixedGraphs(eager, None, attention, None, inputs, list(buckets), agree, recorder, drafts=drafts)
        self.graphs.capture(None)
        self.attention.mapped.clear()
        self.inputs.staged.clear()
        for graph in self.recorder.graphs:
            graph.replays = 0

    def run(self, *rows: tuple[int, int]) -> Forwarded:
        """Run a step. `rows`: start and count of each."""
        return self.graphs.run(
            Columns.of([Row(f"r{i}", i, start, count, 1, True, start, 0, ()) for i, (start, count) in enumerate(rows)])
        )

    def launch(self, columns, staged=None):
        self.launched.append(sum(columns.count))
        return EAGER

    def replays(self) -> list[int]:
        return [graph.replays for graph in self.recorder.graphs]


def test_a_step_is_padded_to_the_next_bucket_and_mapped_once_for_it():
    bench = Bench()
    done = bench.run((8, 1), (0, 20), (5, 1), (30, 2))
    assert bench.replays() == [0, 1] and bench.attention.mapped == [64]
    assert bench.inputs.staged == [(64, [[2, 20], [3, 32]], ROOM)]
    assert done.hidden.tolist() == [[23]]


def test_a_step_without_room_for_its_states_runs_eagerly():
    bench = Bench(queries=2)
    bench.inputs.full = {4, 16}
    assert bench.run((8, 1), (30, 2)) is EAGER
    bench.inputs.full = set()
    assert bench.run((8, 1), (30, 2)) is not EAGER


def test_a_step_with_too_many_chunks_runs_eagerly():
    bench = Bench()
    bench.run((8, 1), *[(0, 2)] * ROOM)
    assert bench.replays() == [1, 0]
    assert bench.run((8, 1), *[(0, 2)] * (ROOM + 1)) is EAGER
    assert bench.replays() == [1, 0] and len(bench.inputs.staged) == 1


def test_rows_with_drafts_are_replayed_however_many_they_are():
    bench = Bench(drafts=True)
    for rows in (ROOM, ROOM + 1, 7):
        assert bench.run((8, 1), *[(0, 2)] * rows) is not EAGER
    assert [room for _, _, room in bench.inputs.staged] == [ROOM, 8, 8]
    assert sum(bench.replays()) == 3


def test_a_step_is_timed_from_when_it_is_staged_and_its_graph_is_next():
    bench, seen = Bench(), list[tuple[int, list[int]]]()
    columns = Columns.of([Row("r", 0, 0, 20, 1, True, 0, 0, ())])
    bench.graphs.run(columns, lambda: seen.append((len(bench.inputs.staged), bench.replays())))
    assert seen == [(1, [0, 0])] and bench.replays() == [0, 1]


def test_large_steps_have_no_graph_for_many_chunks():
    bench = Bench([1024, 2048], drafts=True)
    assert bench.run((8, 1000), *[(0, 2)] * ROOM) is not EAGER
    assert bench.run((8, 1500), *[(0, 2)] * ROOM) is EAGER


def test_a_step_with_divided_contexts_has_a_graph_of_its_own():
    bench = Bench([16, 32, 64], divides=True)
    assert len(bench.recorder.graphs) == 5, "those of 16 and 32 tokens in both forms"
    bench.run((8, 1), (LONG_CONTEXT, 2))
    bench.run((8, 1), (LONG_CONTEXT - 8, 2))
    undivided, divided = bench.inputs.staged[1], bench.inputs.staged[0]
    assert divided == (16, [[1, LONG_CONTEXT + 2]], DIVIDED_ROOM) and undivided[2] == ROOM
    assert sorted(bench.replays()) == [0, 0, 0, 1, 1]
    bench.run((8, 1), *[(LONG_CONTEXT, 2)] * DIVIDED_ROOM)
    assert sorted(bench.replays()) == [0, 0, 0, 1, 2], "more chunks fit with parts"


def test_short_rows_have_graphs_of_their_own():
    bench = Bench([16, 64], queries=4)
    assert len(bench.recorder.graphs) == 6, "two mixed ones, and those of 2, 4, 8 and 16 tokens"
    assert bench.run((8, 1), (30, 4), (0, 3)).hidden.tolist() == [[7]]
    bench.run((9, 2))
    assert bench.replays() == [0, 0, 1, 0, 1, 0] and not bench.attention.mapped
    assert bench.inputs.staged == [(8, [], 0), (2, [], 0)]
    bench.run((8, 1), (30, 5))
    bench.run(*[(8, 1)] * 4)
    bench.run(*[(8, 6)] * ROOM)
    assert bench.replays() == [2, 1, 1, 0, 1, 0], "too long a row, too many rows, too many tokens"


def test_steps_with_adapters_have_graphs_of_their_own():
    bench = Bench(queries=4, adapted_seat=1)
    forms = len(bench.replays()) // 2
    bench.run((8, 1))
    bench.run((0, 20))
    bench.run((8, 1), (30, 1))
    bench.run((0, 20), (30, 2))
    replays = bench.replays()
    assert sum(replays[:forms]) == 2 and replays[:forms] == replays[forms:]


def test_a_step_of_more_tokens_than_the_largest_bucket_runs_eagerly():
    bench = Bench()
    assert bench.run((0, 65)) is EAGER
    assert bench.replays() == [0, 0] and not bench.attention.mapped


def test_ranks_stop_capturing_where_any_of_them_does():
    """Let each rank time its own replays: a graph that only one rank replays would wait for the others forever."""
    others = [True, False]
    bench = Bench([16, 32, 48, 64], lambda worth: min(worth, others.pop(0)))
    assert not others and len(bench.recorder.graphs) == 3, "16, 32 (dropped) and the largest"
    assert bench.run((0, 10)) is not EAGER and bench.run((0, 64)) is not EAGER
    assert bench.run((0, 20)) is EAGER and bench.run((0, 40)) is EAGER and bench.run((0, 60)) is EAGER
    assert bench.replays() == [1, 0, 1]


def test_launches_are_timed_in_prompts_of_each_size():
    assert Bench([16, 32, 48, 64, 256]).launched == [16, 64]
    assert Bench([64, 128, 192, 320, 512]).launched == [64, 320]
    assert Bench([16, 64], max_rows=1).launched == [16], "a prompt"


def test_a_replay_is_timed_with_tokens_that_choose_different_experts(monkeypatch: pytest.MonkeyPatch):
    """Inspect what the graph would read: whole prompts up to the bucket, with different tokens."""
    monkeypatch.setattr(cuda_inputs, "Staging", HostStaging)
    monkeypatch.setattr(cuda_inputs, "expand_rows", expand_rows_reference)
    seats = SeatTable(8, 24, 4, 50, torch.device("cpu"))
    inputs, read = CudaInputs(seats, 8, 64), {}
    attention = SimpleNamespace(
        max_chunks=lambda tokens, rows, divided, crowded: 8,
        map_chunks=map_chunks,
        may_divide=lambda tokens: False,
        short_rows=lambda tokens: None,
    )

    def look(number: int) -> None:
        bucket = [16, 56][number]
        batch = inputs.mixed_batch(bucket, 8)
        prompts = int(batch.context_len.gt(0).sum())
        read[bucket] = (batch.context_len[:prompts].tolist(), batch.input_ids.unique().numel())
        assert batch.paging[0].slots.eq(-1).all(), "no K/V is written"
        assert batch.chunk_map is not None and int(batch.chunk_map[:, 0].ge(0).sum()) == prompts

    recorder = FakeRecorder([torch.empty(0)] * 3, on_replay=look)
    eager = SimpleNamespace(run=lambda columns, staged=None: EAGER)
    MixedGraphs(eager, None, attention, None, inputs, [16, 56, 64], int, recorder).capture(None)
    assert [contexts for contexts, _ in read.values()] == [[16], [24, 24, 8]]
    assert all(different > 10 for _, different in read.values())
    assert seats.tokens.eq(0).all(), "padding is as it was"


def map_chunks(tokens, first_row, query_lens, context_lens, room):
    return np.array([[first_row + i, 0, 0, 1] for i in range(len(query_lens))], np.int32)
