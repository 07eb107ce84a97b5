"""How near a replay comes to the run that was recorded."""

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

from roseinfer.sim.replay import EngineRecording, Replay, read_recording, replay

SAME_WITHIN = 0.05


@dataclass(frozen=True, slots=True)
class Parity:
    """`turns` of the engine, of which the first `same` planned the same; the next one, if any, did not.

    Medians in seconds, (of the run, of the replay), over the requests that ended with output in both; None without any.
    """

    requests: int
    compared: int
    turns: int
    same: int
    ttft_s: tuple[float, float] | None
    tpot_s: tuple[float, float] | None

    @property
    def plans_agree(self) -> bool:
        return self.same == self.turns

    @property
    def medians_agree(self) -> bool:
        """To within 5%."""
        pairs = [pair for pair in (self.ttft_s, self.tpot_s) if pair is not None]
        return all(abs(again - run) <= SAME_WITHIN * run for run, again in pairs)

    def __str__(self) -> str:
        lines = [f"{self.requests} requests, {self.turns} turns of the engine"]
        if self.plans_agree:
            lines.append("plans    all the same")
        else:
            lines.append(f"plans    the same in the first {self.same} turns")
        for name, pair in (("TTFT", self.ttft_s), ("TPOT", self.tpot_s)):
            if pair is not None:
                run, again = pair
                change = f"{again / run - 1:+.2%}" if run else "-"
                lines.append(f"{name} p50 run {1e3 * run:.3f} ms, replay {1e3 * again:.3f} ms ({change})")
        return "\n".join(lines)


def parity_of(path: str) -> Parity:
    """Replay a recorded run and compare. Raises `ConfigError` if the file is none."""
    recording = read_recording(path)
    return compare(recording, replay(recording))


def compare(recording: EngineRecording, again: Replay) -> Parity:
    planned = zip(recording.plans, recording.copies, strict=True)
    pairs = list(zip(planned, zip(again.plans, again.copies, strict=True), strict=True))
    same = next((turn for turn, (run, replayed) in enumerate(pairs) if run != replayed), len(pairs))
    ends = {name: end for name, end in recording.ends.items() if end.ttft_s is not None and name in again.ttft_s}
    return Parity(
        requests=len(recording.requests),
        compared=len(ends),
        turns=len(pairs),
        same=same,
        ttft_s=_medians((end.ttft_s, again.ttft_s[name]) for name, end in ends.items()),
        tpot_s=_medians((end.tpot_s, again.tpot_s[name]) for name, end in ends.items()),
    )


def _medians(pairs: Iterable[tuple[float | None, float | None]]) -> tuple[float, float] | None:
    known = [(run, again) for run, again in pairs if run is not None and again is not None]
    if not known:
        return None
    return median(run for run, _ in known), median(again for _, again in known)
