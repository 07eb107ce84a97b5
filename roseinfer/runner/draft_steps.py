"""Drafts of a model's head after a step: a few small forward passes, each of one token for some seats."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from roseinfer.attention.base import AttentionBackend
from roseinfer.attention.kv_store import KVStore
from roseinfer.core.plan import HeadDrafts, StepPlan
from roseinfer.models.eagle.model import DraftingModel
from roseinfer.models.step import StepContext
from roseinfer.runner.device import start_download, upload
from roseinfer.runner.forward import Columns, decode_batch
from roseinfer.runner.sampler import Sampler
from roseinfer.runner.seats import MIN_TEMPERATURE, SeatTable


class DraftingRow(NamedTuple):
    """Row of a plan that samples. `number`: its index in the plan. `first`: the packed token that its first sample
    follows. `sample`: number of that sample in the step. `end`: the sample's position. `ahead`: drafts to make.
    """

    number: int
    seat: int
    first: int
    sample: int
    end: int
    drafts: tuple[int, ...]
    ahead: int


@dataclass(frozen=True, slots=True)
class MadeDrafts:
    """Drafts of some rows of a plan, on the device or on the host.

    rows: their numbers in the plan. counts: drafts of each, not ascending. tokens: [n, most] int64; chances: the same
    in float32.
    """

    rows: list[int]
    counts: list[int]
    tokens: torch.Tensor
    chances: torch.Tensor

    def download(self) -> "MadeDrafts":
        return MadeDrafts(self.rows, self.counts, start_download(self.tokens), start_download(self.chances))

    def of_rows(self, num_rows: int) -> list[HeadDrafts]:
        """Return `StepResult.ahead`."""
        found = [HeadDrafts((), ())] * num_rows
        values = zip(self.rows, self.counts, self.tokens.tolist(), self.chances.tolist(), strict=True)
        for row, count, tokens, chances in values:
            found[row] = HeadDrafts(tuple(tokens[:count]), tuple(chances[:count]))
        return found


class HeadSteps(Protocol):
    """Draft steps of one runner's head."""

    def admit(self, seats: list[int]) -> None:
        """Forget the states of earlier requests in these seats."""
        ...

    def run(self, plan: StepPlan, columns: Columns, sampled: torch.Tensor) -> MadeDrafts | None:
        """Make the drafts that the plan asks for, after its rows have `sampled` tokens [n], as `Samples` orders them.

        Without any, only note which state is each seat's last. columns: of the plan's rows.
        """
        ...


