"""CPU cost of the engine: plan and commit of a step, and adding a request. No model, no torch in the loop.

    python -m benchmarks.engine_step [--running 256] [--waiting 1000] [--steps 500] [--policy fifo]

Every running request decodes; prompts have mixed lengths, so a sixteenth of them cross a block border in each step.
"""

import argparse
import gc
import random
import statistics
import time

from roseinfer.bench.report import header, percentile
from roseinfer.core.clock import MonotonicClock
from roseinfer.core.config.engine import SchedulerConfig
from roseinfer.core.plan import RowResult, StepLimits, StepPlan, StepResult, TokenMasks
from roseinfer.core.request import Prompt
from roseinfer.core.runner import Capabilities, KvSizes
from roseinfer.core.sampling import SequenceParams
from roseinfer.engine.core import EngineCore
from roseinfer.engine.messages import Add
from roseinfer.kv.manager import KvManager
from roseinfer.sched.registry import make_policy
from roseinfer.sched.scheduler import Scheduler

VOCAB = 1000


class NullRunner:
    """Runner that samples token 7 at no cost."""

    capabilities = Capabilities()

    def submit(self, plan: StepPlan) -> StepPlan:
        return plan

    def mask_space(self, lines: int) -> memoryview:
        raise NotImplementedError("there are no masks")

    def sample(self, handle: StepPlan, masks: TokenMasks | None = None) -> None:
        pass

    def collect(self, handle: StepPlan) -> StepResult:
        rows = [RowResult(row.request_id, (7,) if row.sample else ()) for row in handle.rows]
        return StepResult(handle.step, rows)

    def close(self) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--waiting", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--policy", default="fifo")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print(header("engine step", vars(args)))

    config = SchedulerConfig(max_num_seqs=args.running, max_num_batched_tokens=8192, scheduling_policy=args.policy)
    kv = KvManager(KvSizes(num_blocks=args.running * 64, block_size=16))
    scheduler = Scheduler(config, kv, make_policy(config), 8192, StepLimits.of(config, 8192))
    runner = NullRunner()
    core = EngineCore(scheduler, runner, MonotonicClock(), vocab_size=VOCAB)

    rng = random.Random(args.seed)
    added = []
    for i in range(args.running + args.waiting):
        prompt = [rng.randrange(VOCAB) for _ in range(100 + i % 50)]
        request = Add(f"request-{i}", Prompt(prompt, SequenceParams(max_tokens=args.steps + 200, ignore_eos=True)))
        start = time.perf_counter()
        core.add(request)
        added.append(time.perf_counter() - start)
    while len(scheduler.running) < args.running:
        core.step()
    core.step()

    gc.collect()
    gc.freeze()
    plans, commits = [], []
    for _ in range(args.steps):
        start = time.perf_counter()
        plan = scheduler.plan(start)
        planned = time.perf_counter()
        assert plan is not None and len(plan.rows) == args.running
        result = runner.collect(plan)
        collected = time.perf_counter()
        scheduler.commit(plan, result, collected)
        commits.append(time.perf_counter() - collected)
        plans.append(planned - start)

    both = [plan + commit for plan, commit in zip(plans, commits, strict=True)]
    print(f"  {len(scheduler.running)} running, {len(scheduler.waiting)} waiting")
    for name, values in (("plan", plans), ("commit", commits), ("plan + commit", both)):
        print(
            f"  {name:14} {statistics.median(values) * 1e3:6.3f} ms median  {percentile(values, 99) * 1e3:6.3f} ms p99"
        )
    median_us, p99_us = statistics.median(added) * 1e6, percentile(added, 99) * 1e6
    print(f"  {'add request':14} {median_us:6.1f} us median  {p99_us:6.1f} us p99")


if __name__ == "__main__":
    main()
