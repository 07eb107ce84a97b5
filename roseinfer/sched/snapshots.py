"""Snapshots of recurrent states: where a sequence's state is kept, so that a later request can continue there.

A state group finds a prefix only where a snapshot was taken. While a prompt is computed, one is taken at each of these
positions, rounded down to a full block:

* The end of the messages, before what the chat template opens for the answer. The next turn may continue there, even if
  the template drops reasoning from the history. So may a request with the same prompt, whose last token is computed
  again. If the opening is long, another snapshot serves that.
* The end of the longest cached prefix, if other sequences go on after it. There the prompt diverges from them, probably
  after a system prompt that further requests share.

While a request decodes, one snapshot follows it at a distance of at most 63 tokens, for the next turn and after a
preemption. So does one within a prompt of several chunks. A row with drafts takes none after its first token: the state
consumes drafts that were right in the next row, which takes it then. If sample 0 of several has computed the prompt,
its state before the last token is held for the others.

Snapshots use slots that no sequence needs. Those that a longer prompt has superseded, and those that follow requests
which still decode, are overwritten before others.
"""

from collections.abc import Mapping, Sequence

from roseinfer.core.outputs import StateStats
from roseinfer.core.plan import Row, StateSnapshot, StepPlan, StepResult
from roseinfer.core.request import Request, Status
from roseinfer.kv.blocks import IndexEntry
from roseinfer.kv.manager import KvManager
from roseinfer.kv.states import MIN_SHARED_USES, SeatedState, StateGroup
from roseinfer.sched.queue import WaitingQueue

# Distance between snapshots of a decoding sequence, or one block if that is more.
MIN_ROLLING_TOKENS = 64