class DraftSteps:
    """Draft steps of one runner, over its seats and its KV store, launched operation by operation."""

    def __init__(self, model: DraftingModel, attention: AttentionBackend, store: KVStore, seats: SeatTable) -> None:
        self._model, self._head = model, model.head
        self._attention, self._store = attention, store
        self._seats = seats
        self._sampler = Sampler(seats)

    def admit(self, seats: list[int]) -> None:
        """Forget the states of earlier requests in these seats."""
        self._model.admit(upload(seats, torch.int64, self._seats.device))

    def run(self, plan: StepPlan, columns: Columns, sampled: torch.Tensor) -> MadeDrafts | None:
        """Make drafts as `HeadSteps.run` does."""
        rows = drafting_rows(plan, columns)
        if not rows:
            return None
        layout = [[row.seat, row.first, row.sample, row.end] for row in rows]
        seat, first, sample, end = upload(layout, torch.int64, sampled.device).unbind(1)
        right = self._count_right(rows, sample, sampled)
        states = self._model.states.index_select(0, first + right)
        if plan.num_drafts:
            self._model.end_at(seat, states)
        rows = [row for row in rows if row.ahead]
        if not rows:
            return None
        newest = sampled.index_select(0, sample + right).clamp_min_(0)  # a failed row's is negative
        return self._draft(rows, seat, end + right, newest, states)

    def _count_right(self, rows: list[DraftingRow], sample: torch.Tensor, sampled: torch.Tensor) -> torch.Tensor:
        """Return how many leading drafts of each row were right, [n] int64. sample: of the rows, [n]."""
        most = max(len(row.drafts) for row in rows)
        if not most:
            return torch.zeros_like(sample)
        drafts = [[*row.drafts, *[-1] * (most - len(row.drafts))] for row in rows]
        wanted = upload(drafts, torch.int64, sampled.device)
        places = sample[:, None] + torch.arange(most, device=sampled.device)
        found = sampled[places.clamp_max_(len(sampled) - 1)]
        # A place without a draft counts as wrong, even if a failed sample looks like it.
        return ((found == wanted) & (wanted >= 0)).long().cumprod(1).sum(1)

    def _draft(
        self,
        rows: list[DraftingRow],
        seat: torch.Tensor,
        position: torch.Tensor,
        token: torch.Tensor,
        states: torch.Tensor,
    ) -> MadeDrafts:
        """Draft after the newest tokens of some rows, which come first in all arguments, the most drafts first.

        position, token: those of the newest tokens. states: of the tokens before them.
        """
        head, counts, device = self._head, [row.ahead for row in rows], token.device
        tokens = torch.zeros((len(rows), counts[0]), dtype=torch.int64, device=device)
        chances = torch.zeros(tokens.shape, dtype=torch.float32, device=device)
        contexts = self._contexts(rows, position)
        for step in range(counts[0]):
            n = sum(count > step for count in counts)
            seat, position, token, states = seat[:n], position[:n], token[:n], states[:n]
            x, logits = self.forward(seat, position, token, states, [context + step for context in contexts[:n]])
            position, logits = position + 1, logits.float()
            drafted = self._sampler.draft(logits, [row.seat for row in rows[:n]], seat, position)
            chances[:n, step] = self._chances(logits, drafted, seat)
            token, states = head.target_ids.index_select(0, drafted), head.next_states(x)
            tokens[:n, step] = token
        return MadeDrafts([row.number for row in rows], counts, tokens, chances)

    def forward(
        self,
        seat: torch.Tensor,
        position: torch.Tensor,
        token: torch.Tensor,
        states: torch.Tensor,
        contexts: list[int],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Launch a draft step of one token for each of n seats. Return the head's results and logits.

        seat, position, token: [n] int64. states: [n, hidden], which may be overwritten. contexts: lengths on the host.
        """
        batch = decode_batch(self._seats, seat, position, token, contexts)
        self._attention.begin(batch, self._store)
        x = self._head.forward(token, states, StepContext(batch, self._attention))
        return x, self._head.logits(x)

    def _contexts(self, rows: list[DraftingRow], position: torch.Tensor) -> list[int]:
        """Return the rows' contexts in the first draft step. A GPU is not waited for: they are upper bounds there."""
        if position.is_cuda:
            return [row.end + len(row.drafts) + 1 for row in rows]
        return (position[: len(rows)] + 1).tolist()

    def _chances(self, logits: torch.Tensor, drafted: torch.Tensor, seat: torch.Tensor) -> torch.Tensor:
        """Return the head's probability of each drafted token at the request's temperature, or at 1 if it is greedy."""
        temperature = self._seats.settings[:, 0].index_select(0, seat)
        temperature = torch.where(temperature <= MIN_TEMPERATURE, 1.0, temperature).float()
        scaled = logits / temperature[:, None]
        return (scaled.gather(1, drafted[:, None]).squeeze(1) - scaled.logsumexp(-1)).exp()


def drafting_rows(plan: StepPlan, columns: Columns) -> list[DraftingRow]:
    """Return the rows that sample, those with the most drafts to make first; none in a plan without drafts."""
    if not (plan.num_drafts or plan.ahead):
        return []
    return sorted(_sampling_rows(columns, plan.ahead), key=lambda row: -row.ahead)


def _sampling_rows(columns: Columns, ahead: tuple[int, ...]) -> Iterator[DraftingRow]:
    """Yield the rows that sample, in the order of the columns. `ahead`: as in `StepPlan`."""
    tokens = samples = 0
    fields = (columns.order, columns.seat, columns.start, columns.count, columns.sample, columns.drafts)
    for number, seat, start, count, sample, drafts in zip(*fields, strict=True):
        tokens += count
        if sample:
            first, end = tokens - 1 - len(drafts), start + count - len(drafts)
            yield DraftingRow(number, seat, first, samples, end, drafts, ahead[number] if ahead else 0)
            samples += 1 + len(drafts)
