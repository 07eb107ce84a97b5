"""One engine dies under load while others serve, on real GPUs: what streams lose, and when objectives are kept again.

    python -m benchmarks.replicas_gpu --out DIR [--replicas 2] [--rate 50] [--seconds 60] [--kill-at 12]

Qwen3-8B with dummy weights, SCORPIO's six classes and requests as in `benchmarks.slo_gpu`, which measures goodput over
several engines (`--server-args "--replicas 2"`). `--kill-at` seconds into the load one engine gets SIGKILL. Once a
second the server's own counts are read: of the requests that ended in it, how many kept their objectives, were refused
or were late. Prints a line a second, what the client saw in all, and when three seconds in a row had again what there
was before the death less 5 points. Writes DIR/replicas-gpu.json.
"""

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.gpu_rows import MEMORY_SHARE
from benchmarks.gpu_server import Server
from benchmarks.gpu_table import gpu, torch_versions
from benchmarks.model_folders import write_folder
from benchmarks.slo_gpu import LOADS, MODEL, WARM_UP
from roseinfer.bench.report import host, table, versions

COUNT = re.compile(r'^roseinfer:slo_requests_total\{.*?outcome="(\w+)".*?\} (\S+)$', re.MULTILINE)
TOLERANCE, IN_A_ROW = 0.05, 3
READY_PATIENCE_S = 240.0


def counts(server: Server) -> Counter[str]:
    """Requests that ended, ever, by outcome."""
    found: Counter[str] = Counter()
    for outcome, value in COUNT.findall(server.get("/metrics") or ""):
        found[outcome] += round(float(value))
    return found


def engine_pids() -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if b"roseinfer.engine.process" in command:
                found.append(int(entry.name))
    return sorted(found)


def client(server: Server, classes: Path, flags: str, result: Path) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "roseinfer.cli", "bench", "serve", "--url", server.url, "--model", MODEL]
    command += [*shlex.split(flags), "--slo-classes", str(classes), "--send-objectives", "--json", str(result)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL)


def measure(args: argparse.Namespace, server: Server, folder: Path) -> dict[str, Any]:
    load = LOADS["six"]
    classes, result = folder / "classes.json", folder / "client.json"
    classes.write_text(json.dumps(load.class_list()))
    client(server, classes, WARM_UP, folder / "warm-up.json").wait()
    number = round(args.seconds * args.rate)
    running = client(server, classes, f"{load.flags} --rate {args.rate:g} --num {number} --seed {args.seed}", result)
    before, killed = counts(server), None
    seconds: list[dict[str, int]] = []
    # Arrivals begin when the client has its processes: the first request in the server's counts is second 0.
    while running.poll() is None:
        began_s = time.perf_counter()
        now = counts(server)
        ended = now - before
        if ended or seconds:
            seconds.append({**ended, "second": len(seconds)})
        before = now
        if killed is None and len(seconds) > args.kill_at:
            victim = engine_pids()[0]
            os.kill(victim, signal.SIGKILL)
            killed = len(seconds) - 1
        time.sleep(max(0.0, 1.0 - (time.perf_counter() - began_s)))
    summary = json.loads(result.read_text())["summary"]
    return {"killedecond": killed, "seconds": seconds, "client": {**summary, **summary.get("slo", {})}}


def share(second: dict[str, int]) -> float | None:
    ended = sum(count for name, count in second.items() if name != "second")
    return second.get("met", 0) / ended if ended else None


def back_after(run: dict[str, Any]) -> int | None:
    """Seconds from the death until it is as before; None: it never was."""
    seconds, killed = run["seconds"], run["killedecond"]
    earlier = seconds[2:killed]
    usual = sum(one.get("met", 0) for one in earlier) / max(
        1, sum(sum(one.values()) - one["second"] for one in earlier)
    )
    kept = [(share(one) or 0.0) >= usual - TOLERANCE for one in seconds]
    for at in range(killed + 1, len(kept) - IN_A_ROW + 1):
        if all(kept[at : at + IN_A_ROW]):
            return at - killed
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--router", default="pace")
    parser.add_argument("--rate", type=float, default=50.0, help="requests a second, all engines together")
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--kill-at", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--models-dir", type=Path, help="where the model folder is, instead of making one")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    print(json.dumps({**gpu(), **host(), **versions(), **torch_versions()}), flush=True)
    with tempfile.TemporaryDirectory() as made:
        folder = args.models_dir / MODEL if args.models_dir else write_folder(MODEL, Path(made))
        options = ["--served-model-name", MODEL, "--load-format", "dummy", "--gpu-memory-utilization", MEMORY_SHARE]
        options += ["--max-model-len", str(LOADS["six"].max_model_len), "--replicas", str(args.replicas)]
        server = Server([str(folder), *options, "--router", args.router], args.out / "replicas-gpu.log")
        try:
            server.await_health(READY_PATIENCE_S)
            run = measure(args, server, Path(made))
        finally:
            server.stop()
    names = sorted({name for one in run["seconds"] for name in one} - {"second"})
    lines = [{"second": one["second"], **{name: one.get(name, 0) for name in names}} for one in run["seconds"]]
    print(table(lines))
    seen = run["client"]
    print({name: seen[name] for name in ("requests", "ok", "rejected", "failed", "short", "adherence", "errors")})
    print(f"killed in second {run['killedecond']}; as before after {back_after(run)} s")
    (args.out / "replicas-gpu.json").write_text(json.dumps(run, indent=1) + "\n")


if __name__ == "__main__":
    main()
