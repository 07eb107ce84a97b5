"""Fake CUDA graphs, so that tests of their choice need no GPU."""

from collections.abc import Callable, Iterable
from typing import Any


class FakeGraph:
    """Graph that counts its replays and calls `on_replay` in each."""

    def __init__(self, on_replay: Callable[[], object]) -> None:
        self.replays = 0
        self._on_replay = on_replay

    def replay(self) -> None:
        self.replays += 1
        self._on_replay()


class FakeRecorder:
    """`GraphRecorder` that launches nothing: `results` are those of the recorded calls, in order.

    `on_replay` gets the number of the recorded graph at each of its replays. Times are those given; what is to be timed
    is launched once.
    """

    def __init__(
        self,
        results: Iterable[object],
        on_replay: Callable[[int], object] = lambda number: None,
        launch_s: float = 1.0,
        replay_s: float = 1.0,
    ) -> None:
        self.graphs: list[FakeGraph] = []
        self._results = iter(results)
        self._on_replay = on_replay
        self._launch_s, self._replay_s = launch_s, replay_s

    def record(self, launch: Callable[[], object], pool: object) -> tuple[FakeGraph, Any]:
        number = len(self.graphs)
        self.graphs.append(FakeGraph(lambda: self._on_replay(number)))
        return self.graphs[-1], next(self._results)

    def launch_seconds(self, launch: Callable[[], object]) -> float:
        launch()
        return self._launch_s

    def replay_seconds(self, graph: FakeGraph) -> float:
        graph.replay()
        return self._replay_s
