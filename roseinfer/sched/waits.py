"""Wait times: how long each request has waited for each cause, as policy and scheduler name it from step to step.

Thousands of requests may wait, so a step must not touch each of them. Most wait for the *default cause*: there is a
clock for each cause, the clock of the current default cause runs, and a request notes all clocks when it joins. A
request that the policy names has its own cause and start time. So the cost of a step depends on what changes in it.
"""

from collections.abc import Collection
from operator import itemgetter
from typing import cast

from roseinfer.core.request import Request, Status
from roseinfer.core.slo import Cause, Forecast, Why
from roseinfer.sched.liveness import Liveness
from roseinfer.sched.policy import Decision, Explaining, Forecasting, Policy, implements
from roseinfer.sched.queue import WaitingQueue

_CAUSES = tuple(Cause)
# This module uses numbers for causes, because looking one up by its name takes longer than the work on it.
_NUMBER = {cause: number for number, cause in enumerate(_CAUSES)}
_TRANSIT, _STEP, _BLOCKS, _LOAD, _PARENT, _ADAPTER = (
    _NUMBER[cause] for cause in (Cause.TRANSIT, Cause.STEP, Cause.BLOCKS, Cause.LOAD, Cause.PARENT, Cause.ADAPTER)
)
_LOADS = (_LOAD, _ADAPTER)  # values of `Request.loading`
_OF_MECHANISM = (*_LOADS, _PARENT)  # policies do not decide about these
NO_FORECAST = Forecast()
_seconds = itemgetter(1)


class _Account:
    """Wait times of one request.

    It waits for `cause` since `since_s`, or for the default cause since the clocks showed `clocks_at_join`, or it runs
    since the plan of step `seated`. `steps`, `rows`: counts of earlier seats. `waited`: seconds by cause before that.
    `reported`: `waited` as last reported, None if it has changed since. `prefill_s`: seconds of steps that computed it
    before its first token, the last of which ended at `prefill_until_s`.
    """

    __slots__ = (
        "cause",
        "clocks_at_join",
        "forecast",
        "prefill_s",
        "prefill_until_s",
        "reported",
        "rows",
        "seated",
        "since_s",
        "steps",
        "waited",
    )

    def __init__(self, request: Request) -> None:
        self.waited: dict[int, float] = {}
        self.since_s = request.arrival_s
        if request.waited:
            self.waited = {_NUMBER[cause]: seconds for cause, seconds in request.waited.items()}
            self.since_s += sum(self.waited.values())
        self.reported: tuple[tuple[Cause, float], ...] | None = None
        self.cause: int | None = _TRANSIT
        self.clocks_at_join: list[float] | None = None
        self.seated: int | None = None
        self.steps = self.rows = 0
        self.prefill_s = self.prefill_until_s = 0.0
        self.forecast: Forecast | None = None


