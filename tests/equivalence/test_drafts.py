"""Whole engines with drafts, right and wrong: texts and log probabilities are those of an engine without any.

On a CPU, and on a GPU if there is one: with and without graphs, with one and two steps in flight. The sampling of each
prompt differs, so that every edit of logits meets drafts.
"""

from pathlib import Path
from typing import Any

import pytest

from roseinfer.core.plan import StepLimits, TokenLogprobs
from roseinfer.core.request import Prompt
from roseinfer.core.sampling import SequenceParams
from roseinfer.engine.core import EngineCore
from roseinfer.engine.messages import Add
from tests.equivalence.models import OTHER_SHAPES, SHAPES, SMALL_SHAPES, VOCAB, save_model
from tests.equivalence.near_ties import compare
from tests.equivalence.runs import CUDA, LENGTHS, PROMPTS, SETTINGS, Run, start
from tests.helpers.cases import cases
from tests.helpers.drafters import Oracle, every_draft_of

MAX_DRAFTS = 40
SAMPLING: dict[str, dict[str, Any]] = {
    "one": {"temperature": 0.0},
    "short": {"temperature": 0.8, "top_p": 0.9},
    "block": {"temperature": 1.0, "frequency_penalty": 1.0, "presence_penalty": 0.5},
    "head": {"temperature": 0.0, "repetition_penalty": 1.5},
    "branch": {"temperature": 1.2, "top_k": 20, "min_p": 0.02},
    "longer": {"temperature": 0.0, "bad_token_ids": ((3,), (5, 7)), "logit_bias": ((11, 2.0),)},
    "long": {"temperature": 0.7},
    "again": {"temperature": 0.0, "min_tokens": 12, "stop_token_ids": tuple(range(0, VOCAB, 40))},
}
FAMILIES = ("qwen3", pytest.param("mistral-window", marks=pytest.mark.exhaustive), "olmo3")
NAMES = [name for name in SETTINGS if CUDA or name not in ("graphs", "torch")]


def run(core: EngineCore) -> Run:
    for number, (name, prompt) in enumerate(PROMPTS.items()):
        params = {"ignore_eos": True, "logprobs": 4, **SAMPLING[name]}
        core.add(Add(name, Prompt(prompt, SequenceParams(max_tokens=LENGTHS[name], seed=number, **params))))
    found: dict[str, list[TokenLogprobs]] = {}
    while core.busy:
        for output in core.step():
            assert output.end is None or output.end.error is None, output
            found.setdefault(output.request_id, []).extend(output.logprobs or ())
    core.scheduler.check_integrity()
    return found


@pytest.fixture(scope="module", params=FAMILIES)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = (SHAPES | OTHER_SHAPES)[request.param] if CUDA else SMALL_SHAPES[request.param]
    if request.param == "qwen3":
        shape = {**shape, "attention_bias": False}
    return save_model(request.param, shape, tmp_path_factory.mktemp(request.param))


def start_with_drafts(path: Path, setting: str, monkeypatch: pytest.MonkeyPatch, **options: object) -> EngineCore:
    limits = StepLimits.of
    monkeypatch.setattr(StepLimits, "of", lambda config, length, _: limits(config, length, MAX_DRAFTS))
    return start(path, "cuda" if CUDA else "cpu", **{"dtype": "float32", **SETTINGS[setting], **options})


def both_runs(path: Path, setting: str, monkeypatch: pytest.MonkeyPatch, **options: object) -> tuple[Run, Run]:
    """Return the output without drafts and with drafts of which 7 in 10 are right."""
    core = start_with_drafts(path, setting, monkeypatch, **options)
    plain = run(core)
    core.scheduler.drafting = every_draft_of(
        Oracle({name: [entry.token_id for entry in entries] for name, entries in plain.items()}, VOCAB, 0.7)
    )
    drafted = run(core)
    counts = core.scheduler.drafting.counts["test"]
    assert 0.1 < sum(counts.accepted) / sum(counts.drafted) < 0.9 and counts.steps > 20
    core.close()
    return plain, drafted


# The last setting contains the others.
@cases("setting", ["plain", "all at once"], exhaustive=[name for name in NAMES if name not in ("plain", "all at once")])
def test_drafts_change_nothing(path: Path, setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, drafted = both_runs(path, setting, monkeypatch)
    assert {name: [entry.token_id for entry in entries] for name, entries in plain.items()} == {
        name: [entry.token_id for entry in entries] for name, entries in drafted.items()
    }
    assert compare(plain, drafted, 1e-3).parted == 0


@cases("options", [{"kv_cache_dtype": "fp8"}], exhaustive=[{"dtype": "bfloat16"}])
def test_drafts_change_no_more_than_another_batch(
    path: Path, options: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, drafted = both_runs(path, "all at once", monkeypatch, **options)
    greedy = [f"{name}:0" for name in ("one", "head", "longer")]
    seen = compare({name: plain[name] for name in greedy}, {name: drafted[name] for name in greedy}, 0.12)
    assert seen.tokens > 20
