"""Draft steps by kernels compared with draft steps by PyTorch, for a head that is easy to read."""

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from roseinfer.attention.batch import ForwardBatch
from roseinfer.core.plan import Admission, Row, StepPlan
from roseinfer.core.sampling import SequenceParams
from roseinfer.models.step import StepContext
from roseinfer.runner.cuda_draft_steps import CudaDraftSteps, draft_buckets
from roseinfer.runner.draft_steps import DraftSteps
from roseinfer.runner.forward import Columns
from roseinfer.runner.seats import SeatTable
from tests.helpers.interpreter import hurry
from tests.runner.fake_graphs import FakeRecorder

pytest.importorskip("triton")
SEATS, LENGTH, BLOCK_SIZE, HIDDEN, VOCAB, WIDTH = 5, 64, 4, 8, 90, 40
PARAMS = (
    SequenceParams(max_tokens=9, temperature=0.0),
    SequenceParams(max_tokens=9, temperature=0.7),
    SequenceParams(max_tokens=9, temperature=1.0, top_k=7, top_p=0.9),
)


@pytest.fixture(autouse=True)
def _interpreter() -> None:
    hurry()


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Seen:
    """Attention that notes the rows of each step which belong to a request: seat, position, slot, context."""

    def __init__(self, spare: int) -> None:
        self.rows: list[set[tuple[int, ...]]] = []
        self._spare = spare

    def begin(self, batch: ForwardBatch, store: Any) -> None:
        parts = (batch.table_rows, batch.positions, batch.paging[0].slots, batch.context_len)
        found = zip(*(part.tolist() for part in parts), strict=True)
        self.rows.append({row for row in found if row[0] != self._spare})


class Head:
    """Head whose result depends on the token, the state and the position."""

    def __init__(self, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(1)
        self.spec = SimpleNamespace(hidden_size=HIDDEN)
        self.target_ids = (torch.arange(WIDTH) * 2 + 1).to(device)
        self._embedding = torch.randn(VOCAB, HIDDEN, generator=generator).to(device)
        self._out = torch.randn(HIDDEN, WIDTH, generator=generator).to(device)

    def forward(self, token: torch.Tensor, states: torch.Tensor, step: StepContext) -> torch.Tensor:
        return torch.tanh(self._embedding[token] + 0.5 * states + 0.1 * step.batch.positions[:, None])

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self._out

    def next_states(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Model:
    def __init__(self, device: torch.device) -> None:
        self.head, self.device, self.dtype = Head(device), device, torch.float32
        self.states = torch.zeros(40, HIDDEN, device=device)
        self.last = torch.zeros(SEATS + 1, HIDDEN, device=device)

    def admit(self, seats: torch.Tensor) -> None:
        self.last.index_fill_(0, seats, 0)

    def end_at(self, seats: torch.Tensor, states: torch.Tensor) -> None:
        self.last.index_copy_(0, seats, states)


class Side:
    """Draft steps of one kind, with seats of their own."""

    def __init__(self, device: torch.device, *, kernels: bool, recorder: Any = None) -> None:
        self.seats = SeatTable(SEATS, LENGTH, BLOCK_SIZE, VOCAB, device, spare_blocks=(99,))
        self.seats.admit(
            [
                Admission(f"{i}", i, [1, 2, 3], 3, PARAMS[i % 3], i, (), tuple(range(16 * i, 16 * i + 16)))
                for i in range(SEATS)
            ]
        )
        self.model, self.seen = Model(device), Seen(self.seats.spare)
        parts: tuple[Any, ...] = (self.model, self.seen, None, self.seats)
        more = (SEATS, 4, recorder) if kernels else ()
        self.steps: Any = (CudaDraftSteps if kernels else DraftSteps)(*parts, *more)

    def run(self, plan: StepPlan, states: torch.Tensor, sampled: torch.Tensor) -> Any:
        self.model.states.copy_(states)
        self.seen.rows.clear()
        made = self.steps.run(plan, Columns.of(plan.rows), sampled)
        if made is None:
            return None
        downloaded = made.download()
        if sampled.is_cuda:
            torch.cuda.synchronize()
        return downloaded.of_rows(len(plan.rows))


def random_step(rng: random.Random) -> tuple[StepPlan, list[int]]:
    """Return a plan with drafts and chunks, and its samples."""
    rows, sampled, ahead = [], [], []
    for seat in rng.sample(range(SEATS), rng.randint(1, SEATS)):
        drafts = tuple(rng.choices(range(VOCAB), k=rng.choice((0, 0, 1, 3))))
        count, sample = rng.choice((1, 1, 4)) + len(drafts), bool(drafts) or rng.random() < 0.8
        rows.append(Row(f"{seat}", seat, rng.randint(3, 30), count, 1 + len(drafts), sample, 0, 0, (), drafts))
        ahead.append(rng.randint(0, 4) if sample else 0)
    for place in Columns.of(rows).order:
        row = rows[place]
        if row.sample:
            right = rng.randint(0, len(row.drafts))
            sampled += [*row.drafts[:right], *rng.choices(range(VOCAB), k=1 + len(row.drafts) - right)]
    plan = StepPlan(0, rows, num_tokens=sum(row.count for row in rows), num_drafts=sum(len(row.drafts) for row in rows))
    plan.ahead = tuple(ahead) if any(ahead) else ()
    return plan, sampled


def test_kernels_draft_as_operations_do(device: torch.device) -> None:
    ours, theirs = Side(device, kernels=True), Side(device, kernels=False)
    rng, seen = random.Random(2), 0
    pool = ours.seats.tokens.clone()
    for _ in range(12):
        plan, sampled = random_step(rng)
        states, tokens = torch.randn(40, HIDDEN, device=device), torch.tensor(sampled, device=device)
        if not sampled:
            continue
        found, expected = ours.run(plan, states, tokens), theirs.run(plan, states, tokens)
        assert (found is None) == (expected is None)
        assert [own.token_ids for own in found or ()] == [own.token_ids for own in expected or ()]
        for own, other in zip(found or (), expected or (), strict=True):
            assert own.chances == pytest.approx(other.chances, abs=1e-4)
            seen += len(own.token_ids)
        assert ours.seen.rows == theirs.seen.rows, "the same places of K and V are written"
        if plan.num_drafts:  # a forward pass has set those of rows without
            torch.testing.assert_close(ours.model.last[:SEATS], theirs.model.last[:SEATS])
        theirs.model.last.copy_(ours.model.last)
    assert seen > 20
    assert torch.equal(ours.seats.tokens, pool), "drafts are no tokens of the requests"


def test_a_graph_is_replayed_for_each_draft_of_the_longest_chain(device: torch.device) -> None:
    replays: list[int] = []
    recorder = FakeRecorder(iter([None] * 99), replays.append)
    side = Side(device, kernels=True, recorder=recorder)
    side.steps.capture(None)
    kinds = 3
    assert len(recorder.graphs) == kinds * len(draft_buckets(SEATS)) and not replays
    rows = [Row(f"{seat}", seat, 5, 1, 1, True, 5, 0, ()) for seat in (0, 3)]  # greedy ones
    plan = StepPlan(0, rows, num_tokens=2)
    plan.ahead = (1, 4)
    side.run(plan, torch.zeros(40, HIDDEN, device=device), torch.tensor([7, 8], device=device))
    order = [5, 4, 2, 1]  # the largest first
    assert draft_buckets(SEATS) == sorted(order)
    assert replays == [kinds * order.index(2)] * 4