class WaitTimes:
    """Wait times of one scheduler's requests, from `add` to `ended`. Times are those of its plans, in seconds.

    Before the first plan that could have started it, a request waits for the step that ran when it arrived, or is in
    transit if none ran. A preempted request waits for blocks until the policy names another cause. A sample that shares
    a prompt waits for the cause of sample 0 and, once that has started, for the prompt.
    """

    def __init__(self, policy: Policy, queue: WaitingQueue, liveness: Liveness) -> None:
        self._policy = policy
        self._forecasting = policy if isinstance(policy, Forecasting) else None
        self._queue = queue
        self._liveness = liveness
        self._accounts: dict[str, _Account] = {}
        self._new: list[Request] = []  # added since the last plan
        self._loaded: list[Request] = []  # loaded since the last plan; the next one can start them
        self._parents: list[Request] = []  # running, and their siblings wait for the prompt
        self._clocks = [0.0] * len(_CAUSES)
        self._default = _NUMBER[Cause.OTHER]
        self._now_s = 0.0

    def add(self, request: Request, last_end_s: float) -> None:
        """Start the wait of a new request. `last_end_s`: when the newest step ended, inf if one runs."""
        account = self._accounts[request.request_id] = _Account(request)
        if account.since_s < last_end_s:
            account.cause = _STEP
        self._new.append(request)

    # --- within a plan ------------------------------------------------------------------------------------------
    def begin(self, now_s: float) -> None:
        """Start a plan: the causes of the last plan held until now."""
        self._run_clock(now_s)
        if self._parents:
            self._rejoin_samples()
        if self._loaded:
            self._rejoin_loaded()

    def started(self, request: Request, step: int) -> None:
        """Record that a request takes a seat in the plan of `step`. Call it before the policy is notified."""
        account = self._accounts[request.request_id]
        self._settle(account, self._now_s)
        account.seated = step
        if account.forecast is None and self._forecasting is not None:
            self._forecast(request, account, self._forecasting)
        if request.fork_of is None:
            others = self._queue.siblings(request)
            for other in others:
                self._set_cause(self._accounts[other.request_id], _PARENT)
            if others:
                self._parents.append(request)

    def preempted(self, request: Request, step: int) -> None:
        """Record that a request gives up its seat; it has no row in the step being planned."""
        account = self._accounts[request.request_id]
        assert account.seated is not None, "it ran"
        account.steps += step - account.seated
        account.rows += request.planned - request.rowless
        account.seated = None
        account.cause, account.since_s = _BLOCKS, self._now_s

    def prefilled(self, request: Request, planned_s: float, now_s: float) -> None:
        """Record that a step planned at `planned_s` has computed a request that has no token yet.

        Steps in flight overlap, and a preempted request has no seat in the rest of its step: no time counts twice.
        """
        account = self._accounts[request.request_id]
        until_s = now_s if account.seated is not None else min(now_s, account.since_s)
        account.prefill_s += max(0.0, until_s - max(planned_s, account.prefill_until_s))
        account.prefill_until_s = until_s

    def loading_changed(self, request: Request) -> None:
        """Record that a waiting request has begun or finished to wait for a load (`Request.loading`)."""
        if request.loading:
            self._set_cause(self._accounts[request.request_id], _NUMBER[request.loading])
        else:
            self._loaded.append(request)

    def update(self, decision: Decision, blocked_by: Cause | None, exhausted: Cause | None) -> None:
        """Update the causes of the requests that the plan has not started.

        `blocked_by`: what kept a request that the policy admitted from starting, and so all after it. If it is None,
        the policy names the default cause; a policy that names none leaves it at `exhausted`.
        """
        new, self._new = self._new, []
        if not self._queue:
            return
        for request in new:
            account = self._accounts.get(request.request_id)
            if account is not None and account.seated is None and account.cause not in _OF_MECHANISM:
                self._join_default(account)
        self._default = _NUMBER[blocked_by or exhausted or Cause.OTHER]
        if implements(type(decision), Explaining):
            try:
                self._apply_named_causes(cast(Explaining, decision), blocked_by)
            except Exception as error:  # outputs do not depend on it
                self._report_fault("wait_causes", error)

    def _apply_named_causes(self, decision: Explaining, blocked_by: Cause | None) -> None:
        """Apply the policy's causes, except to requests that the scheduler has started without the policy."""
        if blocked_by is None:
            self._default = _NUMBER[decision.default_cause()]
        for request, cause in decision.wait_causes():
            account = self._accounts.get(request.request_id)
            if account is None or account.seated is not None or account.cause in _OF_MECHANISM:
                continue
            self._set_cause(account, _NUMBER[cause])
            if request.fork_of is None:
                for other in self._queue.siblings(request):
                    self._set_cause(self._accounts[other.request_id], _NUMBER[cause])

    def _rejoin_loaded(self) -> None:
        """Let requests whose load is done wait for the default cause, if they still wait."""
        for request in self._loaded:
            account = self._accounts.get(request.request_id)
            if account is not None and account.seated is None and account.cause in _LOADS and not request.loading:
                self._join_default(account)
        self._loaded.clear()

    def _rejoin_samples(self) -> None:
        """Let samples wait for the default cause once sample 0 has computed the prompt or has ended."""
        for parent in self._parents:
            if parent.computed >= parent.prompt_len or parent.status is Status.FINISHED:
                accounts = [self._accounts[other.request_id] for other in self._queue.siblings(parent)]
                for account in accounts:
                    if account.cause == _PARENT:
                        self._join_default(account)
        self._parents = [p for p in self._parents if p.computed < p.prompt_len and p.status is not Status.FINISHED]

    # --- clocks -------------------------------------------------------------------------------------------------
    def _run_clock(self, now_s: float) -> None:
        if now_s > self._now_s:
            self._clocks[self._default] += now_s - self._now_s
            self._now_s = now_s

    def _settle(self, account: _Account, now_s: float) -> None:
        """Add the time since the request got its cause, or joined the default, to `waited`."""
        waited, cause, clocks_at_join = account.waited, account.cause, account.clocks_at_join
        account.reported = None
        if cause is None:
            assert clocks_at_join is not None, "it waits for the default cause"
            for number, (clock_s, joined_s) in enumerate(zip(self._clocks, clocks_at_join, strict=True)):
                if clock_s > joined_s:
                    waited[number] = waited.get(number, 0.0) + clock_s - joined_s
            cause, since_s = self._default, self._now_s
        else:
            since_s = account.since_s
        if now_s > since_s:
            waited[cause] = waited.get(cause, 0.0) + now_s - since_s

    def _join_default(self, account: _Account) -> None:
        if account.cause is not None:
            self._settle(account, self._now_s)
            account.cause, account.clocks_at_join = None, self._clocks.copy()

    def _set_cause(self, account: _Account, cause: int) -> None:
        if account.cause != cause:
            self._settle(account, self._now_s)
            account.cause, account.since_s = cause, self._now_s

    # --- reports ------------------------------------------------------------------------------------------------
    def cause(self, request: Request) -> Cause:
        """Return what a waiting request waits for at present."""
        number = self._accounts[request.request_id].cause
        return _CAUSES[self._default if number is None else number]

    def check_integrity(self, live: Collection[str]) -> None:
        """Raise AssertionError unless the requests are those in `live`, by id."""
        assert self._accounts.keys() == set(live), "wait times of a request that has ended, or none of a live one"

    def why(self, request: Request, now_s: float, steps: int) -> Why:
        """Report on a request that runs or has run. `steps`: number of steps done so far; later ones do not count."""
        account = self._accounts[request.request_id]
        if account.seated is None:  # preempted while its step ran
            self._run_clock(now_s)
            self._settle(account, now_s)
            account.since_s = now_s
            if account.cause is None:
                account.clocks_at_join = self._clocks.copy()
        return _why(request, account, steps, request.in_flight)

    def ended(self, request: Request, now_s: float, steps: int, rows_after: int) -> Why:
        """Report on a request for the last time and forget it. Call it before the policy is notified.

        `steps`: number of steps that count; it has `rows_after` rows in later ones.
        """
        account = self._accounts.pop(request.request_id)
        if account.seated is None:
            self._settle(account, now_s)
            if account.forecast is None and self._forecasting is not None:
                self._forecast(request, account, self._forecasting)
        return _why(request, account, steps, rows_after)

    def _forecast(self, request: Request, account: _Account, policy: Forecasting) -> None:
        account.forecast = NO_FORECAST
        try:
            account.forecast = Forecast(*policy.forecast(request))
        except Exception as error:  # as above
            self._report_fault("forecast", error)

    def _report_fault(self, method: str, error: Exception) -> None:
        self._liveness.report_fault(self._policy, f"failed in {method}() ({type(error).__name__}: {error})")


def why_unqueued(request: Request, now_s: float) -> Why:
    """Report on a request that ends before a scheduler has received it."""
    account = _Account(request)
    account.waited[_TRANSIT] = account.waited.get(_TRANSIT, 0.0) + now_s - account.since_s
    return _why(request, account, 0, 0)


def _why(request: Request, account: _Account, steps: int, rows_after: int) -> Why:
    planned, rows = account.steps, account.rows
    if account.seated is not None:
        planned += steps - account.seated
        rows += request.planned - request.rowless - rows_after
    if account.reported is None:  # most requests are reported twice: at their first token and their end
        waited = [(_CAUSES[number], seconds) for number, seconds in account.waited.items() if seconds > 0]
        if len(waited) > 1:
            waited.sort(key=_seconds, reverse=True)
        account.reported = tuple(waited)
    forecast = account.forecast or NO_FORECAST
    return Why(account.reported, forecast, request.chunks, planned, planned - rows, account.prefill_s)
