"""Load of `roseinfer demo`: send requests when they are due, each in a thread, and count how their promises ended."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from functools import partial
from statistics import median
from typing import Any

from roseinfer.cli.terminal.demo_plan import DemoKind, DemoRequest, Speed, format_probe, probe
from roseinfer.cli.terminal.remote import RefusedError, Remote, RemoteError

PATH = "/v1/completions"
PROBE_COUNT = 5
WARM_UP_COUNT = 12
STEP_S = 0.25
# How long the last requests may take after the load.
JOIN_TIMEOUT_S = 15.0


class PromiseEnd(StrEnum):
    KEPT = "kept"
    LATE = "late"
    REJECTED = "rejected"
    FAILED = "failed"


class Tally:
    """Counts of sent and ended requests by kind, and of refusals by cause. `add` may be called in any thread."""

    def __init__(self) -> None:
        self.sent: Counter[DemoKind] = Counter()
        self.causes: Counter[str] = Counter()
        self._ended: Counter[tuple[DemoKind, PromiseEnd]] = Counter()
        self._lock = threading.Lock()

    def add(self, kind: DemoKind, ending: PromiseEnd, cause: str = "") -> None:
        with self._lock:
            self._ended[kind, ending] += 1
            if cause:
                self.causes[cause] += 1

    def count(self, ending: PromiseEnd, kind: DemoKind | None = None) -> int:
        """Return the number of requests with this ending, of one kind or of all."""
        return sum(self._ended[each, ending] for each in ([kind] if kind is not None else DemoKind))

    @property
    def running(self) -> int:
        return self.sent.total() - self._ended.total()

    def line(self) -> str:
        """Return the counts as one line."""
        with self._lock:
            causes = ", ".join(f"{cause} {count}" for cause, count in self.causes.most_common())
            rejected = f"rejected {self.count(PromiseEnd.REJECTED)}" + (f" ({causes})" if causes else "")
            failed = f", failed {self.count(PromiseEnd.FAILED)}" if self.count(PromiseEnd.FAILED) else ""
            good = f"kept {self.count(PromiseEnd.KEPT)}, late {self.count(PromiseEnd.LATE)}"
            return f"{good}, {rejected}{failed}, running {self.running}"


def measure(remote: Remote, model: str) -> Speed:
    """Return the speed of the idle machine: the median of a few requests, since other programs may run.

    The server learns its costs from them, and from some that run together.
    """
    _usage(remote, {**format_probe(), "model": model})
    found = [_usage(remote, {**probe(number), "model": model})["slo"] for number in range(PROBE_COUNT)]
    bodies = [{**probe(PROBE_COUNT + number), "model": model} for number in range(WARM_UP_COUNT)]
    with ThreadPoolExecutor(WARM_UP_COUNT) as pool:
        list(pool.map(partial(_usage, remote), bodies))
    return Speed(median(slo["ttft_ms"] for slo in found) / 1000, median(slo["tpot_ms"] for slo in found) / 1000)


def run(
    remote: Remote,
    model: str,
    planned: Iterator[DemoRequest],
    duration_s: float,
    tally: Tally,
    show: Callable[[float, Sequence[DemoKind]], None],
) -> None:
    """Send the requests and wait for their ends.

    `show` is called a few times a second with the seconds since the start and the kinds of which some were just sent.
    What it raises ends the load.
    """
    began_s = time.monotonic()
    threads: list[threading.Thread] = []
    following = next(planned, None)
    while (now_s := time.monotonic() - began_s) < duration_s:
        started = []
        while following is not None and following.at_s <= now_s:
            tally.sent[following.kind] += 1
            started.append(following.kind)
            threads.append(threading.Thread(target=_send, args=(remote, model, following, tally), daemon=True))
            threads[-1].start()
            following = next(planned, None)
        threads = [thread for thread in threads if thread.is_alive()]
        show(now_s, started)
        time.sleep(STEP_S if following is None else min(STEP_S, max(0.0, following.at_s - now_s)))
    while any(thread.is_alive() for thread in threads) and now_s < duration_s + JOIN_TIMEOUT_S:
        time.sleep(STEP_S)
        now_s = time.monotonic() - began_s
        show(now_s, ())


def _send(remote: Remote, model: str, request: DemoRequest, tally: Tally) -> None:
    try:
        usage = _usage(remote, {**request.body, "model": model}, request.headers)
        tally.add(request.kind, PromiseEnd.KEPT if usage["slo"]["met"] else PromiseEnd.LATE)
    except RefusedError as error:
        rejected = error.code == "slo_unattainable"
        cause = str(error.error.get("cause") or "unknown") if rejected else ""
        tally.add(request.kind, PromiseEnd.REJECTED if rejected else PromiseEnd.FAILED, cause)
    except (RemoteError, LookupError):
        tally.add(request.kind, PromiseEnd.FAILED)


def _usage(remote: Remote, body: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the usage at the end of a streamed answer, with the times that the server measured."""
    usage: dict[str, Any] = {}
    for event in remote.stream(PATH, body, headers):
        usage = event.get("usage") or usage
    return usage
