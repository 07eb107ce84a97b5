"""K/V in host memory on a recorded load, simulated: the same requests with and without it.

    python -m benchmarks.kv_host_sim mooncake_conversation_trace.jsonl [--seconds 900] [--part 4] [--speeds 0.8,1]

The trace is a whole fleet's: one engine gets one of `part` conversations, which their second blocks tell apart. The
machine is Qwen3-8B in 16 bits on an H200 by default, with a tenth of the KV cache that it has. Requests that exceed the
context are left out. Every request has the objectives; one that is turned away or late counts against adherence.
`from KV`, `from host`: shares of the prompts' tokens that were in the KV cache, and that were loaded.
"""

import argparse
import json
import zlib
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from roseinfer.bench.report import table
from roseinfer.core.slo import Slo
from roseinfer.priced.machine import Machine
from roseinfer.sched.cost.params import CostParams
from roseinfer.sched.registry import scheduler_config
from roseinfer.sim.report import summarise
from roseinfer.sim.simulator import simulate
from roseinfer.sim.traces import Traced, read_trace
from roseinfer.sim.workload import VOCAB, Arrival

# `roseinfer calibrate` of Qwen3-8B in 16 bits on an H200; a block is 2.25 MiB.
H200 = CostParams(4.57e-3, 17.2e-6, 3.9e-9, 13.5e-6, 34e-9, 34e-9)


@dataclass(frozen=True, slots=True)
class Case:
    policy: str
    speed: float
    host_blocks: int


@dataclass(frozen=True, slots=True)
class Load:
    """What all cases share. `seconds`: of the trace's own time. `part`: one of so many conversations."""

    trace: str
    seconds: float
    part: int
    slo: Slo
    machine: Machine

    def arrivals(self, speed: float) -> list[Arrival]:
        lines = read_trace(self.trace, seconds=self.seconds, speed=speed)
        own = [line for line in lines if _conversation(line) % self.part == 0]
        fitting = [line for line in own if line.prompt_len + line.output_len <= self.machine.max_model_len]
        return [Arrival(line.at_s, line.prompt_ids(VOCAB), line.output_len, slo=self.slo) for line in fitting]


def _conversation(line: Traced) -> int:
    """Equal for the requests of one; the first block is a prompt that all have."""
    first = line.blocks[1] if len(line.blocks) > 1 else sum(line.blocks)
    return zlib.crc32(first.to_bytes(8, "little"))


def run(load: Load, case: Case) -> dict[str, Any]:
    arrivals = load.arrivals(case.speed)
    machine = replace(load.machine, num_host_blocks=case.host_blocks)
    options: dict[str, Any] = {"scheduling_policy": case.policy, "max_num_seqs": 256, "overlap": True}
    found = simulate(arrivals, scheduler_config(**options), machine)
    summary, offload = summarise(found), found.stats.offload
    row: dict[str, Any] = {"policy": case.policy, "req/s": f"{summary['offered_req_s']:.2f}", "host": case.host_blocks}
    row |= {"from KV": f"{found.reused[0]:.1%}", "from host": f"{found.reused[1]:.1%}"}
    ttft, tpot = summary["ttft_ms"], summary["tpot_ms"]
    row |= {"TTFT p50 ms": f"{ttft['p50']:.0f}", "p95": f"{ttft['p95']:.0f}", "p99": f"{ttft['p99']:.0f}"}
    row |= {
        "TPOT p50 ms": f"{tpot['p50']:.1f}",
        "p99 ": f"{tpot['p99']:.1f}",
        "adherence": f"{summary['adherence']:.3f}",
    }
    row |= {"preempted": found.preemptions, "elapsed s": f"{found.elapsed_s:.0f}"}
    return row | {"loaded": offload.loaded if offload else 0, "stored": offload.stored if offload else 0}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    floats = lambda text: [float(part) for part in text.split(",")]  # noqa: E731
    parser.add_argument("trace")
    parser.add_argument("--seconds", type=float, default=900.0)
    parser.add_argument("--part", type=int, default=4)
    parser.add_argument("--speeds", type=floats, default=[0.8, 1.0])
    parser.add_argument("--policies", default="fifo,slack")
    parser.add_argument("--kv-blocks", type=int, default=4600)
    parser.add_argument("--host-blocks", type=floats, default=[0, 46_000])
    parser.add_argument("--context", type=int, default=40_960)
    parser.add_argument("--ttft-ms", type=float, default=5000.0)
    parser.add_argument("--tpot-ms", type=float, default=50.0)
    parser.add_argument("--load-us", type=float, default=44.0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--json")
    args = parser.parse_args()
    cost = replace(H200, load_s=args.load_us * 1e-6, store_s=args.load_us * 1e-6)
    machine = Machine(cost, max_model_len=args.context, num_kv_blocks=args.kv_blocks)
    load = Load(args.trace, args.seconds, args.part, Slo(args.ttft_ms / 1e3, args.tpot_ms / 1e3), machine)
    cases = [Case(*c) for c in product(args.policies.split(","), args.speeds, map(int, args.host_blocks))]
    with ProcessPoolExecutor(args.jobs) as pool:
        rows = list(pool.map(run, [load] * len(cases), cases))
    print(table(rows))
    if args.json:
        Path(args.json).write_text(json.dumps({"args": vars(args), "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
