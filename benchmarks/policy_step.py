"""CPU cost of a policy with objectives per step: `begin` and `observe` together, on simulated time.

    python -m benchmarks.policy_step [--policy slack] [--running 256] [--waiting 1000] [--steps 1000]

The machine is sized so that about --running requests saturate it; --waiting more always wait, and each one that ends is
replaced. Requests have 20 ms per token, outputs around 400 tokens, and predictions with errors.
"""

import argparse
import gc
import random
import statistics
from time import perf_counter

from roseinfer.bench.report import header, percentile
from roseinfer.core.clock import ManualClock
from roseinfer.core.plan import StepLimits
from roseinfer.core.request import Prompt, RequestMeta, sequence_id
from roseinfer.core.runner import KvSizes
from roseinfer.core.sampling import SequenceParams
from roseinfer.core.slo import Slo
from roseinfer.engine.core import EngineCore
from roseinfer.engine.messages import Add
from roseinfer.kv.manager import KvManager
from roseinfer.priced.machine import Machine, PricedRunner
from roseinfer.sched.cost.online_fit import CostModel
from roseinfer.sched.cost.params import CostParams
from roseinfer.sched.estimates import Estimates
from roseinfer.sched.policy import Decision, Event, Policy, View
from roseinfer.sched.registry import make_policy, scheduler_config
from roseinfer.sched.scheduler import Scheduler
from roseinfer.sim.engine import END, FixedLengthRunner

TPOT_S, STEP_S = 0.020, 0.005


class PerStep:
    """Sum of the policy's time between two calls of `lap`."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._seconds = 0.0

    def begin(self, view: View) -> Decision:
        start = perf_counter()
        decision = self._policy.begin(view)
        self._seconds += perf_counter() - start
        return decision

    def observe(self, event: Event) -> None:
        start = perf_counter()
        self._policy.observe(event)
        self._seconds += perf_counter() - start

    def lap(self) -> float:
        seconds, self._seconds = self._seconds, 0.0
        return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", default="slack")
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--waiting", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--overlap", action="store_true")
    args = parser.parse_args()
    print(header("policy step", vars(args)))

    rng = random.Random(args.seed)
    row_s = 0.9 * (TPOT_S - STEP_S) / args.running
    machine = Machine(CostParams(STEP_S, 1e-7, 0.0, row_s, 0.0), noise=0.03)
    own = {"scorpio_mixed": True} if args.policy == "scorpio" else {}
    config = scheduler_config(
        scheduling_policy=args.policy, max_num_seqs=2 * args.running, max_num_batched_tokens=8192, **own
    )
    policy = PerStep(make_policy(config, Estimates(cost=CostModel(machine.cost))))
    kv = KvManager(KvSizes(num_blocks=4 * args.running * 64, block_size=16, prefix_caching=False))
    clock = ManualClock()
    outputs = FixedLengthRunner()
    runner = PricedRunner(outputs, machine, clock)
    limits = StepLimits.of(config, 8192)
    depth = 2 if args.overlap else 1
    core = EngineCore(
        Scheduler(config, kv, policy, 8192, limits),
        runner,
        clock,
        eos_ids=(END,),
        vocab_size=1000,
        depth=depth,
    )

    added = 0

    def add() -> None:
        nonlocal added
        output = max(2, round(rng.lognormvariate(5.8, 0.5)))
        prompt_ids = [1] * rng.randrange(50, 150)
        guess = max(8, output + round(rng.gauss(0, 100)))
        meta = RequestMeta(arrival_s=clock.now(), slo=Slo(1e6 + added, TPOT_S), predicted_len=guess)
        new = Add(str(added), Prompt(prompt_ids, SequenceParams(max_tokens=4000), meta))
        core.add(new)
        outputs.expect(sequence_id(str(added), 0), len(new.prompt.ids), output)
        added += 1

    def turn() -> None:
        stats = core.stats()
        for _ in range(args.running + args.waiting - stats.running - stats.waiting):
            add()
        core.step()

    for _ in range(300):
        turn()
    gc.collect()
    gc.freeze()
    policy.lap()
    laps, running, waiting = [], [], []
    for _ in range(args.steps):
        turn()
        laps.append(policy.lap())
        running.append(core.stats().running)
        waiting.append(core.stats().waiting)
    print(f"  {statistics.mean(running):.0f} running, {statistics.mean(waiting):.0f} waiting")
    mean, median = statistics.mean(laps) * 1e3, statistics.median(laps) * 1e3
    print(f"  policy  {median:6.3f} ms median  {mean:6.3f} ms mean  {percentile(laps, 99) * 1e3:6.3f} ms p99")


if __name__ == "__main__":
    main()
