"""What requests wait for, and for how long each: by cause, as policy and mechanism name it from step to step.

Thousands may wait for nothing else than those before them, so a step must not touch each. Who is not named waits *in
line*: the line has a clock for each cause, of which one runs, and whoever joins it notes what they say. Who is named by
the policy has a cause of its own, and since when. So a step costs what changes in it.
"""

from operator import itemgetter
from typing import cast

from roseinfer.core.request import Request, Status
from roseinfer.core.slo import Cause, Forecast, Why
from roseinfer.sched.liveness import Liveness
from roseinfer.sched.policy import Decision, Explaining, Forecasting, Policy, implements
from roseinfer.sched.queue import WaitingQueue

_CAUSES = tuple(Cause)
# Causes are numbers in here: to look one up by its name takes longer than all that is done with it.
_NUMBER = {cause: number for number, cause in enumerate(_CAUSES)}
_TRANSIT, _STEP, _BLOCKS, _LOAD, _PARENT = (
    _NUMBER[cause] for cause in (Cause.TRANSIT, Cause.STEP, Cause.BLOCKS, Cause.LOAD, Cause.PARENT)
)
_MECHANISM = (_LOAD, _PARENT)  # policies have no say in these
NOTHING = Forecast()
_seconds = itemgetter(1)


class _Account:
    """Of one request. It waits for `cause` since `since_s`, or in line since its clocks said `joined`, or runs since
    the plan of step `seated`. `steps`, `rows`: of earlier seats. `waited`: until then, in seconds; `told`: the same as
    it was told last, None if that is no longer true.
    """

    __slots__ = ("cause", "forecast", "joined", "rows", "seated", "since_s", "steps", "told", "waited")

    def __init__(self, request: Request) -> None:
        self.waited: dict[int, float] = {}
        self.since_s = request.arrival_s
        if request.waited:
            self.waited = {_NUMBER[cause]: seconds for cause, seconds in request.waited.items()}
            self.since_s += sum(self.waited.values())
        self.told: tuple[tuple[Cause, float], ...] | None = None
        self.cause: int | None = _TRANSIT
        self.joined: list[float] | None = None
        self.seated: int | None = None
        self.steps = self.rows = 0
        self.forecast: Forecast | None = None


