"""Drafts, right and wrong, change no token of a model with recurrent states."""

from pathlib import Path

import pytest

from roseinfer.core.errors import ConfigError
from roseinfer.core.request import Prompt
from roseinfer.core.runner import ContextReads
from roseinfer.core.sampling import SequenceParams
from roseinfer.engine.core import EngineCore
from roseinfer.engine.messages import Add
from tests.equivalence.small_engines import PROMPTS, build, start
from tests.helpers.checkpoints import HYBRIDS, VOCAB, make_reference, save_reference
from tests.helpers.drafters import Oracle, every_draft_of
from tests.helpers.engines import run_dry

SETTINGS = {
    "large": {"num_kv_blocks": 512},
    "preemption": {"num_kv_blocks": 20, "max_num_batched_tokens": 24, "state_slots": 14},
    "two slots, chunks of 7, overlap": {
        "num_kv_blocks": 64,
        "state_slots": 2,
        "max_num_batched_tokens": 7,
        "overlap": True,
    },
}
LENGTH = 16
FAMILIES = [*list(HYBRIDS)[:2], *(pytest.param(name, marks=pytest.mark.exhaustive) for name in list(HYBRIDS)[2:])]


@pytest.fixture(scope="module", params=FAMILIES)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_reference(make_reference(request.param), tmp_path_factory.mktemp("hybrid") / request.param)


def outputs(core: EngineCore, rounds: int = 2) -> dict[str, list[int]]:
    """Return greedy and sampled outputs of each prompt, in several rounds."""
    found: dict[str, list[int]] = {}
    for number in range(rounds):
        for name, ids in PROMPTS.items():
            params = SequenceParams(max_tokens=LENGTH, temperature=0.8 * number, seed=7, ignore_eos=True)
            core.add(Add(f"{name} {number}", Prompt(ids, params)))
        found.update({name: done.tokens for name, done in run_dry(core).items()})
    core.scheduler.check_integrity()
    return found


def test_drafts_change_nothing(path: Path) -> None:
    core = start(path, num_kv_blocks=512)
    plain = outputs(core)
    core.close()
    assert all(len(tokens) == LENGTH for tokens in plain.values())
    for setting in SETTINGS if path.name == "qwen3.5" else ["two slots, chunks of 7, overlap"]:
        core = start(path, speculation="suffix", **SETTINGS[setting])
        core.scheduler.drafting = every_draft_of(Oracle(plain, VOCAB, 0.7, 8))
        assert outputs(core) == plain, setting
        counts, stats = core.scheduler.drafting.counts["test"], core.stats()
        assert 0.1 < sum(counts.accepted) / sum(counts.drafted) < 0.9 and counts.steps > 20
        assert setting != "preemption" or stats.preemptions > 0
        core.close()


def test_a_proposer_is_used_and_its_room_counts(path: Path) -> None:
    plain, more = build(path, state_slots=9), build(path, state_slots=9, speculation="ngram,tokens=3")
    sizes = [info.facts.states.slot_bytes for _, info in (plain, more) if info.facts.states is not None]
    assert len(sizes) == 2 and sizes[0] < sizes[1] < 2 * sizes[0]
    facts = plain[1].facts
    token_bytes = facts.block_bytes / facts.block_size
    assert facts.reads == ContextReads(state_tokens=2 * sizes[0] / token_bytes)
    assert outputs(plain[0]) == outputs(more[0])
    assert [core.scheduler.drafting is None for core, _ in (plain, more)] == [True, False]
    for core, _ in (plain, more):
        core.close()


def test_eagle_heads_are_refused(path: Path) -> None:
    with pytest.raises(ConfigError, match=r"speculation 'eagle3:.* is not supported by Qwen3"):
        build(path, speculation=f"eagle3:{path}")
