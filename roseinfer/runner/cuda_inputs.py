"""Batches on a GPU: a step's rows go up in one copy, one kernel makes of them what the forward pass reads."""

from itertools import accumulate, chain
from operator import add, sub

import numpy as np
import torch

from roseinfer.attention.batch import ForwardBatch
from roseinfer.kernels.inputs import COUNT, FIRST, SEAT, START, WRITE_FROM, expand_rows
from roseinfer.runner.forward import Prepared
from roseinfer.runner.inputs import Columns
from roseinfer.runner.seats import SeatTable
from roseinfer.runner.staging import Staging, aligned

# The layout of `expand_rows`, an int32 table with a column for each row of the step, and one line more: the position
# that the row's next token has.
END = COUNT + 1
FIELDS = END + 1


class CudaInputs:
    """Buffers for steps of at most `max_rows` rows and `max_tokens` tokens, made once and reused by every step.

    They are overwritten by the next step, which is right on one stream: that step's kernels come later.
    """

    def __init__(self, seats: SeatTable, max_rows: int, max_tokens: int) -> None:
        device = seats.device
        rows = aligned(max_rows)
        self.seats = seats
        self.staging = Staging(FIELDS * rows + 2 * aligned(max_tokens) + 2 * rows, device)
        self.input_ids = torch.zeros(max_tokens, dtype=torch.int64, device=device)
        self.positions = torch.zeros(max_tokens, dtype=torch.int64, device=device)
        self.slots = torch.zeros(max_tokens, dtype=torch.int64, device=device)
        self.context_len = torch.zeros(rows, dtype=torch.int32, device=device)
        self.query_start = torch.zeros(rows + 1, dtype=torch.int32, device=device)
        self.one_each = torch.arange(rows, dtype=torch.int32, device=device)

    def prepare(self, columns: Columns) -> Prepared:
        """The batch of any step, for an eager forward pass."""
        num_rows, width = len(columns.seat), aligned(len(columns.seat))
        context_lens = list(map(add, columns.start, columns.count))
        ends = list(accumulate(columns.count))
        num_tokens, num_logits = ends[-1], sum(columns.logits)
        host = self.staging.fill()
        layout = host[: FIELDS * width].reshape(FIELDS, width)
        self._fill_layout(layout, columns, num_rows, num_tokens)
        layout[FIRST, :num_rows] = list(map(sub, ends, columns.count))
        layout[COUNT, :num_rows] = columns.count
        layout[END, :num_rows] = context_lens
        at = FIELDS * width
        host[at : at + num_tokens] = np.repeat(np.arange(num_rows, dtype=np.int32), columns.count)
        logits_at = at + aligned(num_tokens)
        wanted = chain.from_iterable(map(range, map(sub, ends, columns.logits), ends))
        host[logits_at : logits_at + num_logits] = np.fromiter(wanted, np.int32, num_logits)
        samples = logits_at + aligned(num_logits)
        sampling = np.flatnonzero(columns.sample)
        room = aligned(len(sampling))
        host[samples : samples + len(sampling)] = layout[SEAT, sampling]
        host[samples + room : samples + room + len(sampling)] = layout[END, sampling]
        on_device = self.staging.send(samples + room + len(sampling))
        on_device_layout = self._expand(on_device, width, on_device[at : at + num_tokens])
        batch = ForwardBatch(
            input_ids=self.input_ids[:num_tokens],
            positions=self.positions[:num_tokens],
            query_start=self.query_start[: num_rows + 1],
            context_len=self.context_len[:num_rows],
            tables=self.seats.block_tables,
            table_rows=on_device_layout[SEAT, :num_rows],
            slots=self.slots[:num_tokens],
            logits_at=on_device[logits_at : logits_at + num_logits],
            query_lens=list(columns.count),
            context_lens=context_lens,
            max_query=max(columns.count),
            max_context=max(context_lens),
            num_decodes=columns.count.count(1),
        )
        seats, ends_at = on_device[samples:], on_device[samples + room :]
        return Prepared(batch, (seats[: len(sampling)], ends_at[: len(sampling)]))

    def stage_decodes(self, columns: Columns, bucket: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Upload a step of one token a row, padded to `bucket` rows: what a captured graph's `decode_batch` reads.

        Returns seats and positions of the new tokens, each [n].
        """
        num_rows, width = len(columns.seat), aligned(bucket)
        layout = self.staging.fill()[: FIELDS * width].reshape(FIELDS, width)
        self._fill_layout(layout, columns, num_rows, num_rows)
        layout[FIRST] = np.arange(width)
        layout[COUNT] = 1
        np.add(layout[START], 1, out=layout[END])
        on_device = self.staging.send(FIELDS * width).view(FIELDS, width)
        return on_device[SEAT, :num_rows], on_device[END, :num_rows]

    def decode_batch(self, bucket: int) -> ForwardBatch:
        """Launch the kernel that reads what `stage_decodes` uploads, and describe its result; to be captured."""
        width = aligned(bucket)
        layout = self._expand(self.staging.device, width, self.one_each[:bucket])
        return ForwardBatch(
            input_ids=self.input_ids[:bucket],
            positions=self.positions[:bucket],
            query_start=self.query_start[: bucket + 1],
            context_len=self.context_len[:bucket],
            tables=self.seats.block_tables,
            table_rows=layout[SEAT, :bucket],
            slots=self.slots[:bucket],
            logits_at=self.one_each[:bucket],
            query_lens=[1] * bucket,
            context_lens=[1] * bucket,
            max_query=1,
            max_context=self.seats.max_model_len,
            num_decodes=bucket,
        )

    def _fill_layout(self, layout: np.ndarray, columns: Columns, num_rows: int, end: int) -> None:
        """Seats, starts and where writing begins; rows past `num_rows` are the spare seat's."""
        layout[SEAT, :num_rows] = columns.seat
        layout[START, :num_rows] = columns.start
        layout[WRITE_FROM, :num_rows] = columns.write_from
        layout[:, num_rows:] = 0
        layout[SEAT, num_rows:] = self.seats.spare
        layout[FIRST, num_rows:] = end

    def _expand(self, staged: torch.Tensor, width: int, token_rows: torch.Tensor) -> torch.Tensor:
        layout = staged[: FIELDS * width].view(FIELDS, width)
        num_tokens = token_rows.shape[0]
        expand_rows(
            layout,
            token_rows,
            self.seats.tokens,
            self.seats.block_tables,
            self.seats.block_size,
            self.input_ids[:num_tokens],
            self.positions[:num_tokens],
            self.slots[:num_tokens],
            self.context_len[:width],
            self.query_start[: width + 1],
        )
        return layout
