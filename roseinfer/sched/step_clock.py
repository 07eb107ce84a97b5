"""How long a step takes for those who wait for it, from when it was planned and when it was done."""


class StepClock:
    """How long steps take as whoever waits for them sees it: with what the host does around them.

    Follows the steps of one scheduler: `planned` and `done` for each, in order, `paused` when nothing was planned.

    A step that has the engine to itself lasts from the end of the one before it, if the engine went straight on, or
    else from its plan. One that is planned while others are in flight lasts as long as the device says: what the host
    did meanwhile did not delay it.
    """

    def __init__(self) -> None:
        self._began_s: dict[int, float | None] = {}  # step -> when, None if others were in flight
        self._last_s: float | None = None  # when the last step ended, if there was more to do

    def planned(self, step: int, now_s: float) -> None:
        began_s = now_s if self._last_s is None else self._last_s
        self._began_s[step] = None if self._began_s else began_s

    def paused(self) -> None:
        self._last_s = None

    def done(self, step: int, now_s: float, duration_s: float, *, more: bool) -> float:
        """Seconds that the step took. `duration_s`: on the device. `more`: whether requests are left that run."""
        began_s = self._began_s.pop(step, None)
        self._last_s = now_s if more else None
        return duration_s if began_s is None else max(duration_s, now_s - began_s)
