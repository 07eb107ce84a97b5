"""Every live request of an engine and where it is: it waits, it runs, or it has ended and steps still name it."""

from roseinfer.core.outputs import End, FinishReason, RequestOutput, RequestTimes
from roseinfer.core.request import Request, Status
from roseinfer.core.slo import Rejection
from roseinfer.kv.manager import KvManager
from roseinfer.sched.events import Admitted, Ended, Queued
from roseinfer.sched.liveness import Liveness
from roseinfer.sched.offload import KvOffload, OffloadCosts
from roseinfer.sched.policy import Decision, Policy, rejectable
from roseinfer.sched.queue import Expiries, WaitingQueue
from roseinfer.sched.waits import WaitTimes


class Roster:
    """Of one scheduler. Every way of a request from one place to another is a method here, and `policy` is told of it.

    `requests`: all that are live, by id; `guided`: the ids of those that have a guide. `step`: of the next plan;
    `steps_done`: of the next result. `free_seats` and `released`: those that nobody has, and of them those that the
    next plan has to name.
    """

    def __init__(self, seats: int, kv: KvManager, policy: Policy, offloading: OffloadCosts | None) -> None:
        """offloading: what copies cost, if the KV cache has blocks in host memory."""
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
            self.offload = KvOffload(kv, kv.host, offloading or OffloadCosts(), self._recheck)
        self._kv = kv
        self._ended: list[RequestOutput] = []

    @property
    def in_flight(self) -> int:
        """Steps that are planned and not done."""
        return self.step - self.steps_done

    def awaits_parent(self, request: Request) -> bool:
        """A fork waits until its parent has computed the prompt, so that it need not be computed twice."""
        if request.fork_of is None:
            return False
        parent = self.requests.get(request.fork_of)
        return parent is not None and parent.status is not Status.FINISHED and parent.computed < parent.prompt_len

    def fault(self, what: str) -> None:
        """The policy has answered what makes no sense."""
        self.liveness.fault(self.policy, what)

    def _recheck(self, request: Request) -> None:
        """A request has begun to wait for a load, or waits for it no longer."""
        self.waiting.recheck(request)
        self.waits.loads(request)

    # --- from place to place ------------------------------------------------------------------------------------
    def add(self, request: Request, since_s: float) -> None:
        """Queue a request whose id is new. `since_s`: as `WaitTimes.add` has it."""
        self.requests[request.request_id] = request
        if request.guided:
            self.guided.add(request.request_id)
        self._kv.open(request.request_id, request.meta.cache_salt, request.keys)
        if request.resumed:
            self.waiting.add_first(request)
        else:
            self.waiting.add(request)
        self.expiries.add(request)
        self.waits.add(request, since_s)
        self.policy.observe(Queued(request))

    def run(self, request: Request, now_s: float) -> None:
        """A waiting request has its seat and its first row: it runs."""
        self.waiting.discard(request)
        self.running[request.request_id] = request
        request.status = Status.RUNNING
        if request.preemptions == 0:
            request.scheduled_s = now_s
        self.waits.started(request, self.step)
        self.policy.observe(Admitted(request.request_id, now_s, request.cached_tokens))

    def preempt(self, victim: Request) -> None:
        """Send a running request without a row in the next step back to the head of the queue; it will be computed
        again from its tokens.
        """
        self.waits.preempted(victim, self.step)
        del self.running[victim.request_id]
        victim.status = Status.WAITING
        victim.preemptions += 1
        self.preemptions += 1
        self.liveness.preempted(self.policy)
        self.waiting.add_first(victim)
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
        """End a request, wherever it is. What it holds is free once no submitted step names it."""
        self.running.pop(request.request_id, None)
        self.waiting.discard(request)
        if self.offload is not None:
            self.offload.forget(request)
        self.liveness.got_further()
        request.status = Status.FINISHED
        # Nothing of it is in the steps that were planned when its last token was on the way.
        why = self.waits.ended(request, now_s, self.steps_done if reason is FinishReason.LENGTH else self.step)
        self.guided.discard(request.request_id)
        if request.in_flight == 0:
            self.vacate(request)
        self.policy.observe(Ended(request.request_id, now_s, reason, request.num_outputs))
        times = RequestTimes(request.arrival_s, request.scheduled_s, request.first_token_s, now_s)
        return End(reason, times, stop_token, error, request.preemptions, rejection, why)

    def vacate(self, request: Request) -> None:
        """No submitted step names the request any more: its seat and blocks can be reused."""
        if request.seat is not None:
            self.free_seats.append(request.seat)
            self.released.append(request.seat)
        if request.status is Status.FINISHED:
            request.seat = None
            self._kv.close(request.request_id)
            del self.requests[request.request_id]
        else:
            if self.offload is not None:
                self.offload.losing(request)
            self._kv.release(request.request_id)
            request.restart()

    # --- ends that a plan decides -------------------------------------------------------------------------------
    def reject(self, decision: Decision, now_s: float) -> bool:
        """Reject requests, and with each the samples that wait for it to compute their prompt. False: none."""
        any_went = False
        for request, rejection in tuple(decision.rejections()):
            if request not in self.waiting or not rejectable(request):
                self.fault("turned away a request that does not wait, or has begun")
                continue
            for refused in self.waiting.family(request):
                end = self.finish(refused, FinishReason.REJECTED, now_s, rejection=rejection)
                self._ended.append(RequestOutput(refused.request_id, end=end))
            any_went = True
        return any_went

    def expire(self, now_s: float) -> None:
        """End the requests whose time to live is over."""
        for request in self.expiries.due(now_s):
            end = self.finish(request, FinishReason.TIMEOUT, now_s)
            self._ended.append(RequestOutput(request.request_id, end=end))

    def take_ended(self) -> list[RequestOutput]:
        """The ends of the two above, each once."""
        ended, self._ended = self._ended, []
        return ended

    def take_released(self) -> list[int]:
        """The seats that have become free, each once."""
        released, self.released = self.released, []
        return released

    # --- looking in ---------------------------------------------------------------------------------------------
    def check_integrity(self) -> None:
        """Raise AssertionError if seats or queues disagree."""
        seated = [r.seat for r in self.requests.values() if r.seat is not None]
        assert sorted(seated + self.free_seats) == list(range(self.seats)), "seats lost or doubled"
        assert all(r.status is Status.RUNNING and r.seat is not None for r in self.running.values())
        assert all(r.status is Status.WAITING for r in self.waiting)
        assert not any(r in self.waiting for r in self.running.values())
        self.waiting.check_integrity()
        if self.offload is not None:
            self.offload.check_integrity()
        for r in self.requests.values():
            # The token that a failed request's next step was planned on never came.
            assert r.status is Status.FINISHED or r.computed <= r.planned <= len(r.tokens) + r.pending, r
            assert 0 <= r.pending <= r.in_flight, r
