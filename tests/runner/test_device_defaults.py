"""How many seats there are where the options do not say so."""

import pytest

from roseinfer.core.config import EngineConfig, ModelConfig, SchedulerConfig
from roseinfer.core.plan import StepLimits
from roseinfer.runner.device_defaults import default_seats, fit_to_device


@pytest.mark.parametrize(("gib", "seats"), [(0, 256), (24, 256), (48, 256), (79.1, 512), (140, 512)])
def test_a_large_gpu_has_more(gib: float, seats: int) -> None:
    assert default_seats(int(gib * 2**30)) == seats


@pytest.mark.parametrize(("asked", "seats"), [(None, 256), (7, 7)])
def test_what_was_asked_for_stays(asked: int | None, seats: int) -> None:
    scheduler = SchedulerConfig(max_num_seqs=asked, max_active_requests=300)
    config = fit_to_device(EngineConfig(model=ModelConfig(device="cpu"), scheduler=scheduler))
    assert config.scheduler.max_num_seqs == config.scheduler.max_running == seats
    assert StepLimits.of(scheduler, 64).max_rows == seats
