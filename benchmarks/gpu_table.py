"""GPU table in one run: models served with dummy weights, in 16 and 8 bits, each row measured by a client.

    python -m benchmarks.gpu_table --out DIR [--models gpt2 ...] [--rows seq1 ...] [--server-args "..."] [--repeat N]

Writes DIR/gpu.json after every row (hardware, versions, arguments, every figure, the peer's, the targets, the card's
limits) and the servers' logs beside it, and prints the table last. A server that fails costs its rows, and is started
again once. `--client FILE` measures with another client of the same arguments and JSON (default: `roseinfer bench
serve`); `--models-dir DIR` takes model folders from there instead of making them. Ends with 1 if a row has no sound
figures.
"""

import argparse
import json
import re
import runpy
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.bounds import add_choice, chosen
from benchmarks.gpu_result import figures_table, read_summary, row_bounds, row_result, targets_table, unsound
from benchmarks.gpu_rows import MEMORY_SHARE, MODELS, PEER, Row
from benchmarks.gpu_server import Server, ServerError
from benchmarks.model_folders import write_folder
from roseinfer.bench.report import host, versions

WARM_UP = ["--num", "8", "--in-len", "128", "--out-len", "16", "--procs", "2", "--seed", "987654"]
# Added to a row's seed for each repetition; larger than any row's own seed.
REPEAT_SHIFT = 1000
CLIENT_TAIL = 500


@dataclass
class Sweep:
    """State of one run of the script."""

    args: argparse.Namespace
    rows: list[Row]
    began_s: float = field(default_factory=time.monotonic)
    servers: dict[str, dict[str, Any]] = field(default_factory=dict)
    runs: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    bounds: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)

    @property
    def left_s(self) -> float:
        return float(self.args.time_limit) - (time.monotonic() - self.began_s)

    def results(self) -> list[dict[str, Any]]:
        """Return the results of the rows that have been tried."""
        found = []
        for row in self.rows:
            runs, error = self.runs.get(row.key, []), self.errors.get(row.key)
            if runs or error is not None:
                if row.key not in self.bounds:
                    self.bounds[row.key] = row_bounds(row, self.args.seed)
                found.append(row_result(row, self.bounds[row.key], runs, error))
        return found

    def write(self, facts: dict[str, Any]) -> None:
        elapsed_s = round(time.monotonic() - self.began_s, 1)
        whole = {**facts, "elapsed_s": elapsed_s, "servers": self.servers, "rows": self.results()}
        part = self.args.out / "gpu.json.part"
        part.write_text(json.dumps(whole, indent=1) + "\n")
        part.replace(self.args.out / "gpu.json")


class ModelRun:
    """Rows of one model. A server that has died is restarted once."""

    def __init__(self, sweep: Sweep, name: str, folder: Path) -> None:
        self._sweep = sweep
        self._name = name
        self._server: Server | None = None
        self._starts_left = 2
        self._arguments = [*server_arguments(name, folder), *shlex.split(sweep.args.server_args)]
        shown = [MODELS[name].folder, *self._arguments[1:]]
        self.facts: dict[str, Any] = {"command": ["roseinfer", "serve", *shown], "start_s": [], "errors": []}

    def measure(self, row: Row, repetition: int) -> None:
        """Run a row once and record it."""
        sweep, shift = self._sweep, seed_shift(self._sweep.args, repetition)
        try:
            if sweep.left_s <= 0:
                raise ServerError("no time was left")
            server = self._up()
            config = row.load(shift)
            summary = run_client(sweep.args, server, self._name, row.flags(shift), f"{row.key} {repetition}")
            sweep.runs.setdefault(row.key, []).append(read_summary(summary, config.seed))
        except (ServerError, LookupError, ValueError, OSError) as error:
            sweep.errors[row.key] = f"{type(error).__name__}: {error}"
            self._note_failure(f"{row.key}: {error}")

    def _up(self) -> Server:
        """Return the running server, or start one. Raises `ServerError`."""
        if self._server is not None and self._server.healthy:
            return self._server
        self.stop()
        if not self._starts_left:
            raise ServerError("the server failed twice")
        self._starts_left -= 1
        server = self._server = Server(self._arguments, self._sweep.args.out / f"{self._name}.log")
        patience_s = min(self._sweep.args.start_timeout, max(1.0, self._sweep.left_s))
        self.facts["start_s"].append(round(server.await_health(patience_s), 2))
        self.facts |= server.facts()
        print(f"{self._name}: ready after {self.facts['start_s'][-1]} s", flush=True)
        run_client(self._sweep.args, server, self._name, WARM_UP, "warm-up")
        return server

    def restart(self) -> None:
        """Time a second start, with the kernels that the first one compiled."""
        self.stop()
        self._starts_left += 1
        try:
            self._up()
            self.facts["restart_s"] = self.facts["start_s"].pop()
        except ServerError as error:
            self._note_failure(f"restart: {error}")

    def _note_failure(self, text: str) -> None:
        print(f"FAILED {text}", flush=True)
        tail = self._server.tail() if self._server is not None else []
        self.facts["errors"].append({"error": text, "log_tail": tail})

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop()
            self._server = None


def seed_shift(args: argparse.Namespace, repetition: int) -> int:
    return int(args.seed) + REPEAT_SHIFT * repetition


