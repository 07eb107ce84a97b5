"""Random loads, recorded and replayed: the plans are the same, whatever was preempted, aborted or failed."""

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roseinfer.core.clock import ManualClock
from roseinfer.core.runner import WindowPool
from roseinfer.engine.record import RecordingCore, engine_recorder
from roseinfer.sim.replay import read_recording, replay
from tests.helpers.cases import examples
from tests.helpers.engines import add, make_core
from tests.helpers.fake_runner import FakeRunner
from tests.property.test_engine import VOCAB, Job, fits, make_jobs, policies

WINDOW_TOKENS, WINDOW_BLOCKS = 3, 60


def drive(core: RecordingCore, clock: ManualClock, jobs: list[Job]) -> None:
    aborts: dict[int, list[str]] = {}
    step = 0
    while core.busy or step < 30:
        for i, job in enumerate(jobs):
            if job.at_step == step:
                add(core, str(i), list(job.prompt), n=job.n, **dict(job.params))
                if job.abort_after is not None:
                    aborts.setdefault(step + job.abort_after, []).append(f"{i}:0")
        core.abort(aborts.pop(step, []))
        core.step()
        clock.advance(0.01)
        step += 1


@examples(150, derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    depth=st.sampled_from([1, 2]),
    block_size=st.sampled_from([1, 2, 4]),
    spare_blocks=st.integers(0, 12),
    memory=st.sampled_from(["plain", "window", "states"]),
    num_slots=st.sampled_from([1, 3, 30]),
    fail_on_token=st.sampled_from([None, None, 7]),
    options=policies() | st.sampled_from([{"scheduling_policy": name} for name in ("slack", "scorpio", "qoserve")]),
)
def test_a_replay_makes_the_recorded_plans(
    tmp_path_factory: pytest.TempPathFactory,
    seed: int,
    depth: int,
    block_size: int,
    spare_blocks: int,
    memory: str,
    num_slots: int,
    fail_on_token: int | None,
    options: dict[str, Any],
) -> None:
    jobs = make_jobs(random.Random(seed), count=8, longest=20)
    file = tmp_path_factory.mktemp("recordings") / "run.jsonl"
    clocks: list[ManualClock] = []

    def recording(scheduler: Any, runner: Any, clock: ManualClock, **others: Any) -> RecordingCore:
        clocks.append(clock)
        return RecordingCore(engine_recorder(file), scheduler, runner, clock, **others)

    sizes: dict[str, Any] = {
        "windows": (WindowPool(WINDOW_TOKENS, WINDOW_BLOCKS),) if memory == "window" else (),
        "num_slots": num_slots if memory == "states" else 0,
    }
    num_blocks = fits(jobs, block_size) + spare_blocks
    core = make_core(
        vocab_size=VOCAB,
        runner=FakeRunner(num_blocks, block_size, VOCAB, fail_on_token, **sizes),
        num_blocks=num_blocks,
        block_size=block_size,
        depth=depth,
        engine=recording,
        **sizes,
        **{"max_num_batched_tokens": 20, **options},
    )
    drive(core, clocks[0], jobs)
    core.close()
    recorded = read_recording(str(file))
    assert replay(recorded).plans == recorded.plans
