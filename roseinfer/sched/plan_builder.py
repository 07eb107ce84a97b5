"""PlanBuilder: a step being planned. Tokens, seats and blocks of a row are taken together or not at all."""

from collections.abc import Collection, Sequence

from roseinfer.core.adapters import AdapterLoad
from roseinfer.core.plan import (
    Admission,
    BlockCopy,
    GroupChanges,
    HostCopy,
    Row,
    SlotChange,
    StateChanges,
    StateSnapshot,
    StepPlan,
    TableChange,
    new_row,
)
from roseinfer.core.request import Request
from roseinfer.kv.group import Growth
from roseinfer.kv.manager import KvManager
from roseinfer.kv.states import SeatedState


class PlanBuilder:
    """Step being planned. `budget`: tokens that it may hold. `tokens_left`: the rest of the budget."""

    state_loads: Sequence[HostCopy] = ()
    state_stores: Sequence[HostCopy] = ()

    def __init__(self, step: int, token_budget: int, kv: KvManager) -> None:
        self.step = step
        self.tokens_left = token_budget
        self.budget = token_budget
        self.admitted: list[Admission] = []
        self.loads: list[HostCopy] = []
        self.stores: list[HostCopy] = []
        self.adapter_loads: tuple[AdapterLoad, ...] = ()
        self._kv = kv
        self._rows: dict[str, Row] = {}
        self._growths: dict[str, Growth] = {}
        self._num_drafts = 0
        self._ahead: dict[str, int] = {}
        self.seated: list[tuple[int, SeatedState]] = []  # the states of admitted requests, by seat
        self.snapshots: list[StateSnapshot] = []
        self._window_tables: list[list[TableChange]] = [[] for _ in kv.windows]  # of admitted requests

    def __contains__(self, request: Request) -> bool:
        return request.request_id in self._rows

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def rows(self) -> list[Row]:
        return list(self._rows.values())

    def admit(self, admission: Admission, windows: Sequence[tuple[int, tuple[int, ...]]]) -> None:
        """Seat a request. windows: its table in each window group, from an entry on."""
        self.admitted.append(admission)
        for changes, (first, blocks) in zip(self._window_tables, windows, strict=True):
            changes.append(TableChange(admission.seat, first, blocks))

    def add_next_token(self, request: Request) -> None:
        """Add a row of one token whose blocks are there: `add_row(request, 1)`, but faster."""
        start = request.planned
        name = request.request_id
        seat: int = request.seat  # type: ignore[assignment]  # a running request has one; an assertion costs 2% of a plan
        self._rows[name] = new_row((name, seat, start, 1, 1, True, start, 0, (), ()))
        self.tokens_left -= 1
        request.planned = start + 1
        request.pending += 1
        request.in_flight += 1

    def add_row(self, request: Request, count: int, growth: Growth | None = None) -> None:
        """Add a row of `count` tokens. The request has its seat and blocks; `growth` names the new blocks."""
        start = request.planned
        end = start + count
        sample = end == len(request.tokens) + request.pending
        logits = 1 if sample else 0
        if start < request.prompt_len - 1 and request.needs_every_position:
            logits = count
        table_from, new_blocks = (growth.table_from, growth.new_blocks) if growth else (0, ())
        seat = request.seat
        assert seat is not None, "only a seated request has rows"
        write_from = request.write_from
        self._rows[request.request_id] = Row(
            request.request_id,
            seat,
            start,
            count,
            logits,
            sample,
            write_from if write_from > start else start,
            table_from,
            new_blocks,
        )
        if growth is not None:
            self._growths[request.request_id] = growth
        self.tokens_left -= count
        request.planned = end
        if count > 1:
            request.chunks += 1
            request.rowless += count - 1
        request.pending += sample
        request.in_flight += 1

    def decodes(self, request: Request) -> bool:
        """True if the request has a row that computes one token after its prompt and samples the next."""
        row = self._rows.get(request.request_id)
        return row is not None and row.count == 1 and row.sample and row.start >= request.prompt_len

    def set_drafts(self, request: Request, drafts: tuple[int, ...], growth: Growth | None = None) -> None:
        """Let the row of a decoding request verify drafts as well. `growth`: the new blocks for them, if any.

        How many tokens it yields is unknown until the step is done. So none is pending, and the request has nothing to
        compute until then.
        """
        self._extend(request.request_id, growth)
        name = request.request_id
        _, seat, start, _, _, sample, write_from, table_from, new_blocks, _ = self._rows[name]
        count = 1 + len(drafts)
        self._rows[name] = new_row(
            (name, seat, start, count, count, sample, write_from, table_from, new_blocks, drafts)
        )
        self.tokens_left -= len(drafts)
        self._num_drafts += len(drafts)
        request.pending -= 1

    def row_of(self, request: Request) -> Row | None:
        """Return the request's row in this step, None without one."""
        return self._rows.get(request.request_id)

    def set_ahead(self, request: Request, count: int, growth: Growth | None = None) -> None:
        """Let the runner's head draft `count` tokens after the request's row. `growth`: the new blocks for them."""
        self._extend(request.request_id, growth)
        self._ahead[request.request_id] = count

    def _extend(self, name: str, growth: Growth | None) -> None:
        """Add more new blocks to a row."""
        if growth is None:
            return
        earlier = self._growths.get(name)
        if earlier is not None:
            assert growth.copy is None, "a request that has grown borrows no block"
            growth = _joined(earlier, growth)
        self._growths[name] = growth
        self._rows[name] = self._rows[name]._replace(table_from=growth.table_from, new_blocks=growth.new_blocks)

    def drop_row(self, request: Request) -> None:
        """Remove a running request's row and free its new blocks."""
        row = self._rows.pop(request.request_id)
        assert not row.drafts, "drafts are added last, after all preemptions"
        growth = self._growths.pop(request.request_id, None)
        if growth is not None:
            self._kv.undo(request.request_id, growth)
            request.capacity = self._kv.capacity(request.request_id)
        self.tokens_left += row.count
        request.planned -= row.count
        if row.count > 1:
            request.chunks -= 1
            request.rowless -= row.count - 1
        request.pending -= row.sample
        request.in_flight -= 1

    def build(self, released: list[int], guided: Collection[str]) -> StepPlan:
        """Return the finished plan. `guided`: ids of the live requests that have a guide."""
        rows = self.rows
        guided_rows = [i for i, row in enumerate(rows) if row.sample and row.request_id in guided] if guided else ()
        copies: list[BlockCopy] = [g.copy for g in self._growths.values() if g.copy is not None]
        return StepPlan(
            step=self.step,
            rows=rows,
            admitted=self.admitted,
            copies=copies,
            released=released,
            num_tokens=self.budget - self.tokens_left,
            num_drafts=self._num_drafts,
            guided=tuple(guided_rows),
            loads=self.loads,
            stores=self.stores,
            ahead=tuple(self._ahead.get(row.request_id, 0) for row in rows) if self._ahead else (),
            groups=self._groups(),
            states=None if self._kv.states is None else self._states(),
            adapter_loads=self.adapter_loads,
        )

    def _states(self) -> StateChanges | None:
        """Return the changes in the state group; None without any."""
        if not (self.seated or self.snapshots or self.state_loads or self.state_stores):
            return None
        return StateChanges(
            tuple([SlotChange(seat, state.slot) for seat, state in self.seated]),
            tuple([state.copy for _, state in self.seated if state.copy is not None]),
            tuple(self.snapshots),
            tuple(self.state_loads),
            tuple(self.state_stores),
        )

    def _groups(self) -> tuple[GroupChanges, ...]:
        """Return the changes in each window group; nothing if no table changes."""
        if not self._window_tables or not (self.admitted or self._growths):
            return ()
        grown = [(self._rows[name].seat, growth.windows) for name, growth in self._growths.items()]
        groups = []
        for number, tables in enumerate(self._window_tables):
            here = [(seat, windows[number]) for seat, windows in grown]
            tables += [TableChange(seat, growth.table_from, growth.new_blocks) for seat, growth in here]
            copies = [growth.copy for _, growth in here if growth.copy is not None]
            groups.append(GroupChanges(tuple(tables), tuple(copies)))
        return tuple(groups)


def _joined(first: Growth, second: Growth) -> Growth:
    """Return two growths of one sequence as one."""
    windows = tuple(_joined(*pair) for pair in zip(first.windows, second.windows, strict=True))
    return Growth(first.table_from, first.new_blocks + second.new_blocks, first.copy, windows)
