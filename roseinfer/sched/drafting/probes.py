"""Probes: when drafting is on, and how long it stays off after steps in which it did not pay."""

PROBE_STEPS = 8
MIN_PAUSE_STEPS, MAX_PAUSE_STEPS = 8, 128
# The same where a probe exposes the host's work, which grows with the requests: so many for each of them.
PAUSE_PER_REQUEST_STEPS, MAX_LONG_PAUSE_STEPS = 16, 1024
_BALANCE_GAIN_SHARE = 1 / 16
_EARLY_TRY_SHARE = 0.75  # of the requests that ran when it went off: with no more it is tried again


class Probes:
    """Switch of drafting. `on`: drafts may be proposed, so steps are committed before the next one is planned.

    Drafting goes off if it saves less time per step than that exposes. After a pause, which doubles each time, it is on
    for a few steps again. `untried`: none of the steps since then had guesses.
    """

    def __init__(self) -> None:
        self.on = True
        self.untried = True
        self._early_requests = 0.0  # with no more running ones the pause ends early
        self._pause = MIN_PAUSE_STEPS
        self._resume = 0  # step
        self._steps = 0  # since it is on
        self._balance_s = 0.0

    def skip(self, step: int, running: int) -> None:
        """Record a step that was planned while drafting was off."""
        if step >= self._resume or running <= self._early_requests:
            self.on = self.untried = True
            self._steps, self._balance_s = 0, 0.0

    def record(
        self,
        step: int,
        running: int,
        saved_s: float,
        exposed_s: float,
        *,
        guessed: bool,
        drafted: bool,
        declined: bool = False,
    ) -> None:
        """Record a step that was planned while drafting was on. `saved_s`: time that its drafts will probably save.

        `exposed_s`: time of the host that no step hides. `guessed`: drafts were proposed. `drafted`: some were worth
        their cost. `declined`: a head made none, because none would have been.
        """
        self._steps += 1
        self.untried = self.untried and not guessed
        refused = guessed and not drafted
        declined = declined and not drafted
        gain = max(_BALANCE_GAIN_SHARE, 1 / self._steps)
        self._balance_s += gain * (saved_s - self._balance_s)
        enough = self._steps >= PROBE_STEPS
        if declined or (refused and self._balance_s <= exposed_s) or (enough and self._balance_s < exposed_s):
            self.on = False
            self._resume, self._pause = step + self._pause, min(2 * self._pause, _longest_pause(running, exposed_s))
            self._early_requests = _EARLY_TRY_SHARE * running
        elif enough:
            self._pause = MIN_PAUSE_STEPS


def _longest_pause(running: int, exposed_s: float) -> int:
    if not exposed_s:
        return MAX_PAUSE_STEPS
    return max(MAX_PAUSE_STEPS, min(PAUSE_PER_REQUEST_STEPS * running, MAX_LONG_PAUSE_STEPS))
