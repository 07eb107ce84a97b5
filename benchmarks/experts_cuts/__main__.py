"""How the kernels of experts should cut their work, measured on a layer of Qwen3-30B-A3B in bf16 and in FP8.

    python -m benchmarks.experts_cuts --out DIR [--parts tiles route few] [--kinds fp8 bf16] [--seconds 160] [--tiny]

Times `experts_few` for 1 to 16 tokens, the launches of tiles and all of them together for 8 to 8192, and the router, by
replays of CUDA graphs over layers whose weights the L2 cache does not hold. First with the cuts that the kernels choose
by themselves; then, of `--parts`, a search goes from these to their neighbours, and on from the best. A cut is timed if
its result is that of the reference in float32, but for rounding; which are not, or do not run, is told. What matters
most comes first, and all ends within `--seconds`. DIR/results.jsonl has a line for each result as soon as it is known,
DIR/summary.json the tables that are printed last. Needs a GPU of compute capability 9.0; `--tiny` runs the same on
small layers in Triton's interpreter.

A bound counts, of a layer, the weights of the experts that are chosen at 4.27 TB/s, or the arithmetic at 711 TFLOP/s in
bf16 and 1538 in FP8, whichever takes longer.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.experts_cuts.report import report
from benchmarks.experts_cuts.results import CRASHED, TRYING, add_result
from benchmarks.experts_cuts.size import KINDS, PARTS, TINY, Plan
from benchmarks.gpu_table import gpu, torch_versions
from roseinfer.bench.report import host

MOST_STARTS = 8
GRACE_S = 4.0  # between the time at which the process that measures should end, and that at which it is ended
STARTING_AGAIN_S = 25.0


def supervise(command: Sequence[str], out: Path, until: float) -> int:
    """Run `command` until it ends well or time is over; returns how often it was started.

    What a process that ended otherwise had last tried is a result as well, so that the next one passes over it; one
    that knew that it has to end has written that itself.
    """
    for start in range(1, MOST_STARTS + 1):
        child = subprocess.Popen(command)
        try:
            status = child.wait(max(0.1, until + GRACE_S - time.time()))
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
            print("out of time: the process that measured was ended", flush=True)
            return start
        if status == 0:
            return start
        trying = out / TRYING
        if trying.exists():
            failed = json.loads(trying.read_text()) | {"failed": f"the process ended with {status}"}
            trying.unlink()
            add_result(out, failed)
            print(json.dumps(failed), flush=True)
        elif status != CRASHED:
            print(f"the process that measures ended with {status} before it tried anything", flush=True)
            return start
        if time.time() > until - STARTING_AGAIN_S:
            return start
    return MOST_STARTS


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=160.0, help="that all of it may take")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="of which better cuts are searched")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="of weights")
    parser.add_argument("--tiny", action="store_true", help="small layers, few cuts, no GPU")
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    args.out.mkdir(parents=True, exist_ok=True)
    until = args.until or time.time() + args.seconds - GRACE_S - 4.0
    plan = replace(TINY if args.tiny else Plan(), parts=tuple(args.parts), kinds=tuple(args.kinds))
    if args.until or args.tiny:
        from benchmarks.experts_cuts.phases import work  # who watches a process needs no torch

        work(plan, args.out, until)
        return 0 if args.until else report(args.out, plan.size)
    print({**gpu(), **host(), **torch_versions()}, flush=True)
    command = [sys.executable, "-m", "benchmarks.experts_cuts", "--out", str(args.out), "--until", str(until)]
    command += ["--parts", *args.parts, "--kinds", *args.kinds]
    starts = supervise(command, args.out, until)
    print(f"the process that measures was started {starts} times")
    return report(args.out, plan.size)


if __name__ == "__main__":
    sys.exit(main())
