"""The decoding requests that have a TPOT objective, as columns: when is each one's next token due?"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from roseinfer.sched.ledger import Track


class Batch:
    """Columns of equal length, in no particular order; adding and removing cost O(1).

    `due` is `anchor + pace * tokens`, which is linear in what a step changes, so a step's due times are one pass.
    `smallest_s`: the smallest TPOT objective, inf if there is none. `tokens_per_s`: what the objectives promise
    together; `context_per_s`: the context tokens that have to be read for it, at the expected mean length of each.
    """

    def __init__(self, margin: float) -> None:
        self.tracks: list[Track] = []
        self.margin = margin
        self.smallest_s = inf
        self.tokens_per_s = self.context_per_s = 0.0
        self._tokens: list[Sequence[int]] = []
        self._anchors: list[float] = []
        self._paces: list[float] = []
        self._slots: dict[str, int] = {}
        self._objectives: dict[float, int] = {}

    def __len__(self) -> int:
        return len(self.tracks)

    def __contains__(self, track: Track) -> bool:
        return track.request.request_id in self._slots

    def add(self, track: Track, first_token_s: float) -> None:
        self._slots[track.request.request_id] = len(self.tracks)
        self._objectives[track.tpot_s] = self._objectives.get(track.tpot_s, 0) + 1
        self.smallest_s = min(self.smallest_s, track.tpot_s)
        self.tokens_per_s += 1 / track.tpot_s
        self.context_per_s += mean_context(track) / track.tpot_s
        track.set_pace(self.margin, first_token_s)
        self.tracks.append(track)
        self._tokens.append(track.tokens)
        self._anchors.append(track.anchor_s)
        self._paces.append(track.pace_s)

    def remove(self, track: Track) -> None:
        """Its place goes to the last one."""
        slot = self._slots.pop(track.request.request_id)
        last = self.tracks.pop()
        columns = (self._tokens.pop(), self._anchors.pop(), self._paces.pop())
        if last is not track:
            self.tracks[slot] = last
            self._tokens[slot], self._anchors[slot], self._paces[slot] = columns
            self._slots[last.request.request_id] = slot
        left = self._objectives[track.tpot_s] - 1
        if left:
            self._objectives[track.tpot_s] = left
        else:
            del self._objectives[track.tpot_s]
            if track.tpot_s == self.smallest_s:
                self.smallest_s = min(self._objectives, default=inf)
        self.tokens_per_s -= 1 / track.tpot_s
        self.context_per_s -= mean_context(track) / track.tpot_s
        if not self.tracks:  # nothing is left of rounding errors either
            self.tokens_per_s = self.context_per_s = 0.0

    def anchor(self, track: Track, first_token_s: float) -> None:
        """The first token was seen at another time than assumed."""
        slot = self._slots[track.request.request_id]
        track.set_pace(self.margin, first_token_s)
        self._anchors[slot], self._paces[slot] = track.anchor_s, track.pace_s

    def set_margin(self, margin: float) -> None:
        self.margin = margin
        for track in self.tracks:
            track.set_pace(margin, track.first_s)
        self._anchors = [track.anchor_s for track in self.tracks]
        self._paces = [track.pace_s for track in self.tracks]

    def context(self) -> list[int]:
        """Tokens that are known of each."""
        return list(map(len, self._tokens))

    def due(self, context: Sequence[int]) -> list[float]:
        """When the next token of each is due, for those with no token in flight."""
        return [a + p * n for a, p, n in zip(self._anchors, self._paces, context, strict=True)]

    def due_in_flight(self, context: Sequence[int]) -> list[float]:
        """The same if some have a token in flight: that one counts as there."""
        columns = zip(self.tracks, self._anchors, self._paces, context, strict=True)
        return [a + p * (n + track.request.pending) for track, a, p, n in columns]


def mean_context(track: Track) -> float:
    """Tokens, over its output as expected when it came."""
    return track.request.prompt_len + track.length / 2


@dataclass(slots=True)
class Margin:
    """The share of the TPOT objective by which token deadlines are brought forward. Up a little for each finished
    request that came near its limit, down very little for each other.

    In the steady state about one request in 21 comes near its limit.
    """

    value: float = 0.02
    floor: float = 0.005
    ceiling: float = 0.15
    up: float = 0.004
    down: float = 0.0002
    near: float = 0.995

    def observe(self, tpot_s: float, objective_s: float) -> None:
        step = self.up if tpot_s > self.near * objective_s else -self.down
        self.value = min(self.ceiling, max(self.floor, self.value + step))
