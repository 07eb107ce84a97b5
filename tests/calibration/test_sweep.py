"""The sweep over a simulated machine finds that machine's constants."""

from collections import defaultdict

import pytest

from roseinfer.calibration.config import CalibrateConfig, CalibrationGrid
from roseinfer.calibration.recorded import recorded_samples
from roseinfer.calibration.sweep import CalibrationError, CalibrationSweep, EngineLimits
from roseinfer.core.clock import ManualClock
from roseinfer.core.config.engine import SchedulerConfig
from roseinfer.core.errors import ConfigError
from roseinfer.core.plan import StepLimits
from roseinfer.core.request import Prompt
from roseinfer.core.sampling import SequenceParams
from roseinfer.engine.core import EngineCore
from roseinfer.engine.messages import Add
from roseinfer.engine.record import RecordingCore, engine_recorder
from roseinfer.priced.machine import Machine, PricedRunner
from roseinfer.sched.cost.offline_fit import fit_cost
from roseinfer.sched.cost.params import CostParams, Work
from roseinfer.sched.registry import make_policy
from roseinfer.sched.scheduler import Scheduler
from roseinfer.sim.engine import FixedLengthRunner
from tests.helpers.kv_managers import kv_manager

TRUE = CostParams(step_s=4.4e-3, token_s=27e-6, pair_s=0.4e-9, row_s=12e-6, context_s=31e-9, chunk_context_s=40e-9)
GRID = CalibrationGrid(rows=(1, 4, 16, 64), contexts=(32, 200, 1000), prompts=(16, 128, 600), repeats=2)


class Endless(FixedLengthRunner):
    """No request ends by itself."""

    def __init__(self) -> None:
        super().__init__()
        self._last = defaultdict(lambda: 1 << 30)


def engine(
    noise: float = 0.0, *, overlap: bool = False, blocks: int = 8192
) -> tuple[EngineCore, EngineLimits, ManualClock]:
    machine = Machine(TRUE, noise, max_model_len=2048, num_blocks=blocks)
    clock = ManualClock()
    config = SchedulerConfig(scheduling_policy="fifo", max_num_seqs=80, max_num_batched_tokens=512)
    kv = kv_manager(blocks, machine.block_size)
    limits = StepLimits.of(config, machine.max_model_len)
    scheduler = Scheduler(config, kv, make_policy(config), machine.max_model_len, limits)
    core = EngineCore(
        scheduler, PricedRunner(Endless(), machine, clock, seed=1), clock, depth=2 if overlap else 1, vocab_size=1000
    )
    return core, EngineLimits(2048, blocks * machine.block_size, 80, 1000), clock


@pytest.mark.parametrize("overlap", [False, True])
def test_it_recovers_the_constants_of_the_machine(overlap: bool) -> None:
    core, bounds, _ = engine(overlap=overlap)
    policy = core.scheduler.policy
    samples = CalibrationSweep(core, bounds, GRID).run()
    assert fit_cost(samples).params.values() == pytest.approx(TRUE.values(), rel=1e-3)
    assert core.scheduler.policy is policy and not core.busy
    assert core.scheduler.kv.num_free == core.scheduler.kv.num_blocks


def test_with_noise() -> None:
    core, bounds, _ = engine(noise=0.03)
    fit = fit_cost(CalibrationSweep(core, bounds, GRID).run())
    for work in (Work(0, 0.0, 1, 50), Work(0, 0.0, 60, 60_000), Work(400, 80_000.0, 0, 0), Work(500, 2e5, 32, 9_000)):
        assert fit.params.seconds(work) == pytest.approx(1.024 * TRUE.seconds(work), rel=0.02), "mean of 1 + |N|"
    assert fit.r2 > 0.97 and fit.mape < 0.03


def test_every_kind_of_step_occurs() -> None:
    core, bounds, _ = engine()
    works = [sample.work for sample in CalibrationSweep(core, bounds, GRID).run()]
    assert {work.decode_rows for work in works} >= {0, 1, 4, 16, 64}
    assert {work.prompt_tokens for work in works} >= {0, 16, 128}
    assert any(work.prompt_tokens and not work.decode_rows for work in works)
    short = [work for work in works if 16 <= work.prompt_tokens < 32]
    assert any(work.prompt_pairs > 900 * work.prompt_tokens for work in short), "behind a cached beginning"
    assert max(work.decode_context for work in works) > 64 * 200


def test_small_chunks_behind_long_prefixes() -> None:
    core, bounds, _ = engine()
    grid = CalibrationGrid(rows=(1, 8), contexts=(32, 200), prompts=(16, 128), repeats=2, prefixes=(1400, 5000))
    works = [sample.work for sample in CalibrationSweep(core, bounds, grid).run()]
    behind = [work for work in works if work.prompt_tokens < 32 and work.prompt_context > 1300]
    assert {work.decode_rows for work in behind} == {0, 1, 8} and len(behind) >= 6
    assert max(work.prompt_context for work in works) < 1500, "what exceeds the context is left out"
    assert max(work.decode_context for work in works if work.prompt_context > 1300) < 8 * 200


def test_cells_that_do_not_fit_are_left_out() -> None:
    core, bounds, _ = engine(blocks=100)
    works = [sample.work for sample in CalibrationSweep(core, bounds, GRID).run()]
    assert max(work.decode_rows for work in works) == 16
    assert core.stats().preemptions == 0
    with pytest.raises(CalibrationError, match="no step of the grid fits"):
        CalibrationSweep(core, bounds, CalibrationGrid(rows=(1,), contexts=(4000,), prompts=(16,))).run()


def test_the_sweep_is_the_same_each_time() -> None:
    runs = []
    for _ in range(2):
        core, bounds, _ = engine()
        runs.append(CalibrationSweep(core, bounds, GRID, seed=3).run())
    assert runs[0] == runs[1]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_recorded_run_gives_its_steps(overlap: bool, tmp_path) -> None:
    core, _, clock = engine(overlap=overlap)
    file = tmp_path / "run.jsonl"
    recording = RecordingCore(
        engine_recorder(file), core.scheduler, core.runner, clock, depth=2 if overlap else 1, vocab_size=1000
    )
    for number in range(40):
        params = SequenceParams(max_tokens=5 + 11 * number % 60, ignore_eos=True)
        recording.add(Add(f"r{number}", Prompt([7 + number] * (20 + 97 * number % 700), params)))
        for _ in range(3):
            recording.step()
    while recording.busy:
        recording.step()
    recording.close()
    samples, *_ = recorded_samples(str(file))
    assert len(samples) > 100
    for sample in samples:
        assert sample.seconds == pytest.approx(TRUE.seconds(sample.work)), "each plan with its own duration"


def test_the_grid_of_the_options() -> None:
    default = CalibrationGrid((1, 2), (3,), (4,))
    assert CalibrateConfig(decode_rows="5, 6", repeats=7).grid(default) == CalibrationGrid((5, 6), (3,), (4,), 7)
    for options in ({"decode_rows": "1,x"}, {"prompt_lens": "0"}, {"repeats": 0}):
        with pytest.raises(ConfigError, match=next(iter(options))):
            CalibrateConfig(**options)
