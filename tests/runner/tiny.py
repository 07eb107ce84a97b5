"""One-layer attention model small enough to read, and a runner around it that tests drive by hand."""

from collections.abc import Callable

import torch

from roseinfer.attention.batch import ForwardBatch
from roseinfer.attention.host_store import HostStore
from roseinfer.attention.kv_store import KVStore
from roseinfer.core.plan import Admission, BlockCopy, HostCopy, Row, StepLimits, StepPlan, StepResult
from roseinfer.core.sampling import SequenceParams
from roseinfer.runner.forward import EagerForward, PreparedBatch, build_batch
from roseinfer.runner.host_copies import Copier, CpuCopier
from roseinfer.runner.model_runner import ModelRunner
from roseinfer.runner.seats import SeatTable
from tests.helpers.attention import store_of

VOCAB, DIM = 23, 8
BAD_TOKEN = 22  # its embedding is NaN if the model is built with `bad`


class LoopAttention:
    """Causal attention, a row at a time. As in real kernels, slots after a row's context are not read, and those that a
    query does not see are multiplied by zero.
    """

    def begin(self, batch: ForwardBatch, store: KVStore) -> None:
        self._batch = batch
        self._store = store

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        batch, paging = self._batch, self._batch.paging[0]
        keys, values = self._store.layer(0)
        size = self._store.block_size
        written = paging.slots >= 0
        block, offset = paging.slots[written] // size, paging.slots[written] % size
        keys[block, offset, 0] = k[written]
        values[block, offset, 0] = v[written]
        out = []
        for r, (count, context) in enumerate(zip(batch.query_lens, batch.context_lens, strict=True)):
            table = paging.tables[batch.table_rows[r], : -(-context // size)].long()
            first = int(batch.query_start[r])
            position = batch.positions[first : first + count]
            scores = q[first : first + count] @ keys[table].reshape(-1, DIM)[:context].T
            visible = torch.arange(scores.shape[1]) <= position[:, None]
            weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
            out.append(weights @ values[table].reshape(-1, DIM)[:context])
        return torch.cat(out)


class TinyModel:
    """Model whose next-token logits depend on every token of the context and on its position."""

    def __init__(self, bad: bool = False) -> None:
        generator = torch.Generator().manual_seed(2)
        self.embedding = torch.randn(VOCAB, DIM, generator=generator)
        if bad:
            self.embedding[BAD_TOKEN] = torch.nan
        self.position = torch.randn(512, DIM, generator=generator)
        self.wq, self.wk, self.wv = torch.randn(3, DIM, DIM, generator=generator) / DIM**0.5
        self.head = torch.randn(DIM, VOCAB, generator=generator)
        self.batches: list[ForwardBatch] = []

    def forward(self, batch: ForwardBatch, attention: LoopAttention) -> torch.Tensor:
        self.batches.append(batch)
        hidden = self.embedding[batch.input_ids] + self.position[batch.positions]
        return hidden + attention.attend(hidden @ self.wq, hidden @ self.wk, hidden @ self.wv)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self.head


class Bench:
    """Runner with public parts, and plans made by hand. Blocks are given out in order and never reused."""

    def __init__(
        self,
        *,
        seats: int = 4,
        length: int = 64,
        block_size: int = 4,
        bad: bool = False,
        host_blocks: int = 0,
        copier_of: Callable[[KVStore, HostStore], Copier] = CpuCopier,
    ) -> None:
        blocks = seats * -(-length // block_size) + 8
        device = torch.device("cpu")
        self.model = TinyModel(bad)
        self.store = store_of(blocks, 1, block_size, 1, DIM, torch.float32, device)
        self.seats = SeatTable(seats, length, block_size, VOCAB, device)
        forward = EagerForward(
            self.model, LoopAttention(), self.store, lambda columns: PreparedBatch(build_batch(columns, self.seats))
        )
        copier = copier_of(self.store, HostStore(host_blocks, self.store)) if host_blocks else None
        limits = StepLimits(seats, seats * length, seats * length)
        self.runner = ModelRunner(self.model, forward, self.store, self.seats, limits, copier)
        self.block_size = block_size
        self.next_block = 0
        self.step = 0
        self.held: dict[int, int] = {}  # seat and length of its block table

    def admit(
        self,
        seat: int,
        tokens: list[int],
        *,
        prompt_len: int | None = None,
        blocks: tuple[int, ...] = (),
        seed: int = 0,
        stop: tuple[int, ...] = (),
        **params: object,
    ) -> Admission:
        sampling = SequenceParams(**{"max_tokens": 64, "temperature": 0.0, **params})
        self.held[seat] = len(blocks)
        name = f"r{seat}"
        return Admission(name, seat, tokens, prompt_len or len(tokens), sampling, seed, stop, blocks)

    def row(
        self,
        seat: int,
        start: int,
        count: int,
        *,
        sample: bool = True,
        logits: int | None = None,
        write_from: int | None = None,
        drafts: tuple[int, ...] = (),
    ) -> Row:
        count += len(drafts)
        needed = -(-(start + count) // self.block_size)
        held = self.held[seat]
        new = tuple(range(self.next_block, self.next_block + max(0, needed - held)))
        self.next_block += len(new)
        self.held[seat] = held + len(new)
        logits = int(sample) + len(drafts) if logits is None else logits
        write_from = start if write_from is None else write_from
        return Row(f"r{seat}", seat, start, count, logits, sample, write_from, held if new else 0, new, drafts)

    def plan(
        self,
        admitted: list[Admission],
        rows: list[Row],
        copies: list[BlockCopy] | None = None,
        released: list[int] | None = None,
        loads: list[HostCopy] | None = None,
        stores: list[HostCopy] | None = None,
    ) -> StepPlan:
        self.step += 1
        tokens = sum(row.count for row in rows)
        moved = {"loads": loads or [], "stores": stores or [], "num_drafts": sum(len(row.drafts) for row in rows)}
        return StepPlan(self.step, rows, admitted, copies or [], released or [], tokens, **moved)

    def run(self, admitted: list[Admission], rows: list[Row], *args: list, **more: list) -> StepResult:
        return run(self.runner, self.plan(admitted, rows, *args, **more))

    def generate(self, seat: int, tokens: list[int], steps: int, **params: object) -> list[int]:
        """Prefill in one chunk, then decode alone."""
        admitted = [self.admit(seat, tokens, **params)]
        result = self.run(admitted, [self.row(seat, 0, len(tokens))])
        out = list(result.rows[0].token_ids)
        while len(out) < steps:
            at = len(tokens) + len(out) - 1
            out += self.run([], [self.row(seat, at, 1)]).rows[0].token_ids
        return out


def run(runner: ModelRunner, plan: StepPlan) -> StepResult:
    handle = runner.submit(plan)
    runner.sample(handle)
    return runner.collect(handle)


def full_logits(model: TinyModel, tokens: list[int]) -> torch.Tensor:
    """Return the logits [n, V] of a whole sequence, without cache or batch."""
    hidden = model.embedding[torch.tensor(tokens)] + model.position[: len(tokens)]
    scores = (hidden @ model.wq) @ (hidden @ model.wk).T
    mask = torch.ones_like(scores).tril() == 0
    attended = scores.masked_fill(mask, -torch.inf).softmax(-1) @ (hidden @ model.wv)
    return (hidden + attended) @ model.head


def greedy(model: TinyModel, tokens: list[int], steps: int) -> list[int]:
    known = list(tokens)
    for _ in range(steps):
        known.append(int(full_logits(model, known)[-1].argmax()))
    return known[len(tokens) :]
