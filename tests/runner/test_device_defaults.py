"""Default number of seats and default length of steps."""

import pytest

from roseinfer.config.hub import resolve_model
from roseinfer.core.config.engine import EngineConfig, ModelConfig, SchedulerConfig
from roseinfer.core.plan import StepLimits
from roseinfer.runner.device_defaults import default_seats, fit_to_device, with_bursts, with_pooling
from roseinfer.sched.registry import make_policy, scheduler_config


@pytest.mark.parametrize(("gib", "seats"), [(0, 256), (24, 256), (48, 256), (79.1, 512), (140, 512)])
def test_a_large_gpu_has_more_seats(gib: float, seats: int) -> None:
    assert default_seats(int(gib * 2**30)) == seats
    assert default_seats(int(gib * 2**30), pools=True) == max(seats, 1024 if seats == 512 else 0)


@pytest.mark.parametrize(("asked", "seats"), [(None, 256), (7, 7)])
def test_configured_seats_stay(asked: int | None, seats: int) -> None:
    scheduler = SchedulerConfig(max_num_seqs=asked, max_active_requests=300)
    config = fit_to_device(EngineConfig(model=ModelConfig(device="cpu"), scheduler=scheduler), resolve_model("tiny"))
    assert config.scheduler.max_num_seqs == config.scheduler.max_running == seats
    assert StepLimits.of(scheduler, 64).max_rows == seats


@pytest.mark.parametrize(
    ("gib", "options", "largest"),
    [
        (140, {}, 8192),
        (140, {"max_num_batched_tokens": 512}, 2048),
        (140, {"max_num_batched_tokens": 16384}, 16384),
        (140, {"slack_burst_tokens": 4096}, 4096),
        (140, {"scheduling_policy": "fifo"}, 2048),
        (140, {"enable_chunked_prefill": False}, 2048),
        (48, {}, 2048),
        (0, {}, 2048),
    ],
)
def test_a_large_gpu_has_longer_steps_for_bursts(gib: int, options: dict[str, object], largest: int) -> None:
    config = with_bursts(scheduler_config(**options), gib << 30)
    assert config.largest_step == largest
    make_policy(config)


@pytest.mark.parametrize(
    ("gib", "given", "tokens"), [(140, 2048, 8192), (140, 4096, 4096), (48, 2048, 2048), (0, 2048, 2048)]
)
def test_steps_are_longer_if_no_output_token_waits_for_them(gib: int, given: int, tokens: int) -> None:
    assert with_pooling(scheduler_config(max_num_batched_tokens=given), gib << 30).max_num_batched_tokens == tokens
