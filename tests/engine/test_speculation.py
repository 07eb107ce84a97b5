"""Engines of the embedded model with speculation: the option reaches the engine, and texts stay what they are."""

import json
from pathlib import Path
from typing import Any

import pytest

from roseinfer import LLM, SamplingParams
from roseinfer.core.errors import ConfigError
from roseinfer.sched.cost.file import cost_as_json
from roseinfer.sched.cost.params import CostParams
from tests.helpers.cases import cases
from tests.helpers.drafters import EveryDraft

PROMPT = "def add(a, b):\n    return a + b\n\n\ndef add"


@pytest.fixture(autouse=True)
def every_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verify all drafts: which ones pay depends on the machine."""
    monkeypatch.setattr(
        "roseinfer.sched.drafting.marginal.MarginalPricing.for_policy", lambda *args, **options: EveryDraft()
    )


def texts(speculation: str, params: SamplingParams, **options: Any) -> list[str]:
    with LLM("tiny", threads=1, num_kv_blocks=64, speculation=speculation, **options) as llm:
        answers = [llm.generate(PROMPT, params)[0] for _ in range(2)]
        drafting = llm.engine.core.scheduler.drafting
        assert (drafting is None) == (speculation == "off")
        samples = [sample for answer in answers for sample in answer.outputs]
        found = [tally for sample in samples for tally in sample.drafts.values()]
        counts = () if drafting is None else drafting.stats()
        assert sum(tally.drafted for tally in found) == sum(sum(each.drafted) for each in counts)
        accepted = sum(tally.accepted for tally in found)
        assert accepted == sum(sum(each.accepted) for each in counts) and bool(accepted) == (drafting is not None)
    return [sample.text for sample in samples]


@cases("speculation", ["auto"], exhaustive=["ngram"])
def test_texts_are_the_same_with_drafts(speculation: str) -> None:
    params = SamplingParams(max_tokens=40, temperature=0.7, seed=3, n=2, ignore_eos=True)
    assert texts(speculation, params) == texts("off", params)


def test_recorded_outputs_of_one_run_are_the_drafts_of_another(tmp_path: Path) -> None:
    file, params = tmp_path / "outputs.jsonl", SamplingParams(max_tokens=60, temperature=0.7, n=2, ignore_eos=True)
    outputs, steps = [], []
    for speculation in (f"record:{file}", f"recorded:{file},wrong=0.1"):
        with LLM("tiny", threads=1, num_kv_blocks=64, load_format="dummy", speculation=speculation) as llm:
            (answer,) = llm.generate(PROMPT, params)
            steps.append(llm.engine.core.stats().step)
        outputs.append([sample.token_ids for sample in answer.outputs])
    assert outputs[0] == outputs[1] and steps[1] < steps[0] / 2


def test_all_outputs_of_a_run_are_recorded(tmp_path: Path) -> None:
    file, params = tmp_path / "outputs.jsonl", SamplingParams(max_tokens=3, ignore_eos=True)
    with LLM("tiny", threads=1, num_kv_blocks=64, load_format="dummy", speculation=f"record:{file}") as llm:
        llm.generate([PROMPT] * 4, params)
        assert len(file.read_text().splitlines()) == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"record": "run.jsonl"}, "record cannot be combined with speculation=ngram"),
        ({"runner": "pooling"}, "speculation 'ngram' is not supported by an engine without generated tokens"),
    ],
)
def test_an_engine_that_cannot_do_it_does_not_start(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM("tiny", threads=1, num_kv_blocks=16, speculation="ngram", **options)


def test_a_priced_engine_verifies_too(tmp_path: Path) -> None:
    """A priced engine is certain of each token, so the second output is that of the first."""
    file = tmp_path / "cost.json"
    file.write_text(json.dumps(cost_as_json(CostParams(0.001, 1e-6, 0.0, 1e-6, 0.0))))
    params = SamplingParams(max_tokens=100, seed=1, ignore_eos=True)
    outputs = []
    for speculation in ("off", "auto"):
        with LLM(device="priced", cost=str(file), speculation=speculation) as llm:
            outputs += [llm.generate(PROMPT, params)[0].outputs[0] for _ in range(3)]
    assert len({output.text for output in outputs}) == 1
    assert sum(tally.accepted for tally in outputs[-1].drafts.values()) > 20
