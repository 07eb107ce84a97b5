"""Probes: when drafting is on, and how long it stays off after steps in which it did not pay."""

PROBE_STEPS = 8
MIN_PAUSE_STEPS, MAX_PAUSE_STEPS = 8, 128
_BALANCE_GAIN_SHARE = 1 / 16
_WAKE_SHARE = 0.75  # of the requests that ran when it went off: with fewer it is tried again


class Probes:
    """Switch of drafting. `on`: drafts may be proposed, so steps are committed before the next one is planned.

    Drafting goes off if it saves less time per step than that exposes. After a pause, which doubles each time, it is on
    for a few steps again.
    """

    def __init__(self) -> None:
        self.on = True
        self._wake_below = 0  # running requests
        self._pause = MIN_PAUSE_STEPS
        self._resume = 0  # step
        self._steps = 0  # since it is on
        self._balance_s = 0.0

    @property
    def begins(self) -> bool:
        """True if the step that is planned is the first since drafting is on."""
        return self._steps == 0

    def skip(self, step: int, running: int) -> None:
        """Record a step that was planned while drafting was off."""
        if step >= self._resume or running < self._wake_below:
            self.on, self._steps, self._balance_s = True, 0, 0.0

    def record(self, step: int, running: int, saved_s: float, exposed_s: float, *, refused: bool) -> None:
        """Record a step that was planned while drafting was on. `saved_s`: time that its drafts will probably save;
        `refused`: drafts were proposed, and none was worth its cost. `exposed_s`: time of the host that no step hides.
        """
        self._steps += 1
        gain = max(_BALANCE_GAIN_SHARE, 1 / self._steps)
        self._balance_s += gain * (saved_s - self._balance_s)
        enough = self._steps >= PROBE_STEPS
        if (refused and self._balance_s <= exposed_s) or (enough and self._balance_s < exposed_s):
            self.on = False
            self._resume, self._pause = step + self._pause, min(2 * self._pause, MAX_PAUSE_STEPS)
            self._wake_below = int(_WAKE_SHARE * running)
        elif enough:
            self._pause = MIN_PAUSE_STEPS
