"""Choice of the steps that `DecodeGraphs` replays, and calls to the backend before a replay. The graphs are fakes."""

from types import SimpleNamespace

import pytest
import torch

from roseinfer.core.plan import Row
from roseinfer.runner.cuda_graphs import DecodeGraphs, decode_buckets
from roseinfer.runner.forward import Columns, Forwarded
from tests.runner.fake_graphs import FakeRecorder

OTHERS = Forwarded(hidden=torch.zeros(0))


class Bench:
    """Graphs of 1, 2 and 4 rows; `calls` lists their calls in order. adapted_seat: if there are adapters."""

    def __init__(self, adapted_seat: int | None = None) -> None:
        self.calls: list[tuple[object, ...]] = []
        model = SimpleNamespace(
            padded_vocab=8, dtype=torch.float32, device=torch.device("cpu"), spec=SimpleNamespace(vocab_size=7)
        )
        inputs = SimpleNamespace(
            stage_decodes=lambda columns, bucket: self.calls.append(("stage", bucket)),
            has_adapters=adapted_seat is not None,
            adapted=lambda columns: adapted_seat in columns.seat,
        )
        others = SimpleNamespace(run=lambda columns, staged: OTHERS)
        largest_first = (4, 2, 1) if adapted_seat is None else (4, "4 adapted", 2, "2 adapted", 1, "1 adapted")
        recorder = FakeRecorder(
            [torch.tensor([5, 6, 7, 8]), *[None] * 5],
            on_replay=lambda number: self.calls.append(("replay", largest_first[number])),
        )
        self.graphs = DecodeGraphs(others, model, None, None, inputs, [1, 2, 4], SimpleNamespace(), recorder)
        self.graphs.capture(None)
        self.calls.clear()

    def run(self, *rows: tuple[int, int]) -> Forwarded:
        """Run a step. `rows`: start and count of each."""
        made = [Row(f"r{i}", i, start, count, 1, True, start, 0, ()) for i, (start, count) in enumerate(rows)]
        return self.graphs.run(Columns.of(made))


def test_a_step_replays_the_smallest_graph_that_holds_its_rows() -> None:
    bench = Bench()
    done = bench.run((8, 1), (30, 1), (5, 1))
    assert bench.calls == [("stage", 4), ("replay", 4)]
    assert done.logits is not None and done.logits.shape == (3, 7)
    assert done.greedy is not None and done.greedy.tolist() == [5, 6, 7]


def test_a_graph_of_many_rows_chooses_no_tokens() -> None:
    assert Bench().run((8, 1), (30, 1)).greedy is None


def test_steps_with_adapters_have_graphs_of_their_own() -> None:
    bench = Bench(adapted_seat=1)
    assert bench.run((8, 1)).greedy is None and bench.run((8, 1), (30, 1), (5, 1)).greedy is None
    assert bench.calls == [("stage", 1), ("replay", 1), ("stage", 4), ("replay", "4 adapted")]


@pytest.mark.parametrize("rows", [[(8, 1), (0, 3)], [(1, 1)] * 5])
def test_other_steps_are_passed_on(rows: list[tuple[int, int]]) -> None:
    bench = Bench()
    assert bench.run(*rows) is OTHERS and not bench.calls


@pytest.mark.parametrize("max_rows", [1, 3, 8, 20, 256, 1000])
@pytest.mark.parametrize("costly_padding", [False, True])
def test_buckets_ascend_to_the_most_rows(max_rows: int, costly_padding: bool) -> None:
    buckets = decode_buckets(max_rows, costly_padding=costly_padding)
    assert buckets == sorted(set(buckets)) and buckets[0] == 1 and buckets[-1] == max_rows


def test_no_step_of_few_rows_is_padded_where_that_is_costly() -> None:
    assert decode_buckets(256, costly_padding=True)[:9] == [1, 2, 3, 4, 5, 6, 7, 8, 16]
    assert decode_buckets(256)[:5] == [1, 2, 4, 8, 16]