def server_arguments(name: str, folder: Path, memory_share: str = MEMORY_SHARE) -> list[str]:
    """Return the arguments of `roseinfer serve` for a model of the table."""
    return [
        *(str(folder), "--served-model-name", name, "--load-format", "dummy"),
        *("--max-model-len", str(MODELS[name].max_model_len), "--gpu-memory-utilization", memory_share),
        *shlex.split(MODELS[name].options),
    ]


def run_client(
    args: argparse.Namespace, server: Server, model: str, flags: Sequence[str], label: str
) -> dict[str, Any]:
    """Return the client's summary. Raises `ServerError` if it ends without one."""
    client = args.client
    command = [sys.executable, str(client)] if client else [sys.executable, "-m", "roseinfer.cli", "bench", "serve"]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "client.json"
        command += ["--url", server.url, "--model", model, *flags, "--json", str(file), "--label", label]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=args.row_timeout)
        except subprocess.TimeoutExpired as error:
            server.stop()  # the server may be stuck: use another one for the next row
            raise ServerError(f"the client took more than {args.row_timeout} s") from error
        if not file.is_file():
            raise ServerError(f"the client ended with {done.returncode}: {(done.stdout + done.stderr)[-CLIENT_TAIL:]}")
        return dict(json.loads(file.read_text())["summary"])


def measure_model(sweep: Sweep, name: str, folder: Path, facts: dict[str, Any]) -> None:
    """Measure all rows, then all of them again for each repetition, so that a drift affects all alike."""
    run = ModelRun(sweep, name, folder)
    sweep.servers[name] = run.facts
    rows = [row for row in sweep.rows if row.model == name]
    try:
        for repetition in range(sweep.args.repeat):
            for row in rows:
                began_s = time.monotonic()
                run.measure(row, repetition)
                print(f"{row.key}: {time.monotonic() - began_s:.1f} s", flush=True)
                sweep.write(facts)
        if sweep.args.restart and sweep.left_s > 0:
            run.restart()
            sweep.write(facts)
    finally:
        run.stop()


def collect_facts(args: argparse.Namespace) -> dict[str, Any]:
    """Return hardware and versions. torch is not imported: its CUDA context would take memory from the server."""
    own = ["roseinfer", "bench", "serve"]
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "command": shlex.join(["python", "-m", "benchmarks.gpu_table", *map(without_folders, sys.argv[1:])]),
        "commit": args.commit or git_commit(),
        "seed": args.seed,
        "repeat": args.repeat,
        "hardware": {**gpu(), **host()},
        "versions": {**versions(), **torch_versions()},
        "client": ["python", args.client.name] if args.client else own,
        "peer": PEER,
    }


def gpu() -> dict[str, str]:
    names = ("gpu", "gpu_memory", "driver")
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        told = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return {"gpu": "none found"}
    return dict(zip(names, map(str.strip, told.split(",")), strict=False))


def torch_versions() -> dict[str, str]:
    """Read versions from torch/version.py without importing torch."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return {}
    told = runpy.run_path(str(Path(spec.origin).with_name("version.py")))
    return {"torch": str(told.get("__version__")), "cuda": str(told.get("cuda"))}


def git_commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent)
    return done.stdout.strip() or "unknown"


def without_folders(word: str) -> str:
    """Remove folders from file names; they mean nothing on other machines."""
    return re.sub(r"(?<![\w.~])(?:/[^\s/=]+)*/([^\s/=]+)", r"\1", word)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_choice(parser)
    parser.add_argument("--out", type=Path, required=True, help="folder for gpu.json and the logs")
    parser.add_argument("--client", type=Path, help="another client's script")
    parser.add_argument("--models-dir", type=Path, help="model folders, named as `benchmarks.model_folders` names them")
    parser.add_argument("--server-args", default="", help="more arguments of `roseinfer serve`, in one word")
    parser.add_argument("--repeat", type=int, default=1, help="runs of each row (default: 1)")
    parser.add_argument("--restart", action="store_true", help="start each server once more at the end, and time it")
    parser.add_argument("--seed", type=int, default=0, help="added to the seed of each row (default: 0)")
    parser.add_argument("--commit", help="of roseinfer, where there is no git repository to ask")
    parser.add_argument("--start-timeout", type=float, default=180, help="seconds for a server to come up")
    parser.add_argument("--row-timeout", type=float, default=120, help="seconds for a client")
    parser.add_argument("--time-limit", type=float, default=540, help="seconds after which no row is begun")
    return parser.parse_args()


def main() -> int:
    args = parse_args()
    sweep = Sweep(args, chosen(args.models, args.rows))
    args.out.mkdir(parents=True, exist_ok=True)
    facts = collect_facts(args)
    with tempfile.TemporaryDirectory() as made:
        for name in dict.fromkeys(row.model for row in sweep.rows):
            folder = args.models_dir / MODELS[name].folder if args.models_dir else write_folder(name, Path(made))
            measure_model(sweep, name, folder, facts)
    results = sweep.results()
    started = {name: (server["start_s"], server.get("restart_s")) for name, server in sweep.servers.items()}
    print(f"\n{facts['hardware']}\n{facts['versions']}\nstart s, restart s: {started}\n")
    print(f"{figures_table(results)}\n\n{targets_table(results)}")
    return 1 if any(unsound(result) for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
