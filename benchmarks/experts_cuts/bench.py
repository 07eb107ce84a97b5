"""How `experts_cuts` measures, in a process of its own: a kernel that never ran may take its process with it.

Each result is written as soon as it is known, and what is tried at the moment stands beside them. A process that is
started anew takes from there what is known.
"""

import json
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from statistics import median

import torch

from benchmarks.experts_cuts.layer import Case, Error, Layer, draw_tokens, make_case, make_layer
from benchmarks.experts_cuts.results import CRASHED, HUNG, TRYING, Line, add_result, read_results
from benchmarks.experts_cuts.size import Plan
from roseinfer.kernels.compile_ahead import compiling
from roseinfer.kernels.route import route_reference

LAYERS = 3  # with weights of their own, so that a layer finds none of them in the L2 cache
PATIENCE_S = 8.0  # for one call
# What is rounded to 16 bits, in several places.
TOLERANCE = Error(0.02, 0.01)
# Of what is rounded to codes between two products: a matrix unit adds products of codes to about 13 bits, and of so
# different sums a few in a hundred are rounded to the next code, up to an eighth away. That is 3% of a row where it is
# the largest code, and 1% of all rows; a group of 128 columns that one of eight experts left out would be some 14%.
CODES_TOLERANCE = Error(0.06, 0.02)
LEAST_US = 800.0  # what a sample lasts

Call = Callable[[], object]


class OutOfTimeError(Exception):
    """The time that all of it may take is over."""


class WrongResultError(Exception):
    """A kernel's result is not the reference's."""


@dataclass(frozen=True, slots=True)
class Key:
    """part: the launch, or "few" or "many" for all of a layer. way: what its cuts have in common."""

    part: str
    kind: str
    tokens: int
    way: str
    config: str

    def line(self, **more: object) -> Line:
        return {name: getattr(self, name) for name in self.__slots__} | more