class WaitTimes:
    """Of one scheduler's requests, from `add` to `ended`. Times are those of its plans, in seconds.

    Until the first plan that could have started it a request waits for the step to end that ran when it was sent, or is
    on its way if none did. One that is preempted waits for blocks, until the policy says more. A sample that shares a
    prompt waits for what sample 0 waits for, and once that has started for the prompt.
    """

    def __init__(self, policy: Policy, queue: WaitingQueue, liveness: Liveness) -> None:
        self._policy = policy
        self._forecasting = policy if isinstance(policy, Forecasting) else None
        self._queue = queue
        self._liveness = liveness
        self._accounts: dict[str, _Account] = {}
        self._fresh: list[Request] = []  # came since the last plan
        self._loaded: list[Request] = []  # since the last plan: nothing could start them before the next one
        self._parents: list[Request] = []  # started, and others wait for them to compute the prompt
        self._clocks = [0.0] * len(_CAUSES)
        self._named, self._line = Cause.OTHER, _NUMBER[Cause.OTHER]
        self._run = [self._line]  # the clocks that have run
        self._now_s = 0.0

    def add(self, request: Request, last_end_s: float) -> None:
        """`last_end_s`: when the newest step ended, inf if one runs."""
        account = self._accounts[request.request_id] = _Account(request)
        if account.since_s < last_end_s:
            account.cause = _STEP
        self._fresh.append(request)

    # --- within a plan ------------------------------------------------------------------------------------------
    def begin(self, now_s: float) -> None:
        """A plan is being made: what was named in the last one held until now."""
        if now_s > self._now_s:
            self._clocks[self._line] += now_s - self._now_s
            self._now_s = now_s
        if self._parents:
            self._release_samples()
        if self._loaded:
            self._join_loaded()

    def started(self, request: Request, step: int) -> None:
        """A request takes a seat in the plan of a step. To be called before the policy hears of it."""
        account = self._accounts[request.request_id]
        self._settle(account, self._now_s)
        account.seated = step
        if account.forecast is None and self._forecasting is not None:
            self._forecast(request, account, self._forecasting)
        if request.fork_of is None:
            others = self._queue.behind(request)
            for other in others:
                self._name(self._accounts[other.request_id], _PARENT)
            if others:
                self._parents.append(request)

    def preempted(self, request: Request, step: int) -> None:
        """A request gives up its seat, without a row in the step that is being planned."""
        account = self._accounts[request.request_id]
        assert account.seated is not None, "it ran"
        account.steps += step - account.seated
        account.rows += request.planned - request.rowless
        account.seated = None
        account.cause, account.since_s = _BLOCKS, self._now_s

    def loads(self, request: Request) -> None:
        """A waiting request has begun to wait for a load, or does so no longer: see `Request.loading`."""
        if request.loading:
            self._name(self._accounts[request.request_id], _LOAD)
        else:
            self._loaded.append(request)

    def explain(self, decision: Decision, lacking: Cause | None, exhausted: Cause | None) -> None:
        """What those wait for whom the plan has not started. `lacking`: what kept one from starting whom the policy let
        start, and so the line behind it. If that is None it is for the policy to say and, where that says nothing, what
        is `exhausted`.
        """
        fresh, self._fresh = self._fresh, []
        if not self._queue:
            return
        for request in fresh:
            account = self._accounts.get(request.request_id)
            if account is not None and account.seated is None and account.cause not in _MECHANISM:
                self._join(account)
        self._set_line(lacking or exhausted or Cause.OTHER)
        if implements(type(decision), Explaining):
            try:
                self._ask(cast(Explaining, decision), lacking)
            except Exception as error:  # the policy's: nobody's output depends on it
                self._fault("what requests wait for", error)

    def _ask(self, decision: Explaining, lacking: Cause | None) -> None:
        """Who does not wait is left out: the mechanism may have started it although the policy said no."""
        if lacking is None:
            self._set_line(decision.default_cause())
        for request, cause in decision.wait_causes():
            account = self._accounts.get(request.request_id)
            if account is None or account.seated is not None or account.cause in _MECHANISM:
                continue
            self._name(account, _NUMBER[cause])
            if request.fork_of is None:
                for other in self._queue.behind(request):
                    self._name(self._accounts[other.request_id], _NUMBER[cause])

    def _join_loaded(self) -> None:
        """Those whose load is over wait like all others from now on, if they still do."""
        for request in self._loaded:
            account = self._accounts.get(request.request_id)
            if account is not None and account.cause == _LOAD:
                self._join(account)
        self._loaded.clear()

    def _release_samples(self) -> None:
        """Those whose prompt is computed, or will not be by sample 0, wait like all others from now on."""
        for parent in self._parents:
            if parent.computed >= parent.prompt_len or parent.status is Status.FINISHED:
                accounts = [self._accounts[other.request_id] for other in self._queue.behind(parent)]
                for account in accounts:
                    if account.cause == _PARENT:
                        self._join(account)
        self._parents = [p for p in self._parents if p.computed < p.prompt_len and p.status is not Status.FINISHED]

    # --- clocks -------------------------------------------------------------------------------------------------
    def _set_line(self, cause: Cause) -> None:
        if cause is not self._named:
            self._named, self._line = cause, _NUMBER[cause]
            if self._line not in self._run:
                self._run.append(self._line)

    def _settle(self, account: _Account, now_s: float) -> None:
        """Add to `waited` what it has waited for since it was named, or joined the line."""
        waited, cause, joined = account.waited, account.cause, account.joined
        account.told = None
        if cause is None:
            assert joined is not None, "it stands in line"
            clocks = self._clocks
            for number in self._run:
                if clocks[number] > joined[number]:
                    waited[number] = waited.get(number, 0.0) + clocks[number] - joined[number]
            cause, since_s = self._line, self._now_s
        else:
            since_s = account.since_s
        if now_s > since_s:
            waited[cause] = waited.get(cause, 0.0) + now_s - since_s

    def _join(self, account: _Account) -> None:
        if account.cause is not None:
            self._settle(account, self._now_s)
            account.cause, account.joined = None, self._clocks.copy()

    def _name(self, account: _Account, cause: int) -> None:
        if account.cause != cause:
            self._settle(account, self._now_s)
            account.cause, account.since_s = cause, self._now_s

    # --- what is said -------------------------------------------------------------------------------------------
    def why(self, request: Request, steps: int) -> Why:
        """Of a request that has run or runs. `steps`: how many were planned by now."""
        return _say(request, self._accounts[request.request_id], steps)

    def ended(self, request: Request, now_s: float, steps: int) -> Why:
        """The last of a request, running or not. To be called before the policy hears of it."""
        account = self._accounts.pop(request.request_id)
        if account.seated is None:
            self._settle(account, now_s)
            if account.forecast is None and self._forecasting is not None:
                self._forecast(request, account, self._forecasting)
        return _say(request, account, steps)

    def _forecast(self, request: Request, account: _Account, policy: Forecasting) -> None:
        account.forecast = NOTHING
        try:
            account.forecast = Forecast(*policy.forecast(request))
        except Exception as error:  # as above
            self._fault("what it foresaw", error)

    def _fault(self, what: str, error: Exception) -> None:
        self._liveness.fault(self._policy, f"cannot say {what} ({type(error).__name__}: {error})")


def why_unqueued(request: Request, now_s: float) -> Why:
    """Of one that ends before a scheduler has heard of it."""
    account = _Account(request)
    account.waited[_TRANSIT] = account.waited.get(_TRANSIT, 0.0) + now_s - account.since_s
    return _say(request, account, 0)


def _say(request: Request, account: _Account, steps: int) -> Why:
    planned, rows = account.steps, account.rows
    if account.seated is not None:
        planned += steps - account.seated
        rows += request.planned - request.rowless
    if account.told is None:  # twice of most requests: at their first token, and when they end
        waited = [(_CAUSES[number], seconds) for number, seconds in account.waited.items() if seconds > 0]
        if len(waited) > 1:
            waited.sort(key=_seconds, reverse=True)
        account.told = tuple(waited)
    return Why(account.told, account.forecast or NOTHING, request.chunks, planned, planned - rows)
