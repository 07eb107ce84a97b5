"""Setups: named experiments with a machine, a mix of requests, and scheduler options."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from roseinfer.core.runner import ExpertChoice
from roseinfer.core.slo import Slo
from roseinfer.priced.machine import Machine
from roseinfer.sched.cost.params import CostParams
from roseinfer.sim.workload import LogNormalLengths, RequestMix


@dataclass(frozen=True, slots=True)
class Setup:
    """A named experiment. `scheduler`: options common to all policies."""

    name: str
    machine: Machine
    mix: RequestMix
    scheduler: Mapping[str, object] = field(default_factory=dict)


def slo_classes(*pairs: tuple[float, float]) -> tuple[Slo, ...]:
    """Return classes 1, 2, ... from pairs (TTFT in s, TPOT in ms)."""
    return tuple(Slo(ttft, tpot / 1e3, class_name=str(i + 1)) for i, (ttft, tpot) in enumerate(pairs))


# Lengths of chats, used by both setups.
_CHATS = LogNormalLengths(70, 1.35, 260, 0.85, prompt_min=4, prompt_max=1024, context=2048)

# An A100 with an 8B model in eager mode: fitted so that the curves published for SCORPIO come out (its 8B ShareGPT
# figures); prompts of at most 1024 tokens, 20,000 KV blocks, no memory pressure.
SCORPIO_8B = Setup(
    name="scorpio-8b",
    machine=Machine(
        cost=CostParams(step_s=17.5e-3, token_s=85e-6, pair_s=0.0, row_s=70e-6, context_s=0.16e-6),
        noise=0.03,
        max_model_len=2048,
        num_blocks=20_000,
        block_size=16,
        prefix_caching=False,
    ),
    mix=RequestMix(
        lengths=_CHATS,
        classes=slo_classes((0.5, 30), (2, 30), (3, 30), (0.5, 50), (1, 50), (7.5, 50)),
    ),
    scheduler={"max_num_seqs": 256, "max_num_batched_tokens": 2048},
)

# Qwen3-30B-A3B in FP8 on a GPU that reads 4.28 TB/s: 128 experts of 0.226 GB, of which 8 compute each token, 1.56 GB of
# other weights, K and V in 16 bits, and a millisecond of a step for launches. Reckoned from bytes, not measured. Few
# rows fit the first three classes, at which a step reads a third of the experts, and all of them fit the others.
MOE_30B = Setup(
    name="moe-30b",
    machine=Machine(
        cost=CostParams(
            step_s=1.4e-3,
            token_s=15e-6,
            pair_s=2e-9,
            row_s=8e-6,
            context_s=23e-9,
            chunk_context_s=23e-9,
            expert_s=53e-6,
            experts=ExpertChoice(128, 8),
        ),
        noise=0.03,
        max_model_len=4096,
        num_blocks=60_000,
        block_size=16,
        prefix_caching=False,
    ),
    mix=RequestMix(
        lengths=_CHATS,
        classes=slo_classes((0.13, 5), (0.53, 5), (0.8, 5), (0.13, 12), (0.27, 12), (2.0, 12)),
    ),
    scheduler={"max_num_seqs": 256, "max_num_batched_tokens": 2048},
)

SETUPS: Mapping[str, Setup] = {setup.name: setup for setup in (SCORPIO_8B, MOE_30B)}
