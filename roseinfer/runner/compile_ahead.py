"""Parallel compilation of the kernels of all kinds of steps before the first of them runs."""

from typing import TYPE_CHECKING

import torch

from roseinfer.core.plan import Row, StepLimits
from roseinfer.kernels.common.compile_ahead import compiling
from roseinfer.models.base import CausalLM
from roseinfer.runner.cuda_draft_steps import CudaDraftSteps
from roseinfer.runner.cuda_graphs import MAX_EXACT_ROWS
from roseinfer.runner.cuda_sampler import CudaTokenChooser
from roseinfer.runner.forward import Columns
from roseinfer.runner.model_runner import ModelRunner
from roseinfer.runner.seats import Feature

if TYPE_CHECKING:
    from roseinfer.runner.assembly import Assembly

# Row counts at which products and attention switch kernels.
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 192, 256)
# A chunk whose products with adapters are divided in another way than those of fewer or many more tokens.
_ADAPTED_CHUNK_TOKENS = 512


@torch.inference_mode()
def compile_ahead(assembly: "Assembly", model: CausalLM, limits: StepLimits) -> None:
    """Run the forward pass and the choice of tokens, if any, for every kind of step, without launching our kernels.

    Kernels that this misses are compiled at their first launch. Library kernels do run in between, on unwritten memory.
    That is safe: they only compute numbers, no addresses, and token ids are zeros.
    """
    few = () if model.spec.experts is None else range(1, MAX_EXACT_ROWS)  # programs of experts depend on their number
    sizes = sorted({min(rows, limits.max_rows) for rows in (*_ROWS, *few, limits.max_rows)})
    steps = [[1] * rows for rows in sizes]
    steps += [[tokens] for tokens in _chunks(model, limits.max_tokens)]
    choice = CudaTokenChooser(assembly.seats) if isinstance(assembly.runner, ModelRunner) else None
    with compiling() as ahead:
        if not ahead:
            return
        for counts in steps:
            _forward(assembly, model, choice, counts)
        if assembly.seats.adapter_slots is not None:
            assembly.seats.adapted.update(range(len(assembly.seats.seats)))
            for counts in [*steps, [min(_ADAPTED_CHUNK_TOKENS, limits.max_tokens)]]:
                _forward(assembly, model, None, counts)
            assembly.seats.adapted.clear()
        if isinstance(assembly.draft_steps, CudaDraftSteps):
            assembly.draft_steps.launch_all()


def _chunks(model: CausalLM, most: int) -> set[int]:
    """Return lengths of prompt chunks. Products of experts are split by the number of tokens, also at
    some in between.
    """
    if model.spec.experts is None:
        return {min(2, most), most}
    return {min(tokens, most) for tokens in (384, 768, *(1 << power for power in range(1, most.bit_length() + 1)))}


def _forward(assembly: "Assembly", model: CausalLM, choice: CudaTokenChooser | None, counts: list[int]) -> None:
    rows = [Row("ahead", seat, 0, count, 1, True, 0, 0, ()) for seat, count in enumerate(counts)]
    out = assembly.forward.run(Columns.of(rows))
    assert out.hidden is not None and out.sample_at is not None, "the step must be launched kernel by kernel"
    if choice is None:
        model.normed(out.hidden)
        return
    seats, ends = out.sample_at
    logits = model.logits(out.hidden)
    for features in (0, Feature.RANDOM, Feature.RANDOM | Feature.FILTERED):
        choice.choose(logits, seats, ends, features)
        # Edited logits are float32 with int64 indices, see `Sampler.sample`.
        choice.choose(logits[:8].float(), seats[:8].long(), ends[:8].long(), features)
