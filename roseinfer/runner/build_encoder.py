"""Construction of a runner for an encoder. It keeps no K/V, so its KV blocks exist in plans only."""

from pathlib import Path

import torch

from roseinfer.core.config.engine import EngineConfig
from roseinfer.core.errors import ConfigError
from roseinfer.core.plan import Admission, Row, StepLimits, StepPlan
from roseinfer.core.pooling import NO_OUTPUT
from roseinfer.core.runner import RunnerFacts
from roseinfer.models.encoders.base import EncoderModel
from roseinfer.models.encoders.loader import load_encoder
from roseinfer.models.encoders.registry import read_encoder_spec
from roseinfer.models.pooling.config import PoolingSpec, read_encoder_pooling
from roseinfer.models.pooling.heads import EmbeddingHead, LogitHead
from roseinfer.parallel.group import LiveGroup
from roseinfer.runner.cache_size import check_context
from roseinfer.runner.device import rank_device
from roseinfer.runner.encoder_forward import EncoderForward
from roseinfer.runner.phases import phase
from roseinfer.runner.plan_state import PlanState
from roseinfer.runner.pooling import Pooler, PoolingHead
from roseinfer.runner.pooling_runner import PoolingRunner
from roseinfer.runner.rehearsal import full_step
from roseinfer.runner.seats import SeatTable
from roseinfer.runner.start_notes import without_head

# Rows of a rehearsal on a CPU, which only loads what is loaded lazily.
CPU_REHEARSAL_ROWS = 2


def build_encoder(config: EngineConfig, folder: Path, group: LiveGroup) -> tuple[PoolingRunner, RunnerFacts]:
    """Load the encoder in `folder` and give it seats. The scheduler must not split its prompts.

    Raise `ConfigError` naming the option that cannot be met, `ModelNotFoundError`, `UnsupportedModelError`.
    """
    startup_s: dict[str, float] = {}
    options = without_head(config.model)
    with phase(startup_s, "load"):
        device = rank_device(config, group.rank, group.size)
        spec = read_encoder_spec(folder)
        pooling = read_encoder_pooling(folder, spec, options.runner, options.pooling)
        check_context(options.max_model_len, spec.max_length)
        encoder = load_encoder(folder, spec, options, device, group)
        head = encoder_head(encoder, pooling)
    context = options.max_model_len or min(spec.max_length, pooling.max_tokens or spec.max_length)
    num_blocks = config.scheduler.seats * -(-context // config.cache.block_size)
    limits = StepLimits.of(config.scheduler, context)
    seats = SeatTable(config.scheduler.seats, context, config.cache.block_size, spec.vocab_size, device)
    pooler = Pooler(pooling.method, head, seats, spec.hidden_size, normalized=pooling.normalized)
    runner = PoolingRunner(EncoderForward(encoder, seats), PlanState(None, seats), limits, pooler)
    with phase(startup_s, "warm-up"):
        _rehearse(runner, limits, context, device)
    facts = RunnerFacts(
        model_type=spec.architecture,
        max_model_len=context,
        num_blocks=num_blocks,
        block_size=config.cache.block_size,
        prefix_caching=config.cache.enable_prefix_caching,
        limits=limits,
        vocab_size=spec.vocab_size,
        eos_token_ids=(),
        dtype=str(encoder.dtype).removeprefix("torch."),
        weights=encoder.weights,
        device=str(device),
        default_sampling={},
        startup_s=startup_s,
        pooling=pooling.info(head.width),
        keeps_kv=False,
    )
    return runner, facts


def encoder_head(encoder: EncoderModel, pooling: PoolingSpec) -> PoolingHead:
    """Return the head for vectors: the model's own for scores, else what follows the pooling."""
    if encoder.spec.head is not None:
        return LogitHead(encoder.scores, encoder.spec.head.activation)
    return EmbeddingHead(
        lambda states: states, encoder.spec.hidden_size, pooling.dense, encoder.device, normalized=pooling.normalized
    )


def _rehearse(runner: PoolingRunner, limits: StepLimits, context: int, device: torch.device) -> None:
    """Run steps: on a GPU the fullest ones, of equal rows and with the longest, which show that its memory suffices."""
    rows = limits.max_rows
    if device.type == "cpu":
        limits = StepLimits(min(CPU_REHEARSAL_ROWS, rows), min(CPU_REHEARSAL_ROWS, rows))
    try:
        for equal in (True, False):
            _run([min(length, context) for length in full_step(limits, chunked=equal)], runner)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"out of memory for a step of {limits.max_tokens} tokens; lower max_num_batched_tokens or max_model_len"
        ) from error


def _run(lengths: list[int], runner: PoolingRunner) -> None:
    """Run a step with prompts of these lengths, and leave the seats empty."""
    plan = StepPlan(
        0,
        [Row("", seat, 0, count, count, True, 0, 0, ()) for seat, count in enumerate(lengths)],
        [Admission("", seat, [0] * count, count, NO_OUTPUT, 0, (), ()) for seat, count in enumerate(lengths)],
        num_tokens=sum(lengths),
    )
    for step in (plan, StepPlan(1, [], released=list(range(len(lengths))))):
        handle = runner.submit(step)
        runner.sample(handle)
        runner.collect(handle)
