"""Draft steps on a GPU: a few kernels begin the chains, and a captured graph makes one draft of each."""

from functools import partial
from typing import Any

import torch

from roseinfer.attention.base import GraphableAttention
from roseinfer.attention.batch import ForwardBatch, Paging
from roseinfer.attention.kv_store import KVStore
from roseinfer.core.plan import StepPlan
from roseinfer.core.progress import report
from roseinfer.kernels.sampling.draft_chains import Chains, begin_chains, end_draft_step, prepare_draft_step
from roseinfer.models.eagle.model import DraftingModel
from roseinfer.models.step import StepContext
from roseinfer.runner.cuda_graphs import GraphRecorder
from roseinfer.runner.cuda_sampler import CudaTokenChooser
from roseinfer.runner.device import upload
from roseinfer.runner.draft_steps import MadeDrafts, drafting_rows
from roseinfer.runner.forward import Columns
from roseinfer.runner.seats import Feature, SeatTable

# Kinds of choice that a step's rows may need together.
_KINDS = (0, Feature.RANDOM, Feature.RANDOM | Feature.FILTERED)


def draft_buckets(max_rows: int) -> list[int]:
    """Return numbers of rows to capture. Padding costs little: a draft step reads the weights of one layer."""
    sizes = [1 << power for power in range(max_rows.bit_length())]
    return sizes if sizes[-1] == max_rows else [*sizes, max_rows]


class CudaDraftSteps:
    """`HeadSteps` for up to `max_rows` rows of up to `max_drafts` drafts. Nothing is allocated once graphs are
    captured, except for the plan's upload.

    A graph holds one draft step. It is replayed for each draft of the longest chain; complete chains are padding then,
    of the spare seat.
    """

    def __init__(
        self,
        model: DraftingModel,
        attention: GraphableAttention,
        store: KVStore,
        seats: SeatTable,
        max_rows: int,
        max_drafts: int,
        recorder: GraphRecorder,
    ) -> None:
        self._model, self._head = model, model.head
        self._attention, self._store, self._seats = attention, store, seats
        self._recorder = recorder
        self._buckets = draft_buckets(max_rows)
        hidden, device = model.head.spec.hidden_size, model.device
        self._chains = Chains.allocate(max_rows, max_drafts, hidden, len(seats.tables), model.dtype, device)
        self._one_each = torch.arange(max_rows + 1, dtype=torch.int32, device=device)
        # Drafts are no tokens of the request: their places in the pool are all the same line, which nothing reads.
        pool = torch.zeros((1, seats.tokens.shape[1]), dtype=torch.int32, device=device)
        self._choice = CudaTokenChooser(seats, pool.expand(seats.tokens.shape))
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}

    def admit(self, seats: list[int]) -> None:
        """Forget the states of earlier requests in these seats."""
        self._model.admit(upload(seats, torch.int64, self._seats.device))

    def run(self, plan: StepPlan, columns: Columns, sampled: torch.Tensor) -> MadeDrafts | None:
        """Make the drafts that the plan asks for; see `HeadSteps.run`."""
        rows = drafting_rows(plan, columns)
        if not rows:
            return None
        counts = [row.ahead for row in rows if row.ahead]
        bucket = self._bucket(len(counts)) if counts else 0
        most = max(len(row.drafts) for row in rows)
        layout = [
            [row.seat, row.first, row.sample, row.end, row.ahead, *row.drafts, *[-1] * (most - len(row.drafts))]
            for row in rows
        ]
        layout += [[self._seats.spare, 0, 0, 0, 0, *[-1] * most]] * (bucket - len(rows))
        on_device = upload(layout, torch.int32, sampled.device)
        begin_chains(on_device, sampled, self._model.states, self._model.last, self._chains)
        if not counts:
            return None
        features = 0
        for row in rows[: len(counts)]:
            features |= self._seats.at(row.seat).features
        kind = features & _KINDS[-1] if features & Feature.RANDOM else 0
        for _ in range(counts[0]):
            graph = self._graphs.get((bucket, kind))
            if graph is None:
                self.launch(bucket, kind)
            else:
                graph.replay()
        n = len(counts)
        return MadeDrafts([row.number for row in rows[:n]], counts, self._chains.drafts[:n], self._chains.chances[:n])

    @torch.inference_mode()
    def capture(self, pool: Any) -> None:
        """Record every bucket with every kind of choice. No chain wants a draft, so all is padding."""
        report("capturing CUDA graphs of draft steps")
        self._chains.ahead.zero_()
        for bucket in reversed(self._buckets):
            for kind in _KINDS:
                self._graphs[bucket, kind], _ = self._recorder.record(partial(self.launch, bucket, kind), pool)

    def launch_all(self) -> None:
        """Launch every kind of step."""
        for bucket in self._buckets:
            for kind in _KINDS:
                self.launch(bucket, kind)

    def launch(self, bucket: int, kind: int) -> None:
        """Launch one draft step of the first `bucket` chains. `kind`: the choices that they need, of `Feature`."""
        chains, seats, head = self._chains, self._seats, self._head
        prepare_draft_step(chains, bucket, seats.all_tables, seats.block_size, seats.spare)
        batch = self._batch(bucket)
        self._attention.begin(batch, self._store)
        states = chains.states[:bucket]
        x = head.forward(chains.tokens[:bucket], states, StepContext(batch, self._attention))
        logits = head.logits(x)
        drafted = self._choice.choose(logits, chains.rows[:bucket], chains.ends[:bucket], kind)
        end_draft_step(chains, logits, drafted, head.target_ids, seats.settings)
        next_states = head.next_states(x)
        if next_states.data_ptr() != states.data_ptr():
            states.copy_(next_states)

    def _bucket(self, rows: int) -> int:
        return next(bucket for bucket in self._buckets if bucket >= rows)

    def _batch(self, rows: int) -> ForwardBatch:
        """Return a batch whose contents the device sets; its host-side counts are meaningless."""
        chains = self._chains
        return ForwardBatch(
            input_ids=chains.tokens[:rows],
            positions=chains.positions[:rows],
            query_start=self._one_each[: rows + 1],
            context_len=chains.context_len[:rows],
            table_rows=chains.rows[:rows],
            paging=tuple(map(Paging, self._seats.tables, chains.slots[:, :rows])),
            logits_at=self._one_each[:rows],
            query_lens=[1] * rows,
            context_lens=[1] * rows,
            max_query=1,
            num_decodes=rows,
        )
