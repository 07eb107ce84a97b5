"""Requests that end before the model ends them: turned away, or out of time."""

from typing import Any

from roseinfer.core.outputs import FinishReason
from roseinfer.core.request import Prompt, RequestMeta
from roseinfer.core.sampling import SequenceParams
from roseinfer.core.slo import Slo
from roseinfer.engine.core import EngineCore
from roseinfer.engine.messages import Add
from tests.helpers.engines import Collected, gather, make_core, run_dry


def add(core: EngineCore, name: str, n: int = 1, **options: Any) -> None:
    core.add(Add(name, Prompt([1] * 6, SequenceParams(max_tokens=8, ignore_eos=True), RequestMeta(**options)), n))


def test_an_expired_request_ends_as_a_timeout_wherever_it_is() -> None:
    for depth in (1, 2):
        core = make_core(max_num_seqs=1, depth=depth)
        add(core, "runs", deadline_s=1.0)
        add(core, "waits", deadline_s=1.0)
        add(core, "stays", deadline_s=5.0)
        done: dict[str, Collected] = {}
        for _ in range(3):
            gather(core.step(), done)
        core.clock.advance(1.0)
        run_dry(core, done)
        assert [done[f"{name}:0"].reason for name in ("runs", "waits", "stays")] == [
            FinishReason.TIMEOUT,
            FinishReason.TIMEOUT,
            FinishReason.LENGTH,
        ]
        assert 0 < len(done["runs:0"].tokens) < 8
        assert not done["waits:0"].tokens


def test_a_deadline_in_the_past_of_a_finished_request_harms_nobody() -> None:
    core = make_core()
    add(core, "a", deadline_s=1.0)
    run_dry(core)
    add(core, "a")
    core.clock.advance(2.0)
    assert run_dry(core)["a:0"].reason is FinishReason.LENGTH


def test_a_refused_request_takes_its_other_samples_along() -> None:
    core = make_core(scheduling_policy="slack")
    add(core, "late", n=3, slo=Slo(ttft_s=0.1), arrival_s=1e-9)
    add(core, "fine", slo=Slo(ttft_s=100.0), arrival_s=1e-9)
    core.clock.advance(0.2)
    done = run_dry(core)
    for i in range(3):
        end = done[f"late:{i}"].end
        assert end is not None and end.reason is FinishReason.REJECTED
        assert end.rejection is not None and end.rejection.reason == "ttft"
        assert end.rejection.predicted_ttft_s > 0.1
        assert end.times.first_token_s == 0.0
    assert len(done["fine:0"].tokens) == 8
