"""Whether an engine lives: how long it has given no sign of life, against what its present step needs."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

# Between looks. An engine gives a sign with each step, and twice a second when it has nothing to do.
INTERVAL_S = 0.25
# A process that is stopped gives no sign before it goes on, so nobody waits longer to see.
STOPPED_S = 1.0
# Heartbeats are half a second apart: what is less than this would be no silence.
LEAST_QUIET_S = 1.0
# Of a core, in the mean: a process that uses so much is not waiting for something that never comes.
WORKING_SHARE = 0.2
# Times as long as others an engine may take that computes on the CPU, as its processor time shows.
WORKING_PATIENCE = 10


class Vitals(NamedTuple):
    """Of a process: seconds of processor time that it has used, and whether it is stopped (SIGSTOP, a debugger)."""

    cpu_s: float
    stopped: bool


def vitals(pid: int) -> Vitals | None:
    """None where the system does not tell, or there is no such process."""
    try:
        # The name, in parentheses, may hold anything; state, ..., utime and stime as the 12th and 13th follow.
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return Vitals((int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"), fields[0] in (b"T", b"t"))
    except (OSError, ValueError, IndexError):
        return None


@dataclass(frozen=True, slots=True)
class Silence:
    """`seconds` without a sign of life, and whether that is too long for an engine that gets requests (`quiet`), or
    for one that ever comes back (`hung`).
    """

    seconds: float = 0.0
    quiet: bool = False
    hung: bool = False


class Listening:
    """Follows one process of an engine. `quiet_s`, `hung_s`: what it may be silent for beyond its present step.

    Silence is counted in looks and not on a clock: whatever stops the owner too, as a debugger or a suspended machine
    does, is no fault of the engine. A step may take as long as the engine has published. Where nobody can know that,
    at the first steps or under a policy that predicts none, a large prompt on a slow CPU may take minutes: an engine
    that computes on the CPU (`on_cpu`) and whose process is seen to do so is given `WORKING_PATIENCE` times as long.
    """

    def __init__(self, quiet_s: float, hung_s: float, *, on_cpu: bool) -> None:
        self._quiet_s = max(quiet_s, LEAST_QUIET_S)
        self._hung_s = max(hung_s, self._quiet_s)
        self._on_cpu = on_cpu
        self._signs = -1
        self._looks = 0
        self._cpu_s = 0.0

    def look(self, signs: int, step_s: float, seen: Vitals | None) -> Silence:
        """To be called every `INTERVAL_S` seconds. `signs`: of life, ever; `step_s`: what its present step needs."""
        if signs != self._signs:
            self._signs, self._looks = signs, 0
            self._cpu_s = seen.cpu_s if seen is not None else 0.0
            return Silence()
        self._looks += 1
        seconds = self._looks * INTERVAL_S
        if seen is not None and seen.stopped:
            return Silence(seconds, seconds >= STOPPED_S, seconds >= self._hung_s)
        patience = WORKING_PATIENCE if self._on_cpu and self._works(seen, seconds) else 1
        # What an engine says of its step is no reason to wait for ever.
        step_s = min(step_s, WORKING_PATIENCE * self._hung_s)
        return Silence(
            seconds, seconds >= patience * self._quiet_s + step_s, seconds >= patience * self._hung_s + step_s
        )

    def _works(self, seen: Vitals | None, seconds: float) -> bool:
        return seen is None or seen.cpu_s - self._cpu_s >= WORKING_SHARE * seconds