class Snapshots:
    """Slots and snapshots of one scheduler's requests."""

    def __init__(self, kv: KvManager, states: StateGroup, waiting: WaitingQueue) -> None:
        self._kv, self._states, self._waiting = kv, states, waiting
        self._rolling_tokens = max(MIN_ROLLING_TOKENS, kv.block_size)
        self._positions: dict[str, tuple[int, ...]] = {}  # by request: where to take snapshots, rising
        self._diverges: dict[str, int] = {}  # by request: where its prompt diverges from others
        self._rolling: dict[str, tuple[int, IndexEntry]] = {}  # by request: the snapshot that the next one replaces
        self._rolling_slots: set[int] = set()  # of such snapshots in flight
        self._known: dict[str, int] = {}  # by request whose last row had drafts: tokens that its state has consumed
        self._taken = self._skipped = 0

    # --- seats --------------------------------------------------------------------------------------------------
    def seat(self, request: Request, start: int) -> SeatedState:
        """Give a request that starts with `start` cached tokens its slot. The caller has checked `num_free`."""
        name, chain = request.request_id, self._kv.chain(request.request_id)
        seated = self._states.seat(name, chain, request.tokens, start, request.fork_of or "")
        if seated.copy is not None and start == request.prompt_len - 1 and self._has_siblings(request):
            self._states.hold(name, start, seated.copy.src)
        self._known.pop(name, None)
        positions = self._positions_of(request, start)
        if positions:
            self._positions[name] = positions
        else:
            self._positions.pop(name, None)
        return seated

    def _positions_of(self, request: Request, start: int) -> tuple[int, ...]:
        """Return the positions after `start` at which to take snapshots of a request that starts."""
        size, last, found = self._kv.block_size, len(request.tokens) - 1, set[int]()
        if self._kv.prefix_caching:
            messages = min(request.prompt_len - request.generation_prompt_len, last)
            divergence = min(self._kv.divergence(request.request_id), last)
            self._diverges[request.request_id] = divergence // size * size
            ends = [messages, divergence]
            if last - messages >= MIN_ROLLING_TOKENS:
                ends.append(last)
            for end in ends:
                position = end // size * size
                if position > start and not self._states.holds(
                    self._kv.chain(request.request_id), request.tokens, position
                ):
                    found.add(position)
        if start < request.prompt_len - 1 and self._has_siblings(request):
            found.add(request.prompt_len - 1)
        return tuple(sorted(found))

    def _has_siblings(self, request: Request) -> bool:
        """True if other samples wait for the prompt that the request computes."""
        return request.fork_of is None and bool(self._waiting.siblings(request))

    def settle_family(self, request: Request) -> None:
        """Release the state held for the samples of a request, one of which has started or ended, if none waits."""
        family = request.fork_of or request.request_id
        if self._states.held_position(family) is not None and not self._waiting.has_family(family):
            self._states.release_held(family)

    def ended(self, request: Request) -> None:
        """Forget a request that has ended, but not its snapshots."""
        self._positions.pop(request.request_id, None)
        self._diverges.pop(request.request_id, None)
        self.settle(request)
        self._known.pop(request.request_id, None)
        self.settle_family(request)

    def settle(self, request: Request) -> None:
        """Keep the rolling snapshot of a request that has ended or was preempted as long as others."""
        rolling = self._rolling.pop(request.request_id, None)
        if rolling is not None:
            self._states.settle(*rolling)

    # --- steps --------------------------------------------------------------------------------------------------
    def plan(self, rows: Sequence[Row]) -> list[StateSnapshot]:
        """Return the snapshots that a step with these rows takes, as far as there are slots for them."""
        found: list[StateSnapshot] = []
        if not self._kv.prefix_caching and not self._positions:
            return found
        mask, wanting, known = self._rolling_tokens - 1, self._positions, self._known
        concerned = [
            n
            for n, row in enumerate(rows)
            if not (row[2] + row[3]) & mask or row[0] in wanting or row[0] in known or row[9]
        ]
        for number in concerned:
            row = rows[number]
            for position, rolling in self._due(row):
                slot = self._states.begin_snapshot(position, rolling=rolling)
                if slot is None:
                    self._skipped += 1
                    continue
                if rolling:
                    self._rolling_slots.add(slot)
                found.append(StateSnapshot(number, position - row.start, slot))
        return found

    def _due(self, row: Row) -> list[tuple[int, bool]]:
        """Return the positions of a row's snapshots, each with whether it replaces the last such one."""
        begin, end = self._known.pop(row.request_id, row.start), row.start + row.count - len(row.drafts)
        if row.drafts:
            self._known[row.request_id] = end
        positions = self._positions.pop(row.request_id, ())
        due = [(position, False) for position in positions if position <= end]
        rest = positions[len(due) :]
        if rest:
            self._positions[row.request_id] = rest
        # Within the row that completes a prompt, the other positions are better.
        rolling = end - end % self._rolling_tokens if rest or begin < row.start else end
        if self._kv.prefix_caching and rolling % self._rolling_tokens == 0 and begin < rolling not in positions:
            due.append((rolling, True))
        return due

    def commit(self, plan: StepPlan, result: StepResult, requests: Mapping[str, Request]) -> None:
        """Apply a completed step, before its results change the requests."""
        changes = plan.states
        assert changes is not None
        self._states.copies_done(changes.copies)
        for number, tokens, slot in changes.snapshots:
            row = plan.rows[number]
            request = requests[row.request_id]
            failed = request.status is Status.FINISHED or result.rows[number].error is not None
            self._finish(request, row.start + tokens, slot, failed)

    def _finish(self, request: Request, position: int, slot: int, failed: bool) -> None:
        rolling = slot in self._rolling_slots
        self._rolling_slots.discard(slot)
        if failed:
            self._states.finish_snapshot(slot, None, position)
            return
        self._taken += 1
        name, size = request.request_id, self._kv.block_size
        if position == request.prompt_len - 1 and self._has_siblings(request):
            self._states.hold(name, position, slot)
        entry = None
        if self._kv.prefix_caching and position % size == 0:
            entry = self._kv.chain(name).entry(request.tokens, position // size - 1)
        shared = position == self._diverges.get(name)
        running = rolling and request.status is Status.RUNNING
        found = self._states.finish_snapshot(
            slot, entry, position, MIN_SHARED_USES if shared else 0, rolling=running and not shared
        )
        if entry is None:
            return
        if not request.num_outputs and name not in self._positions:
            self._states.supersede(self._kv.chain(name), position)
        if name in self._rolling:
            self._states.drop(*self._rolling.pop(name))
        if rolling and found:
            self._rolling[name] = (slot, entry)

    # --- inspection ---------------------------------------------------------------------------------------------
    def stats(self) -> StateStats:
        states, host = self._states, self._kv.host_states
        found = StateStats(states.num_live, states.num_slots, states.num_snapshots, self._taken, self._skipped)
        if host is None:
            return found
        return found._replace(
            host_used=host.num_used, host_total=host.num_blocks, loaded=host.loaded, stored=host.stored
        )