@dataclass
class Bench:
    plan: Plan
    out: Path
    until: float
    _known: dict[Key, float] = field(default_factory=dict)
    _layers: dict[str, list[Layer]] = field(default_factory=dict)
    _cases: dict[tuple[str, int, bool], Case] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.compiling = False
        self.device = torch.device("cpu" if self.plan.tiny else "cuda")
        # The interpreter multiplies no bfloat16.
        self.dtype = torch.float16 if self.plan.tiny else torch.bfloat16
        self.arrived = torch.zeros(1 << 13, dtype=torch.int32, device=self.device)
        # Graphs take their memory from one pool, which lasts as long as the first of them.
        self._first: torch.cuda.CUDAGraph | None = None
        if not self.plan.tiny:
            self._first = torch.cuda.CUDAGraph()
            self._first.capture_begin()
            self.arrived.zero_()
            self._first.capture_end()
        for line in read_results(self.out):
            key = Key(**{name: line[name] for name in Key.__slots__})
            self._known[key] = line.get("us", inf)

    def layers(self, kind: str) -> list[Layer]:
        if kind not in self._layers:
            count = 1 if self.plan.tiny else LAYERS
            self._layers[kind] = [make_layer(self.plan.size, kind, self.dtype, self.device) for _ in range(count)]
        return self._layers[kind]

    def case(self, kind: str, tokens: int, *, round_rows: bool) -> Case:
        at = kind, tokens, round_rows
        if at not in self._cases:
            layer = self.layers(kind)[0]
            self._cases[at] = make_case(layer, tokens, self.plan.size.top_k, round_rows=round_rows)
        return self._cases[at]

    def draws(self, kind: str, tokens: int) -> list[tuple[Layer, torch.Tensor]]:
        """A layer and tokens for each call of a graph: other tokens, so other experts."""
        layers = self.layers(kind)
        first = self.case(kind, tokens, round_rows=False).x
        turns = [layers[i % len(layers)] for i in range(self.calls(tokens))]
        more = [(layer, draw_tokens(tokens, layer, self.plan.size.top_k)) for layer in turns[1:]]
        return [(turns[0], first), *more]

    def calls(self, tokens: int) -> int:
        """Of a graph, a multiple of the layers."""
        if self.plan.tiny:
            return 1
        return LAYERS * (8 if tokens <= 4 else 4 if tokens <= 32 else 2 if tokens <= 256 else 1)

    def experts_read(self, draws: Iterable[tuple[Layer, torch.Tensor]]) -> float:
        """On average, of a layer."""
        top_k = self.plan.size.top_k
        read = [len(route_reference(x, layer.norm, layer.router, top_k, True).ids.unique()) for layer, x in draws]
        return sum(read) / len(read)

    def compile(self, launches: Sequence[Call]) -> None:
        """On all cores, what they launch; who fails says so when it is measured."""
        if self.plan.tiny or not launches:
            return
        began = time.time()
        self.compiling = True
        try:
            with compiling():
                for launch in launches:
                    self.check_time()
                    with suppress(Exception):
                        launch()
        finally:
            self.compiling = False
        self.say(f"{len(launches)} launches ready, after {time.time() - began:.1f} s")

    def say(self, what: str) -> None:
        print(f"[{self.until - time.time():4.0f} s left] {what}", flush=True)

    def known(self, part: str, kind: str, tokens: int) -> float:
        """us of the fastest of them; none if nothing is known."""
        times = [us for key, us in self._known.items() if (key.part, key.kind, key.tokens) == (part, kind, tokens)]
        return min(times, default=0.0)

    def check_time(self) -> None:
        if time.time() > self.until:
            raise OutOfTimeError

    def measure(
        self,
        key: Key,
        calls: Callable[[], Sequence[Call]],
        check: Callable[[], Error],
        *,
        codes: bool = False,
        **more: object,
    ) -> float:
        """us of one call; infinity if it does not run, or its result is wrong.

        check: the error of one call. codes: between products it rounds to codes.
        """
        if key in self._known:
            return self._known[key]
        self.check_time()
        (self.out / TRYING).write_text(json.dumps(key.line()))
        try:
            with _filled():
                error = check()
            self._wait()
            if not error.within(CODES_TOLERANCE if codes else TOLERANCE):
                raise WrongResultError(f"error {error.row:.4f} of a row, {error.whole:.4f} of all")
            us = self._timed_us(calls())
            self._write(
                key.line(us=round(us, 2), error=round(error.row, 5), error_of_all=round(error.whole, 5), **more)
            )
        except OutOfTimeError:
            raise
        except Exception as failure:
            us = inf
            self._write(key.line(failed=f"{type(failure).__name__}: {str(failure)[:160]}"))
            self._still_alive()
        self._known[key] = us
        return us

    def _write(self, line: Line) -> None:
        add_result(self.out, line)
        (self.out / TRYING).unlink(missing_ok=True)
        if "failed" in line or (line["part"] in ("few", "many") and line["default"]):
            print(json.dumps(line), flush=True)

    def _wait(self) -> None:
        """Until the GPU is done, or this process is given up."""
        if self.plan.tiny:
            return
        done, end = torch.cuda.Event(), time.time() + PATIENCE_S
        done.record()
        while not done.query():
            if time.time() > end:
                os._exit(HUNG)
            time.sleep(1e-5)

    def _still_alive(self) -> None:
        """After an error of which a process cannot recover it begins anew."""
        if self.plan.tiny:
            return
        try:
            self._wait()
        except Exception:
            os._exit(CRASHED)

    def _timed_us(self, calls: Sequence[Call]) -> float:
        if self.plan.tiny:
            began = time.perf_counter()
            for call in calls:
                call()
            return (time.perf_counter() - began) / len(calls) * 1e6
        for call in calls:
            call()
        self._wait()
        assert self._first is not None
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._first.pool())  # `torch.cuda.graph` would collect all garbage each time
        try:
            for call in calls:
                call()
        finally:
            graph.capture_end()
        graph.replay()
        once = self._sample_us(graph, 1)
        repeats = max(1, round(LEAST_US / once))
        return median(self._sample_us(graph, repeats) for _ in range(5)) / len(calls)

    def _sample_us(self, graph: torch.cuda.CUDAGraph, repeats: int) -> float:
        """Of one replay. One before the first event gives the host a start."""
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()
        first.record()
        for _ in range(repeats):
            graph.replay()
        last.record()
        self._wait()
        return first.elapsed_time(last) * 1000 / repeats


@contextmanager
def _filled() -> Iterator[None]:
    """New memory is NaN, or the largest integer: what a kernel leaves out shows."""
    warnings.filterwarnings("ignore", message=".*deterministic")
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def warm_up(seconds: float = 0.5) -> None:
    """Until the clocks are what they will be."""
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    end = time.time() + seconds
    while time.time() < end:
        for _ in range(10):
            a @ a
        torch.cuda.synchronize()
