"""Several engines behind a router, on simulated time. The router is the one that serves (`roseinfer.router`)."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from itertools import count
from math import inf
from time import perf_counter

from roseinfer.core.adapters import adapter_key
from roseinfer.core.config.engine import SchedulerConfig
from roseinfer.core.outputs import End, FinishReason, SequenceOutput
from roseinfer.core.promise import Promise
from roseinfer.core.request import sequence_id
from roseinfer.engine.messages import Add, PriorOutput
from roseinfer.kv.blocks import block_keys
from roseinfer.priced.machine import Machine
from roseinfer.router.base import Placement, RoutingRequest
from roseinfer.router.overdue import Unanswered, overdue_moves
from roseinfer.router.placer import Placer
from roseinfer.router.registry import PREFIX_AWARE
from roseinfer.sched.estimates import Estimates
from roseinfer.sim.engine import TOKEN, SimulatedEngine
from roseinfer.sim.fleet_plan import EngineTotals, FleetPlan, FleetRun
from roseinfer.sim.simulator import Lifetime, SimulationResult, add_of, lifetimes
from roseinfer.sim.workload import Arrival

# Order at the same moment: tokens are delivered, then events of engines, then requests arrive, and then steps begin.
DELIVER, EVENT, ARRIVE, STEP = range(4)
CHECK_INTERVAL_S = 0.1  # between two looks for requests that wait too long


NO_PROMISE = Promise(0.0)


@dataclass(slots=True)
class FleetRequest:
    """A request in the fleet. `name`: its id in the engine that has it now."""

    number: int
    arrival: Arrival
    life: Lifetime
    keys: list[bytes]
    name: str = ""
    attempts: int = 0
    engine: int | None = None
    placement: Placement | None = None
    retried: bool = False
    resumed: bool = False
    left_queue: bool = False


@dataclass(slots=True)
class SimulatedReplica:
    """One engine of the fleet across its lives; `engine` is None while it is down.

    `pending`: outputs of the running step. `promise`: its latest promise.
    """

    number: int
    engine: SimulatedEngine | None = None
    pending: list[SequenceOutput] = field(default_factory=list)
    lives: int = 0
    asked_s: float | None = None
    draining: bool = False
    promise: Promise = NO_PROMISE
    totals: EngineTotals = field(default_factory=EngineTotals)

    @property
    def next(self) -> tuple[float, int]:
        """Time and kind of its next action without a new request."""
        if self.engine is None:
            return inf, STEP
        if self.pending:
            return self.engine.clock.now(), DELIVER
        return self.engine.next_s, STEP


class SimulatedFleet:
    """One run of several engines. `estimates(seed)`: initial estimates of an engine's policy."""

    def __init__(
        self,
        arrivals: Sequence[Arrival],
        scheduler: SchedulerConfig,
        machine: Machine,
        plan: FleetPlan,
        estimates: Callable[[int], Estimates],
        seed: int = 0,
    ) -> None:
        self.plan = plan
        self.now_s = 0.0
        self.calls: dict[str, FleetRequest] = {}  # live ones, by name
        self.slots = [SimulatedReplica(number) for number in range(plan.most)]
        self.placer = Placer(plan.router, range(plan.most), blocks=machine.num_blocks, seed=seed)
        self._arrivals = arrivals
        self._lives = lifetimes(arrivals)
        self._scheduler = scheduler
        self._machine = machine
        self._estimates = estimates
        self._seed = seed
        self._number = 0  # of the next arrival
        self._elapsed_s = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._reasons: Counter[str] = Counter()
        self._engine_of: list[int | None] = [None] * len(arrivals)
        nothing = SimulationResult(self._lives, 0.0, 0.0, 0, 0)
        self.record = FleetRun(nothing, [slot.totals for slot in self.slots], self._engine_of, self._reasons)

    def run(self) -> FleetRun:
        """Run to the end. Raise the errors of `simulate`."""
        for slot in self.slots:
            if slot.number < self.plan.replicas:
                slot.asked_s = 0.0
                self._start(slot)
            else:
                self.placer.set_available(slot.number, False)
        for kill in self.plan.kills:
            self.at(kill.at_s, partial(self._kill, self.slots[kill.engine]))
        if len(self.slots) > 1:
            self.at(CHECK_INTERVAL_S, self._check_queues)
        while self._turn():
            pass
        self._events.clear()  # those that are left refer to the fleet
        return self._result()

    def at(self, at_s: float, event: Callable[[], None]) -> None:
        heappush(self._events, (at_s, next(self._order), event))

    def calls_of(self, slot: SimulatedReplica) -> list[FleetRequest]:
        """Return the requests that the engine has."""
        return [call for call in self.calls.values() if call.engine == slot.number]

    # --- time ---------------------------------------------------------------------------------------------------
    def _turn(self) -> bool:
        """Do the next action; return False once all is done."""
        slot = min(self.slots, key=_next)
        due = slot.next
        arriving = self._number < len(self._arrivals)
        if not (arriving or self.calls) and due[0] == inf:
            return False
        if arriving:
            due = min(due, (self._arrivals[self._number].at_s, ARRIVE))
        if self._events:
            due = min(due, (self._events[0][0], EVENT))
        self.now_s, what = due
        if what == DELIVER:
            self._deliver(slot)
        elif what == EVENT:
            heappop(self._events)[2]()
        elif what == ARRIVE:
            self._arrive()
        else:
            self._step(slot)
        return True

    def _step(self, slot: SimulatedReplica) -> None:
        """Run one turn of an engine. Decisions of its plan are delivered now, outputs of the step when it ends.

        The promise is published before the step's end, so that the router does not know the future.
        """
        assert slot.engine is not None
        engine = slot.engine
        engine.wake(self.now_s)
        for output in engine.launch():
            self._note(output)
        self._publish(slot)
        slot.pending = engine.settle()
        self._elapsed_s = max(self._elapsed_s, engine.clock.now())

    def _deliver(self, slot: SimulatedReplica) -> None:
        outputs, slot.pending = slot.pending, []
        for output in outputs:
            self._note(output)
        assert slot.engine is not None
        if not slot.engine.busy:
            self._publish(slot)

    def _publish(self, slot: SimulatedReplica) -> None:
        assert slot.engine is not None
        promise = slot.engine.core.promise(self.now_s)
        slot.promise = promise._replace(draining=True) if slot.draining else promise
        self.placer.update(slot.number, slot.promise)

    def _note(self, output: SequenceOutput) -> None:
        name, token_ids, _, _, started, end, _ = output
        call = self.calls.get(name.rpartition(":")[0])
        if call is None:
            return  # it was sent to another engine
        call.life.token_s += [self.now_s] * len(token_ids)
        if started is not None and call.placement is not None:
            self.placer.on_first_token(call.placement, started.cached_tokens)
        if end is not None:
            self._end(call, end)

    # --- requests -----------------------------------------------------------------------------------------------
    def _arrive(self) -> None:
        number, self._number = self._number, self._number + 1
        arrival = self._arrivals[number]
        self._place(FleetRequest(number, arrival, self._lives[number], self._keys(arrival)))

    def _keys(self, arrival: Arrival) -> list[bytes]:
        """Return keys of the prompt's full blocks, if the router uses them."""
        if self.plan.router not in PREFIX_AWARE or not self._machine.prefix_caching:
            return []
        return block_keys(arrival.prompt_ids, self._machine.block_size)

    def ask(self, call: FleetRequest) -> RoutingRequest:
        """Return the routing request for what is left of a request now."""
        slo, adapter = call.arrival.slo, call.arrival.adapter
        slo = None if slo is None else slo.for_output(call.arrival.output_len)
        ttft_s = slo.ttft_s if slo is not None else None
        tpot_s = slo.tpot_s if slo is not None else None
        e2e_s = slo.e2e_s if slo is not None else None
        return RoutingRequest(
            len(call.arrival.prompt_ids) + len(call.life.token_s),
            [int.from_bytes(key[:8], "little") for key in call.keys],
            self._machine.block_size,
            float(call.arrival.predicted_len or 0),
            inf if ttft_s is None or call.life.token_s else ttft_s - (self.now_s - call.life.arrival_s),
            inf if tpot_s is None else tpot_s,
            inf if e2e_s is None else e2e_s - (self.now_s - call.life.arrival_s),
            adapter=0 if adapter is None else adapter_key(adapter.digest),
            adapter_bytes=0 if adapter is None else adapter.num_bytes,
        )

    def _place(self, call: FleetRequest) -> None:
        begin = perf_counter()
        placement = self.placer.place(self.ask(call), self.now_s)
        self.record.router_s += perf_counter() - begin
        if placement is None:
            self.record.unplaced.append(call.number)
            self._give_up(call)
        else:
            self._send(call, placement)

    def _send(self, call: FleetRequest, placement: Placement) -> None:
        slot = self.slots[placement.engine]
        assert slot.engine is not None, "the router chooses running engines"
        self._reasons[placement.reason] += 1
        slot.totals.placed += 1
        self._forget(call)
        call.name = f"{call.number}.{call.attempts}" if call.attempts else str(call.number)
        call.attempts += 1
        call.engine = self._engine_of[call.number] = slot.number
        call.placement = placement
        self.calls[call.name] = call
        slot.engine.wake(self.now_s)
        slot.engine.add(self._add_of(call), call.arrival.output_len)

    def _add_of(self, call: FleetRequest) -> Add:
        """Return the message for the engine that gets the request; earlier outputs are repeated as `TOKEN`."""
        said, life = len(call.life.token_s), call.life
        add = add_of(call.arrival, call.name, self._machine.max_model_len)
        add.keys = b"".join(call.keys)
        add.outputs = [PriorOutput([TOKEN] * said, life.ttft_s)] if said else None
        return add

    def _forget(self, call: FleetRequest) -> None:
        """Remove a request from its engine."""
        self.calls.pop(call.name, None)
        call.engine = None

    def _give_up(self, call: FleetRequest) -> None:
        self._forget(call)
        call.life.reason = FinishReason.ERROR

    def _end(self, call: FleetRequest, end: End) -> None:
        unstarted = not call.life.token_s
        if unstarted and call.placement is not None:
            self.placer.on_unprefilled(call.placement)
        if unstarted and end.reason is FinishReason.REJECTED and self._retry(call):
            return
        self._forget(call)
        call.life.reason, call.life.rejection = end.reason, end.rejection
        call.life.waited = end.why.waited if end.why is not None else ()

    def _retry(self, call: FleetRequest) -> bool:
        """Send a rejected request to another engine once, if that engine's promise covers it."""
        if call.retried or call.engine is None:
            return False
        placement = self.placer.place_retry(self.ask(call), self.now_s, {call.engine})
        if placement is None:
            return False
        call.retried = True
        self.record.retries.append(call.number)
        self._send(call, placement)
        return True

    def _check_queues(self) -> None:
        """Move requests that wait too long for an engine to others, as the server does."""
        if self.calls or self._number < len(self._arrivals):
            self.at(self.now_s + CHECK_INTERVAL_S, self._check_queues)
        for slot in self.slots:
            if slot.engine is not None and not slot.draining:
                self._relieve(slot)

    def _relieve(self, slot: SimulatedReplica) -> None:
        def sent() -> Iterator[Unanswered[FleetRequest]]:
            for call in self.calls_of(slot):
                if not call.life.token_s:
                    slo = call.arrival.slo
                    movable = (slo is None or slo.empty) and not call.left_queue
                    yield Unanswered(call, call.life.arrival_s, 1, movable)

        for call, placement in overdue_moves(self.placer, slot.number, sent, self.ask, self.now_s):
            call.left_queue = True
            self.withdraw(slot, call)
            self._send(call, placement)

    def withdraw(self, slot: SimulatedReplica, call: FleetRequest) -> None:
        """Abort a request without output at its engine, to place it again."""
        assert slot.engine is not None and call.placement is not None
        slot.engine.core.abort([sequence_id(call.name, 0)])
        self.placer.on_unprefilled(call.placement)
        self.record.replaced.append(call.number)

    # --- engines ------------------------------------------------------------------------------------------------
    def _start(self, slot: SimulatedReplica) -> None:
        """Start an engine."""
        seed = self._seed + 1_000_003 * slot.number + 7919 * slot.lives
        slot.lives += 1
        slot.engine = SimulatedEngine(
            self._scheduler,
            self.plan.machine(slot.number, self._machine),
            estimates=self._estimates(seed),
            seed=seed,
            start_s=self.now_s,
        )
        self.placer.set_available(slot.number, True)
        self._publish(slot)

    def _kill(self, slot: SimulatedReplica) -> None:
        """Kill an engine: outputs of its step are lost, its requests are placed again, and it restarts later."""
        if slot.engine is None:
            return
        lost, draining = self.calls_of(slot), slot.draining
        slot.totals.deaths += 1
        self._stop(slot)
        if not draining:
            self.at(self.now_s + self.plan.start_s, partial(self._start, slot))
        elif slot.asked_s is not None:
            slot.totals.served_s += self.now_s - slot.asked_s
            slot.asked_s = None
        for call in lost:
            self._rescue(call)

    def _stop(self, slot: SimulatedReplica) -> None:
        assert slot.engine is not None
        add_up(slot.engine, slot.totals)
        slot.engine, slot.pending, slot.draining = None, [], False
        self.placer.set_available(slot.number, False)
        self.placer.reset(slot.number)

    def _rescue(self, call: FleetRequest) -> None:
        """Place a request again after its engine died. After its first token it resumes elsewhere.

        That happens only once, because the request itself may be what kills engines.
        """
        if not call.life.token_s:
            self.record.replaced.append(call.number)
        elif call.resumed:
            self.record.failed.append(call.number)
            self._give_up(call)
            return
        else:
            call.resumed = True
            self.record.resumed.append(call.number)
        self._place(call)

    # --- the end ------------------------------------------------------------------------------------------------
    def _result(self) -> FleetRun:
        for slot in self.slots:
            if slot.engine is not None:
                add_up(slot.engine, slot.totals)
            if slot.asked_s is not None:
                slot.totals.served_s += self._elapsed_s - slot.asked_s
        run, totals = self.record, self.record.engines
        run.simulation = SimulationResult(
            self._lives,
            self._elapsed_s,
            sum(each.busy_s for each in totals),
            sum(each.steps for each in totals),
            sum(each.preemptions for each in totals),
            kv_peak=max(each.kv_peak for each in totals),
            policy_s=sum(each.policy_s for each in totals),
        )
        return run


def add_up(engine: SimulatedEngine, totals: EngineTotals) -> None:
    """Add an engine's counters to the totals, at its end."""
    stats = engine.core.stats()
    totals.steps += stats.step
    totals.preemptions += stats.preemptions
    totals.busy_s += engine.runner.busy_s
    totals.policy_s += engine.policy.seconds
    totals.kv_peak = max(totals.kv_peak, engine.watch.kv_peak)
    totals.prefix_tokens += stats.prefix_queries
    totals.prefix_hits += stats.prefix_hits


def _next(slot: SimulatedReplica) -> tuple[float, int]:
    return slot.next
