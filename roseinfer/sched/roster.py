"""Roster: every live request of an engine, which waits, runs, or has ended while submitted steps still name it."""

from roseinfer.core.outputs import COMPLETE, End, FinishReason, RequestTimes, SequenceOutput
from roseinfer.core.request import Request, Status
from roseinfer.core.slo import Rejection
from roseinfer.kv.manager import KvManager
from roseinfer.sched.adapters import AdapterSlots
from roseinfer.sched.drafting.drafting import Drafting
from roseinfer.sched.liveness import Liveness
from roseinfer.sched.offload import KvOffload, OffloadCosts
from roseinfer.sched.policy import Admitted, Decision, Ended, Policy, Queued, rejectable
from roseinfer.sched.queue import Expiries, WaitingQueue
from roseinfer.sched.snapshots import Snapshots
from roseinfer.sched.waits import WaitTimes


class Roster:
    """Live requests of one Scheduler. Every change of a request's state is a method, which also notifies `policy`.

    `requests`: all live requests by id. `guided`: ids of those with a guide. `step`: number of the next plan.
    `steps_done`: number of the next result. `free_seats`: seats without a request. `released`: seats that became free
    since the last plan, which the next plan has to name.
    """

    def __init__(
        self,
        seats: int,
        kv: KvManager,
        policy: Policy,
        offloading: OffloadCosts | None,
        drafting: Drafting | None = None,
        adapters: AdapterSlots | None = None,
    ) -> None:
        """`offloading`: costs of copies, used if the KV cache has blocks in host memory."""
        self.policy = policy
        self.step = self.steps_done = 0
        self.requests: dict[str, Request] = {}
        self.waiting = WaitingQueue(self.awaits_parent)
        self.running: dict[str, Request] = {}
        self.guided: set[str] = set()
        self.seats = seats
        self.free_seats = list(range(seats - 1, -1, -1))
        self.released: list[int] = []
        self.preemptions = 0
        self.expiries = Expiries(self.requests)
        self.liveness = Liveness(seats)
        self.waits = WaitTimes(policy, self.waiting, self.liveness)
        self.offload: KvOffload | None = None
        if kv.host is not None:
            self.offload = KvOffload(kv, kv.host, offloading or OffloadCosts(), self._loading_changed)
        self.snapshots = None if kv.states is None else Snapshots(kv, kv.states, self.waiting)
        self._kv = kv
        self.drafting = drafting
        self.adapters = adapters
        if adapters is not None:
            adapters.attach(self._loading_changed, self._fail)
        self._ended: list[SequenceOutput] = []

    @property
    def in_flight(self) -> int:
        """Count of steps that are planned and not done."""
        return self.step - self.steps_done

    def awaits_parent(self, request: Request) -> bool:
        """True if the request is a fork whose parent is still computing the prompt, so that it is computed once."""
        if request.fork_of is None:
            return False
        parent = self.requests.get(request.fork_of)
        return parent is not None and parent.status is not Status.FINISHED and parent.computed < parent.prompt_len

    def report_fault(self, what: str) -> None:
        """Record an invalid answer of the policy."""
        self.liveness.report_fault(self.policy, what)

    def _loading_changed(self, request: Request) -> None:
        """Update queue and wait times after `request.loading` has changed."""
        if self.adapters is not None:
            self.adapters.recheck(request)
        self.waiting.recheck(request)
        self.waits.loading_changed(request)

    # --- changes of state ---------------------------------------------------------------------------------------
    def add(self, request: Request, last_end_s: float) -> None:
        """Queue a request whose id is new. `last_end_s`: when the newest step ended, inf if one runs."""
        self.requests[request.request_id] = request
        if request.guided:
            self.guided.add(request.request_id)
        self._kv.open(request.request_id, request.meta.prefix_scope, request.keys)
        if request.resumed:
            self.waiting.add_first(request)
        else:
            self.waiting.add(request)
        self.expiries.add(request)
        self.waits.add(request, last_end_s)
        if self.adapters is not None:
            self.adapters.join(request)
        self.policy.observe(Queued(request))

    def start(self, request: Request, now_s: float) -> None:
        """Mark a waiting request as running; it has its seat and its first row."""
        self.waiting.discard(request)
        self.running[request.request_id] = request
        request.status = Status.RUNNING
        if request.preemptions == 0:
            request.scheduled_s = now_s
        if self.snapshots is not None:
            self.snapshots.settle_family(request)
        self.waits.started(request, self.step)
        self.policy.observe(Admitted(request.request_id, now_s, request.cached_tokens))

    def preempt(self, victim: Request) -> None:
        """Send a running request back to the head of the queue, to be computed again from its tokens.

        The caller has taken its row out of the step being planned. Tokens of submitted steps still count. Until these
        steps are done, the request holds its seat and blocks.
        """
        self.waits.preempted(victim, self.step)
        del self.running[victim.request_id]
        victim.status = Status.WAITING
        victim.preemptions += 1
        self.preemptions += 1
        self.liveness.preempted(self.policy)
        self.waiting.add_first(victim)
        if self.adapters is not None:
            self.adapters.join(victim)
        self.policy.observe(Queued(victim))
        if victim.in_flight == 0:
            self.vacate(victim)

    def finish(
        self,
        request: Request,
        reason: FinishReason,
        now_s: float,
        *,
        stop_token: int | None = None,
        error: str | None = None,
        rejection: Rejection | None = None,
    ) -> End:
        """End a request in any state. Its seat and blocks are freed when no submitted step names it any more."""
        self.running.pop(request.request_id, None)
        self.waiting.discard(request)
        if self.offload is not None:
            self.offload.drop_load(request)
        self.liveness.progressed()
        request.status = Status.FINISHED
        # Steps after its last token do not count, though one of them may compute it in vain.
        steps, rows_after = (self.steps_done, request.in_flight) if reason in COMPLETE else (self.step, 0)
        why = self.waits.ended(request, now_s, steps, rows_after)
        self.guided.discard(request.request_id)
        if self.drafting is not None:
            self.drafting.ended(request)
        if self.snapshots is not None:
            self.snapshots.ended(request)
        if self.adapters is not None:
            self.adapters.leave(request)
        if request.in_flight == 0:
            self.vacate(request)
        self.policy.observe(Ended(request.request_id, now_s, reason, request.num_outputs))
        times = RequestTimes(request.arrival_s, request.scheduled_s, request.first_token_s, now_s)
        return End(reason, times, stop_token, error, request.preemptions, rejection, why)

    def vacate(self, request: Request) -> None:
        """Free the seat and blocks of a request that no submitted step names any more.

        An ended request is removed. A preempted one stays in the queue, and its blocks may be stored in host memory.
        """
        if request.seat is not None:
            self.free_seats.append(request.seat)
            self.released.append(request.seat)
            if self.adapters is not None:
                self.adapters.release(request)
        if request.status is Status.FINISHED:
            request.seat = None
            self._kv.close(request.request_id)
            del self.requests[request.request_id]
        else:
            if self.offload is not None:
                self.offload.before_release(request)
            if self.snapshots is not None:
                self.snapshots.settle(request)
            self._kv.release(request.request_id)
            request.reset_computed()

    # --- ends during a plan -------------------------------------------------------------------------------------
    def reject(self, decision: Decision, now_s: float) -> bool:
        """Reject the requests that the policy names, each with the samples that wait for its prompt.

        Return False if there were none.
        """
        any_rejected = False
        for request, rejection in tuple(decision.rejections()):
            if request not in self.waiting or not rejectable(request):
                self.report_fault("rejected a request that is not waiting or has already run")
                continue
            for rejected in self.waiting.family(request):
                end = self.finish(rejected, FinishReason.REJECTED, now_s, rejection=rejection)
                self._ended.append(SequenceOutput(rejected.request_id, end=end))
            any_rejected = True
        return any_rejected

    def expire(self, now_s: float) -> None:
        """End the requests whose time to live has passed."""
        for request in self.expiries.due(now_s):
            end = self.finish(request, FinishReason.TIMEOUT, now_s)
            self._ended.append(SequenceOutput(request.request_id, end=end))

    def _fail(self, request: Request, error: str, now_s: float) -> None:
        """End a waiting request whose adapter cannot be used."""
        end = self.finish(request, FinishReason.ERROR, now_s, error=error)
        self._ended.append(SequenceOutput(request.request_id, end=end))

    def take_ended(self) -> list[SequenceOutput]:
        """Return the requests that ended during plans since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def take_released(self) -> list[int]:
        """Return the seats that became free since the last call."""
        released, self.released = self.released, []
        return released

    # --- inspection ---------------------------------------------------------------------------------------------
    def check_integrity(self) -> None:
        """Raise AssertionError if seats or queues disagree."""
        seated = [r.seat for r in self.requests.values() if r.seat is not None]
        assert sorted(seated + self.free_seats) == list(range(self.seats)), "seats lost or doubled"
        assert all(r.status is Status.RUNNING and r.seat is not None for r in self.running.values())
        assert all(r.status is Status.WAITING for r in self.waiting)
        assert not any(r in self.waiting for r in self.running.values())
        self.waiting.check_integrity()
        self.waits.check_integrity([r.request_id for r in self.requests.values() if r.status is not Status.FINISHED])
        if self.offload is not None:
            self.offload.check_integrity()
        if self.adapters is not None:
            self.adapters.check_integrity(self.requests.values())
        for r in self.requests.values():
            # A failed request may have been planned on a token that never arrived.
            assert r.status is Status.FINISHED or r.computed <= r.planned <= len(r.tokens) + r.pending, r
            assert 0 <= r.pending <= r.in_flight, r
