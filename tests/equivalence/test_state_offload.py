"""Recurrent states in host memory change no token: evicted prefixes and preempted requests continue from them."""

from functools import cache
from pathlib import Path

import pytest

from roseinfer.core.request import Prompt
from roseinfer.core.sampling import SequenceParams
from roseinfer.engine.core import EngineCore
from roseinfer.engine.messages import Add
from roseinfer.sched.cost.online_fit import CostModel
from roseinfer.sched.cost.params import CostParams
from tests.equivalence.small_engines import start
from tests.helpers.checkpoints import VOCAB, make_reference, save_reference
from tests.helpers.engines import Collected, run_dry
from tests.helpers.late_copies import LateCopies

HOST_GIB = 1 / 64
ANSWER = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@cache
def checkpoint(folder: Path) -> Path:
    return save_reference(make_reference("qwen3.5"), folder / "states")


@pytest.fixture(params=[pytest.param("cpu", marks=pytest.mark.exhaustive), "late copies"])
def copies(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Let copies be done at once, or as late as the streams and events of a GPU allow."""
    if request.param != "cpu":
        LateCopies(monkeypatch).install(monkeypatch)
    return request.param


def engine(folder: Path, **options: object) -> EngineCore:
    core = start(checkpoint(folder), device="cpu", overlap=True, max_num_batched_tokens=24, **options)
    if core.scheduler.offload is not None:
        # The model is so small that nothing would be loaded.
        core.scheduler.offload.cost = CostModel(CostParams(token_s=1.0), fit=False)
    return core


def text(number: int, count: int) -> list[int]:
    return [(i * 37 + number * 11 + 5) % VOCAB for i in range(count)]


def ask(core: EngineCore, prompts: list[list[int]], max_tokens: int = ANSWER) -> list[Collected]:
    """Run prompts at once, greedily."""
    params = SequenceParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    for number, prompt in enumerate(prompts):
        core.add(Add(str(number), Prompt(prompt, params)))
    found = run_dry(core)
    return [found[f"{number}:0"] for number in range(len(prompts))]


def test_turns_continue_from_states_that_were_evicted(folder: Path, copies: str) -> None:
    core = engine(folder, num_kv_blocks=200, state_slots=6, kv_offloading_size=HOST_GIB)
    plain = engine(folder, num_kv_blocks=512)
    said = {number: text(number, 30) for number in range(6)}
    for _ in range(2):
        for number, history in said.items():
            (got,), (want,) = ask(core, [history]), ask(plain, [history])
            assert got.tokens == want.tokens
            said[number] = [*history, *want.tokens, *text(number + 50, 3)]
    stats = core.stats()
    assert stats.states is not None and stats.states.loaded > 0 and stats.states.stored > 0
    core.close()
    plain.close()


def test_preempted_requests_continue_from_states_in_host_memory(folder: Path, copies: str) -> None:
    prompts = [text(number, 21 + number) for number in range(6)]
    plain = engine(folder, num_kv_blocks=512)
    wants = ask(plain, prompts, 80)
    core = engine(folder, num_kv_blocks=50, state_slots=8, kv_offloading_size=HOST_GIB)
    for want, got in zip(wants, ask(core, prompts, 80), strict=True):
        assert got.tokens == want.tokens
    stats = core.stats()
    assert stats.preemptions > 0 and stats.states is not None and stats.states.stored > 0
    core.close()
    plain.close()
