"""Budget of engine time for constraints: per request, and for all requests.

Plain arithmetic on durations that the caller measures. Each request has a debt: its constraint's time adds to it, and
each step forgives a part. So a constraint may be slow now and then, but not for long. A second debt, of all requests
together, bounds what many requests take that each stay within their own.
"""

from time import perf_counter, thread_time

# Time that each row of a step may take for free. Masks of ordinary schemas take 6 to 60 us, 128 us at the 99th
# percentile (docs/structured-outputs.md): what adds up to little for each row says nothing about a single request.
FREE_ROW_S = 50e-6
# Debt forgiven per step: a share of the step's time without constraints, but at least these seconds.
MIN_REQUEST_S = 2e-3
REQUEST_SHARE = 0.5
MIN_STEP_S = 4e-3
STEP_SHARE = 0.8
# The largest debts.
MAX_REQUEST_DEBT_S = 0.15
MAX_STEP_DEBT_S = 0.2
# A request's recent time, by which the costliest is chosen, loses this share with each step.
_FADING_SHARE = 0.1
_NOTHING_S = 1e-6
# Shorter calls are measured by the wall clock alone, which is cheaper to read.
SHORT_CALL_S = 0.5e-3


class HostClock:
    """The clocks of this thread. Overridden by tests."""

    wall_s = staticmethod(perf_counter)
    cpu_s = staticmethod(thread_time)


class Timer:
    """Measures calls on one thread, one after the other. Time in which the thread did not run does not count."""

    def __init__(self, clock: HostClock) -> None:
        self._clock = clock
        self._wall_s = clock.wall_s()
        self._cpu_s = clock.cpu_s()

    def lap_s(self) -> float:
        """Return the time since the last call of this, or since the start."""
        now_s = self._clock.wall_s()
        took_s = now_s - self._wall_s
        self._wall_s = now_s
        if took_s < SHORT_CALL_S:
            return took_s
        cpu_s = self._clock.cpu_s()
        used_s = cpu_s - self._cpu_s
        self._cpu_s = cpu_s
        return min(took_s, used_s)


class MaskBudget:
    """Debts of requests and of the engine. Requests without recent debt take no memory and no time."""

    def __init__(self) -> None:
        self._debt_s: dict[str, float] = {}
        self._recent_s: dict[str, float] = {}
        self._total_s = 0.0
        self._step_s = 0.0

    def begin_step(self, other_s: float) -> None:
        """Forgive a step's part. `other_s`: time since the last step's masks, without the time of constraints."""
        self._step_s = 0.0
        if not self._recent_s:
            self._total_s = 0.0
            return
        part_s = max(MIN_REQUEST_S, REQUEST_SHARE * other_s)
        self._total_s = max(0.0, self._total_s - max(MIN_STEP_S, STEP_SHARE * other_s))
        for request_id, recent_s in list(self._recent_s.items()):
            self._debt_s[request_id] = max(0.0, self._debt_s[request_id] - part_s)
            self._recent_s[request_id] = recent_s * (1 - _FADING_SHARE)
            if not self._debt_s[request_id] and self._recent_s[request_id] < _NOTHING_S:
                self.forget(request_id)

    def charge(self, request_id: str, seconds: float, rows: int = 1) -> list[str]:
        """Add the time that a request's constraint took for `rows` rows. Return the requests that have to end."""
        seconds -= rows * FREE_ROW_S
        if seconds <= 0.0:
            return []
        self._debt_s[request_id] = self._debt_s.get(request_id, 0.0) + seconds
        self._recent_s[request_id] = self._recent_s.get(request_id, 0.0) + seconds
        self._total_s += seconds
        self._step_s += seconds
        ended = []
        # Late in a step that has taken too much already, nothing costly is computed any more.
        is_late = self._step_s > MAX_STEP_DEBT_S and seconds > MIN_REQUEST_S
        if is_late or self._debt_s[request_id] > MAX_REQUEST_DEBT_S:
            ended.append(request_id)
            self._end(request_id)
        while self._total_s > MAX_STEP_DEBT_S and self._recent_s:
            costliest = max(self._recent_s, key=self._recent_s.__getitem__)
            ended.append(costliest)
            self._end(costliest)
        return ended

    def forget(self, request_id: str) -> None:
        """Drop what is known of a request. The debt of all stays."""
        self._debt_s.pop(request_id, None)
        self._recent_s.pop(request_id, None)

    def _end(self, request_id: str) -> None:
        """Take a request's share out of the debt of all: those that remain need not pay it."""
        share = self._recent_s[request_id] / sum(self._recent_s.values())
        self._total_s *= 1 - share
        self.forget(request_id)
