"""Window groups and recurrent states change no token, whatever is preempted, shared or copied."""

from functools import cache
from pathlib import Path

import pytest

from roseinfer.core.request import Prompt
from roseinfer.core.sampling import SequenceParams
from roseinfer.engine.messages import Add
from tests.equivalence.small_engines import PROMPTS, build, start
from tests.equivalence.test_transformers import run_greedy
from tests.helpers.cases import cases
from tests.helpers.checkpoints import HYBRIDS, make_reference, save_reference
from tests.helpers.engines import Collected, run_dry

# Families with windows in some layers, and the type of K and V.
WINDOWED = (("gemma3", "fp8"), ("olmo3", "auto"), ("cohere2", "auto"))
SAMPLE_LEN = 10
SMALL = {"num_kv_blocks": 22, "max_num_batched_tokens": 7}
LARGE = {"num_kv_blocks": 512, "enable_window_groups": False}
HYBRID_SETTINGS = {
    "chunks of 5": {"max_num_batched_tokens": 5, "num_kv_blocks": 64},
    "preemption": {"num_kv_blocks": 16, "max_num_batched_tokens": 24, "state_slots": 14},
    "preemption, overlap, chunks of 7": {
        "num_kv_blocks": 15,
        "max_num_batched_tokens": 7,
        "state_slots": 12,
        "overlap": True,
    },
    "three slots, overlap": {"num_kv_blocks": 64, "state_slots": 3, "overlap": True},
    "preemption, blocks in host memory": {
        "num_kv_blocks": 16,
        "max_num_batched_tokens": 24,
        "state_slots": 40,
        "kv_offloading_size": 1 / 64,
        "overlap": True,
    },
    "one slot": {"num_kv_blocks": 64, "state_slots": 1, "max_num_batched_tokens": 9},
}
USUAL_HYBRID = ["preemption, overlap, chunks of 7", "one slot"]  # for host memory see test_state_offload
OTHER_HYBRIDS = [name for name in HYBRIDS if name != "qwen3.5"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@cases("setting", USUAL_HYBRID, exhaustive=[name for name in HYBRID_SETTINGS if name not in USUAL_HYBRID])
def test_greedy_output_of_a_model_with_states_is_that_of_transformers(setting: str, folder: Path) -> None:
    core = run_greedy("qwen3.5", folder, **HYBRID_SETTINGS[setting])
    stats = core.stats()
    assert stats.states is not None and stats.states.slots_used == 0
    assert ("preemption" in setting) == (stats.preemptions > 0)
    assert ("host memory" in setting) == (stats.offload is not None and stats.offload.stored > 0)
    assert stats.states.taken > 0 or "slot" in setting, "running requests leave no slot for a snapshot"
    core.close()


@cases("family", OTHER_HYBRIDS[:1], exhaustive=OTHER_HYBRIDS[1:])
def test_greedy_output_of_other_models_with_states_is_that_of_transformers(family: str, folder: Path) -> None:
    run_greedy(family, folder, **HYBRID_SETTINGS["preemption, overlap, chunks of 7"]).close()


@cache
def checkpoint(family: str, folder: Path) -> Path:
    return save_reference(make_reference(family), folder / f"{family} by itself")


def sampled(path: Path, rounds: int = 2, **options: object) -> tuple[list[dict[str, Collected]], int]:
    """Return three samples of each prompt, drawn in several rounds, and the number of preemptions."""
    core, found = start(path, device="cpu", **options), []
    for number in range(rounds):
        for name, ids in PROMPTS.items():
            params = SequenceParams(max_tokens=SAMPLE_LEN, temperature=0.9, seed=7, ignore_eos=True, logprobs=1)
            core.add(Add(f"{name} {number}", Prompt(ids, params), 3))
        found.append(run_dry(core))
    preemptions = core.stats().preemptions
    core.close()
    return found, preemptions


@cases(("family", "kv_cache_dtype"), WINDOWED[:1], exhaustive=WINDOWED[1:])
@cases("overlap", [True], exhaustive=[False])
def test_samples_are_the_same_with_and_without_window_groups(
    family: str, kv_cache_dtype: str, overlap: bool, folder: Path
) -> None:
    """Samples share the blocks of their prompt, and copy the last one."""
    path = checkpoint(family, folder)
    (expected, _), _ = sampled(path, kv_cache_dtype=kv_cache_dtype, **LARGE)
    found, preemptions = sampled(path, kv_cache_dtype=kv_cache_dtype, overlap=overlap, **SMALL)
    assert preemptions > 0
    for number, got in enumerate(found):
        for name, want in expected.items():
            twin = got[name.replace(" 0:", f" {number}:")]
            assert twin.tokens == want.tokens and len(want.tokens) == SAMPLE_LEN


def test_samples_of_a_model_with_states_do_not_depend_on_slots(folder: Path) -> None:
    path = checkpoint("qwen3.5", folder)
    (expected, _), _ = sampled(path, num_kv_blocks=512)
    found, preemptions = sampled(path, num_kv_blocks=24, max_num_batched_tokens=7, state_slots=12, overlap=True)
    assert preemptions > 0
    for number, got in enumerate(found):
        for name, want in expected.items():
            assert got[name.replace(" 0:", f" {number}:")].tokens == want.tokens


def test_pools_of_an_engine(folder: Path) -> None:
    core, info = build(checkpoint("gemma3", folder))
    assert len(info.facts.windows) == 1 and info.facts.states is None
    core.close()
    core, info = build(checkpoint("qwen3.5", folder), state_slots=9)
    assert info.facts.windows == () and info.facts.states is not None and info.facts.states.num_slots == 9
    core.close()
