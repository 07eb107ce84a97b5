"""State that plans change before their rows run: seats, block tables, KV blocks, host memory, failed requests."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from roseinfer.adapters.memory import AdapterMemory
from roseinfer.attention.kv_store import KVStore
from roseinfer.core.plan import BlockCopy, Row, RowResult, StepPlan, StepResult
from roseinfer.runner.device import upload
from roseinfer.runner.host_copies import BothCopies, Copier, StepCopies
from roseinfer.runner.seats import SeatTable


class PlanState:
    """State of one runner. `copier`: copies between `store` and host memory; None if plans have no loads and stores.
    `adapters`: None if plans load none.

    `store`: None if no K/V is kept; then KV blocks exist in plans only.
    """

    def __init__(
        self,
        store: KVStore | None,
        seats: SeatTable,
        copier: Copier | None = None,
        adapters: AdapterMemory | None = None,
    ) -> None:
        self.seats = seats
        self._store = store
        self._copier = copier
        self._adapters = adapters

    def apply(self, plan: StepPlan) -> StepCopies | None:
        """Apply the plan's changes. Return its copies from and to host memory, which have been started."""
        seats = self.seats
        if plan.released:
            seats.release(plan.released)
        seats.admit(plan.admitted)
        if plan.copies:
            self._copy(plan.copies)
        growing = [row for row in plan.rows if row.new_blocks]
        if growing or plan.groups:
            seats.grow_tables(growing, plan.groups)
        for group, changes in enumerate(plan.groups, 1):
            if changes.copies:
                self._copy(changes.copies, group)
        if seats.states is not None:
            seats.states.apply(plan.states, plan.rows)
        if self._adapters is not None:
            self._adapters.start(plan.adapter_loads)
        return self._start_host_copies(plan) if plan.loads or plan.stores or plan.states is not None else None

    def _start_host_copies(self, plan: StepPlan) -> StepCopies | None:
        """Start the plan's loads and stores of blocks and states. Return None without any."""
        copies, of_states = None, None
        if self.seats.states is not None:
            of_states = self.seats.states.start_host_copies(plan.states)
        if plan.loads or plan.stores:
            assert self._copier is not None, "there are no blocks in host memory"
            copies = self._copier.start(plan.loads, plan.stores)
        return BothCopies(copies, of_states) if copies and of_states else copies or of_states

    def _copy(self, copies: Sequence[BlockCopy], group: int = 0) -> None:
        assert self._store is not None, "no K/V is kept"
        src, dst, tokens = zip(*copies, strict=True)
        pairs = upload((src, dst), torch.int64, self.seats.device)
        self._store.copy_blocks(pairs[0], pairs[1], max(tokens), group)

    def fail(self, row: Row, error: str) -> None:
        """Make this row and all later ones of its request errors.

        Its K/V may be NaN or infinite and stays so: other requests may have begun from it and must fail too. No backend
        reads slots that are not of a row's visible context, so the blocks' next owners are safe.
        """
        self.seats.broken.setdefault(row.seat, error)

    def with_errors(self, rows: list[Row], results: list[RowResult]) -> list[RowResult]:
        """Return the results, with those of failed requests replaced by errors.

        Tokens that a row with drafts sampled before the error stay.
        """
        made = []
        for row, result in zip(rows, results, strict=True):
            error = self.seats.broken.get(row.seat)
            if error is not None:
                kept = (result.token_ids, result.logprobs) if row.drafts else ((), None)
                result = RowResult(result.request_id, *kept, error=error)
            made.append(result)
        return made

    def finish_adapters(self) -> None:
        """Wait for the loads of adapters that were started."""
        if self._adapters is not None:
            self._adapters.finish()

    def finish(self, result: StepResult, copies: StepCopies) -> StepResult:
        """Wait for the step's copies from and to host memory, and return its result with their times."""
        loads_s, stores_s = copies.wait()
        return replace(
            result,
            duration_s=max(result.duration_s, loads_s, stores_s),
            loads_s=loads_s,
            stores_s=stores_s,
            copies_first=self._copier is not None and not self._copier.overlaps_steps,
        )

    def close(self) -> None:
        """Wait for copies, since memory is freed with the object."""
        if self._copier is not None:
            self._copier.close()
        if self.seats.states is not None and self.seats.states.copier is not None:
            self.seats.states.copier.close()
        if self._adapters is not None:
            self._adapters.close()
