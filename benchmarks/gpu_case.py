"""Cases of `gpu_guard` and `gpu_compare`: a row of the GPU table, or six classes of objectives at one rate."""

import argparse
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import gpu_table, slo_gpu
from benchmarks.gpu_result import read_summary
from benchmarks.gpu_rows import FIGURES, MEMORY_SHARE, MODELS, ROWS
from benchmarks.gpu_server import Server, ServerError

SIX = "six@"
SIX_LOADS = ("six", "experts", *slo_gpu.FAMILIES)  # each has TPOT objectives of its own
CLASS_FIGURES = {
    "adherence": "adherence",
    "goodput_req_s": "goodput req/s",
    "ttft_p99_ms": "TTFT p99 ms",
    "tpot_p50_ms": "TPOT p50 ms",
    "tpot_p99_ms": "TPOT p99 ms",
    "rejected": "rejected",
    "missed": "missed",
}
HIGHER_IS_BETTER = frozenset({"output_tok_s", "adherence", "goodput_req_s"})
START_TIMEOUT_S = 180.0
ROW_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Case:
    """A row of the table ("nano") or six classes at a rate in requests per second ("six@35"), for one model."""

    model: str
    row: str

    @classmethod
    def parse(cls, text: str) -> "Case":
        """Read "qwen3-8b nano". Raises ValueError for a model or a row that does not exist."""
        model, _, row = text.partition(" ")
        if row.startswith(SIX):
            float(row.removeprefix(SIX))
            known = six_load(model) is not None
        else:
            known = any((found.model, found.name) == (model, row) for found in ROWS)
        if not known:
            raise ValueError(f"unknown case '{text}' (expected MODEL ROW or MODEL {SIX}RATE, as in 'qwen3-8b nano')")
        return cls(model, row)

    @property
    def key(self) -> str:
        return f"{self.model} {self.row}"

    @property
    def rate(self) -> float | None:
        """Return the rate of the six classes, None for a row of the table."""
        return float(self.row.removeprefix(SIX)) if self.row.startswith(SIX) else None

    @property
    def figures(self) -> Mapping[str, str]:
        """Return name -> title of the figures that it measures."""
        return FIGURES if self.rate is None else CLASS_FIGURES

    def measure(self, server: Server, client: Path | None, seed_shift: int = 0) -> dict[str, float]:
        """Return its figures. Raises `ServerError` if a request failed or the client ended without a summary."""
        if self.rate is not None:
            return self._measure_classes(server, client, self.rate, seed_shift)
        row = next(row for row in ROWS if (row.model, row.name) == (self.model, self.row))
        args = argparse.Namespace(client=client, row_timeout=ROW_TIMEOUT_S)
        summary = gpu_table.run_client(args, server, self.model, row.flags(seed_shift), self.key)
        run = read_summary(summary, row.load(seed_shift).seed)
        wrong = [f"{run[name]} {name}" for name in ("failed", "rejected", "short") if run[name]]
        if wrong:
            raise ServerError(f"{self.key}: {', '.join(wrong)}")
        return dict(run["figures"])

    def _measure_classes(self, server: Server, client: Path | None, rate: float, seed_shift: int) -> dict[str, float]:
        args = argparse.Namespace(load=six_load(self.model), model=self.model, client=client)
        run = slo_gpu.measure(args, server, rate, seed_shift)
        if run["failed"]:
            raise ServerError(f"{self.key}: {run['failed']} failed")
        times = {f"{name}_{q}_ms": run[f"{name}_ms"][q] for name in ("ttft", "tpot") for q in ("p50", "p99")}
        found = {**run, **times}
        return {name: found[name] for name in CLASS_FIGURES}


def six_load(model: str) -> str | None:
    """Return the load of `slo_gpu` with the model's six classes, None if it has none."""
    return next((name for name in SIX_LOADS if model in slo_gpu.LOADS[name].models), None)


def start_server(
    model: str,
    folder: Path,
    log: Path,
    *,
    server_args: str = "",
    tree: Path | None = None,
    memory_share: str = MEMORY_SHARE,
) -> Server:
    """Start a server of the model, without waiting for it. `tree`: see `Server`."""
    arguments = [*gpu_table.server_arguments(model, folder.resolve(), memory_share), *shlex.split(server_args)]
    return Server(arguments, log.resolve(), tree)


def warm_up(server: Server, model: str, cases: Sequence[Case], client: Path | None) -> float:
    """Wait for the server and send it a few requests. Return its seconds to the first 200 of /health."""
    seconds = server.await_health(START_TIMEOUT_S)
    args: Any = argparse.Namespace(client=client, row_timeout=ROW_TIMEOUT_S)
    if any(case.rate is None for case in cases):
        gpu_table.run_client(args, server, model, gpu_table.WARM_UP, "warm-up")
    if any(case.rate is not None for case in cases):
        classes = argparse.Namespace(load=six_load(model), model=model, client=client)
        slo_gpu.run_client(classes, server, shlex.split(slo_gpu.WARM_UP), objectives=False)
    return seconds


def models_of(cases: Sequence[Case]) -> list[str]:
    """Return the models in the order of the table."""
    return [name for name in MODELS if any(case.model == name for case in cases)]
