"""Budget of engine time for constraints: per request, and for all requests.

Each request has a debt: the time of its constraint adds to it, and each step forgives a part. So a constraint may be
slow now and then, but not for long. The total debt bounds many requests that each stay within their own limit. This
module computes only; callers measure durations.
"""

from time import perf_counter, thread_time

# Free time per row and step. Masks of ordinary schemas take 6 to 60 us, 128 us at the 99th percentile
# (docs/how-to/structured-outputs.md). Small times add up over many rows but do not indicate a slow request.
FREE_ROW_S = 50e-6
# Debt forgiven per step: a share of the step's time without constraints, but at least this many seconds.
MIN_REQUEST_S = 2e-3
REQUEST_SHARE = 0.5
MIN_STEP_S = 4e-3
STEP_SHARE = 0.8
# Limits of the debts.
MAX_REQUEST_DEBT_S = 0.15
MAX_STEP_DEBT_S = 0.2
# A request's recent time decays by this share per step. The costliest request is chosen by it.
_DECAY_SHARE = 0.1
_MIN_RECENT_S = 1e-6
# Masks of a step are timed one by one only after a step took longer than this and the allowance of its rows.
UNTIMED_S = 2e-3
# Steps in which masks are timed request by request after a slow step.
TIMED_STEPS = 64
# Shorter calls are measured by the wall clock alone, which is cheaper to read.
SHORT_CALL_S = 0.5e-3


class HostClock:
    """Clocks of this thread. Tests override them."""

    wall_s = staticmethod(perf_counter)
    cpu_s = staticmethod(thread_time)


class Timer:
    """Timer of consecutive calls on one thread. Time in which the thread did not run does not count."""

    def __init__(self, clock: HostClock) -> None:
        self._clock = clock
        self._wall_s = clock.wall_s()
        self._cpu_s = clock.cpu_s()

    def lap_s(self) -> float:
        """Return the time since the last call, or since the start."""
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
    """Debts of requests and their total. Requests without recent debt take no memory and no time."""

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
            self._recent_s[request_id] = recent_s * (1 - _DECAY_SHARE)
            if not self._debt_s[request_id] and self._recent_s[request_id] < _MIN_RECENT_S:
                self.forget(request_id)

    def charge(self, request_id: str, seconds: float, rows: int = 1) -> list[str]:
        """Add the time of a request's constraint for `rows` rows. Return the requests that must end."""
        seconds -= rows * FREE_ROW_S
        if seconds <= 0.0:
            return []
        self._debt_s[request_id] = self._debt_s.get(request_id, 0.0) + seconds
        self._recent_s[request_id] = self._recent_s.get(request_id, 0.0) + seconds
        self._total_s += seconds
        self._step_s += seconds
        ended = []
        # In a step that is over its limit, another costly mask ends its request.
        is_late = self._step_s > MAX_STEP_DEBT_S and seconds > MIN_REQUEST_S
        if is_late or self._debt_s[request_id] > MAX_REQUEST_DEBT_S:
            ended.append(request_id)
            self._end(request_id)
        while self._total_s > MAX_STEP_DEBT_S and self._recent_s:
            costliest = max(self._recent_s, key=self._recent_s.__getitem__)
            ended.append(costliest)
            self._end(costliest)
        return ended

    def owes(self, request_id: str) -> bool:
        """True if the request's debt exceeds what every step forgives."""
        return self._debt_s.get(request_id, 0.0) > MIN_REQUEST_S

    def forget(self, request_id: str) -> None:
        """Forget a request. The total debt stays."""
        self._debt_s.pop(request_id, None)
        self._recent_s.pop(request_id, None)

    def _end(self, request_id: str) -> None:
        """End a request and take its share out of the total debt, so that other requests need not pay it."""
        share = self._recent_s[request_id] / sum(self._recent_s.values())
        self._total_s *= 1 - share
        self.forget(request_id)
