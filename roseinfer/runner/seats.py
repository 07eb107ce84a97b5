"""Runner's state of every seated request, on the host and on the device."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch

from roseinfer.core.plan import Admission, GroupChanges, Row, TableChange
from roseinfer.core.pooling import PoolingParams
from roseinfer.core.sampling import SequenceParams
from roseinfer.runner.device import upload, write_ranges
from roseinfer.runner.edits import make_edits
from roseinfer.runner.edits.base import CountsTokens, LogitEdit
from roseinfer.runner.state_slots import StateSlots

# Smallest normal float32: a temperature above 0 must not vanish when it divides float32 logits.
MIN_TEMPERATURE = 1.2e-38
_DEFAULTS = {field.name: field.default for field in fields(SequenceParams)}


class Feature:
    """Sampler features that a seat uses, as bits of one int; 0 is plain greedy."""

    RANDOM = 1
    FILTERED = 2  # top-k or top-p
    LOGPROBS = 4
    FIRST_EDIT = 8  # one bit per logit edit from here on, in the order of `make_edits`
    EDITED = ~7  # any edit


@dataclass(slots=True)
class Seat:
    """Host side of a seated request. `features`: bits of `Feature`. `num_blocks`: length of the block table."""

    request_id: str
    prompt_len: int
    params: SequenceParams
    features: int
    num_blocks: int
    pooling: PoolingParams | None = None
    adapter_slot: int = -1


class SeatTable:
    """State of S = max_num_seqs seats and one spare that no request uses.

    Rows that only pad a batch refer to the spare seat, number S. Its block table in each KV group names only the
    group's spare block.

    tokens: [S + 1, max_model_len + 1] int32, the token pool: every known token at its position. A request that fills
    the context may still sample one token, hence the last column. all_tables: [groups, S + 1, max_blocks] int32, block
    tables of each KV group; stale entries are valid block ids. tables: those of each group, block_tables: those of the
    first. adapter_slots: [S + 1] int32, -1 without an adapter; None if there are no adapters. adapted: seats with one.
    settings: [S + 1, 3] float64: temperature, top_p, min_p; the spare seat is greedy. integers: [S + 1, 3]
    int64: seed, prompt_len, top_k. edits: logit edit for each bit of `Feature`, in the order in which edits apply.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        vocab_size: int,
        device: torch.device,
        spare_blocks: Sequence[int] = (0,),
        states: StateSlots | None = None,
        *,
        adapters: bool = False,
    ) -> None:
        """spare_blocks: of each KV group. states: of a model with recurrent states. adapters: seats may have one."""
        self.device = device
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.block_size = block_size
        self.max_blocks = -(-max_model_len // block_size)
        self.spare = max_num_seqs
        self.states = states
        rows = max_num_seqs + 1
        self.tokens = torch.zeros((rows, max_model_len + 1), dtype=torch.int32, device=device)
        # Kernels are compiled for aligned pointers, so the tables of each group begin at a multiple of 16 bytes.
        whole = torch.zeros((len(spare_blocks), -(-rows // 4) * 4, self.max_blocks), dtype=torch.int32, device=device)
        self._lines_per_group, self._table_lines = whole.shape[1], whole.flatten(0, 1)
        self.all_tables = whole[:, :rows]
        self.tables = self.all_tables.unbind()
        self.block_tables = self.tables[0]
        for table, block in zip(self.tables, spare_blocks, strict=True):
            table[self.spare] = block
        self.settings = torch.zeros((rows, 3), dtype=torch.float64, device=device)
        self.integers = torch.zeros((rows, 3), dtype=torch.int64, device=device)
        self.adapter_slots = torch.full((rows,), -1, dtype=torch.int32, device=device) if adapters else None
        self.adapted: set[int] = set()
        edits = make_edits(self.tokens, vocab_size)
        self.edits = {Feature.FIRST_EDIT << number: edit for number, edit in enumerate(edits)}
        self.seats: list[Seat | None] = [None] * max_num_seqs
        self.broken: dict[int, str] = {}  # seat and why it cannot run

    def at(self, index: int) -> Seat:
        seat = self.seats[index]
        assert seat is not None, "a row names an empty seat"
        return seat

    def release(self, seats: list[int]) -> None:
        for seat in seats:
            if self.at(seat).features & Feature.EDITED:
                for edit in self._edits_of(seat):
                    edit.release(seat)
            self.seats[seat] = None
            self.broken.pop(seat, None)
        self.adapted.difference_update(seats)

    def admit(self, admissions: list[Admission]) -> None:
        """Seat requests, also after a preemption. All state is rebuilt from the tokens known so far."""
        if not admissions:
            return
        seats = [a.seat for a in admissions]
        zeros = [0] * len(seats)
        tokens = [self._seat(a) for a in admissions]
        write_ranges(self.tokens, seats, zeros, tokens)
        write_ranges(self.block_tables, seats, zeros, [a.blocks for a in admissions])
        self._write_settings(admissions, seats)
        if self.adapter_slots is not None:
            self._write_adapters(admissions, self.adapter_slots)
        for a in admissions:
            if self.at(a.seat).features & Feature.EDITED:
                for edit in self._edits_of(a.seat):
                    edit.admit(a, self.tokens[a.seat, : len(a.token_ids)])

    def _edits_of(self, seat: int) -> list[LogitEdit]:
        features = self.at(seat).features
        return [edit for bit, edit in self.edits.items() if features & bit]

    def grow_tables(self, rows: Sequence[Row], groups: Sequence[GroupChanges] = ()) -> None:
        """Write the rows' new block-table entries, and those of further groups, in one scatter.

        A seat that is admitted and grows in the same step has two changes in a group, hence two scatters.
        """
        for row in rows:
            self.at(row.seat).num_blocks = row.table_from + len(row.new_blocks)
        lines, columns = [row.seat for row in rows], [row.table_from for row in rows]
        blocks, written, later = [row.new_blocks for row in rows], set[int](), [list[TableChange]() for _ in groups]
        for group, changes in enumerate(groups):
            before = (group + 1) * self._lines_per_group
            for change in changes.tables:
                line = before + change.seat
                if line in written:
                    later[group].append(change)
                    continue
                written.add(line)
                lines.append(line)
                columns.append(change.table_from)
                blocks.append(change.blocks)
        write_ranges(self._table_lines, lines, columns, blocks)
        if any(later):
            self.grow_tables((), [GroupChanges(tuple(changes)) for changes in later])

    def write_drafts(self, seats: Sequence[int], starts: Sequence[int], drafts: Sequence[Sequence[int]]) -> None:
        """Write the drafts of rows after their known tokens, as inputs of the forward pass."""
        write_ranges(self.tokens, seats, [start + 1 for start in starts], drafts)

    def output_drafts(self, seat: int, token_ids: Sequence[int]) -> None:
        """Let the seat's edits count the tokens that came of a row with drafts."""
        if self.at(seat).features & Feature.EDITED:
            for edit in self._edits_of(seat):
                if isinstance(edit, CountsTokens):
                    edit.output(seat, token_ids)

    def _seat(self, a: Admission) -> Sequence[int]:
        """Fill the host side. Return the token ids to write, or harmless ones if they are unusable."""
        assert 0 < a.prompt_len <= len(a.token_ids) <= self.max_model_len, "the request does not fit"
        assert a.adapter_slot < 0 or self.adapter_slots is not None, "there are no slots for adapters"
        seat = Seat(a.request_id, a.prompt_len, a.params, self._features(a), len(a.blocks), a.pooling, a.adapter_slot)
        self.seats[a.seat] = seat
        error = self._unusable(a)
        if error is not None:
            self.broken[a.seat] = error
            seat.features = 0
            return [0] * len(a.token_ids)
        return a.token_ids

    def _features(self, a: Admission) -> int:
        params, features = a.params, 0
        if not params.greedy:
            features |= Feature.RANDOM
            features |= Feature.FILTERED if params.top_k > 0 or params.top_p < 1 else 0
        features |= Feature.LOGPROBS if params.logprobs is not None else 0
        for bit, edit in self.edits.items():
            features |= bit if any(getattr(params, name) != _DEFAULTS[name] for name in edit.fields) else 0
        return features

    def _unusable(self, a: Admission) -> str | None:
        """Return why an admission is unusable. An id outside the vocabulary would fail the whole step, or a GPU
        process.
        """
        ids = a.token_ids
        if min(ids) < 0 or max(ids) >= self.vocab_size:
            return f"a token id is outside the vocabulary of {self.vocab_size}"
        for name, named in a.params.named_token_ids():
            # A stop id that is never sampled does no harm, and a model's own EOS ids may include some.
            if name != "stop_token_ids" and any(token >= self.vocab_size for token in named):
                return f"{name} names a token outside the vocabulary of {self.vocab_size}"
        return None

    def _write_adapters(self, admissions: list[Admission], slots: torch.Tensor) -> None:
        places = upload([(a.seat, a.adapter_slot) for a in admissions], torch.int64, self.device)
        slots.index_copy_(0, places[:, 0], places[:, 1].int())
        self.adapted.update(a.seat for a in admissions if a.adapter_slot >= 0)

    def _write_settings(self, admissions: list[Admission], seats: list[int]) -> None:
        index = upload(seats, torch.int64, self.device)
        settings = [(max(a.params.temperature, MIN_TEMPERATURE), a.params.top_p, a.params.min_p) for a in admissions]
        integers = [(a.seed, a.prompt_len, min(a.params.top_k, self.vocab_size)) for a in admissions]
        self.settings.index_copy_(0, index, upload(settings, torch.float64, self.device))
        self.integers.index_copy_(0, index, upload(integers, torch.int64, self.device))
