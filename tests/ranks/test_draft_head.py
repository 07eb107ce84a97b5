"""Two processes that share a model with a draft head, which each of them holds whole."""

import json
from pathlib import Path

import pytest

import roseinfer
from roseinfer import LLM, SamplingParams
from roseinfer.sched.drafting.drafting import Drafting
from roseinfer.sched.drafting.head import MTP, HeadProposer
from tests.equivalence.small_engines import start
from tests.equivalence.test_eagle import texts_of
from tests.helpers.checkpoints import make_reference, save_reference
from tests.helpers.drafters import EveryDraft
from tests.helpers.eagle_folders import EagleFolder
from tests.helpers.mtp_reference import MtpReference

CONFIG = json.loads((Path(roseinfer.__file__).parent / "assets" / "tiny" / "config.json").read_text())
PROMPTS = ["def fibonacci(", "import os\n", "class Stack:\n"]


def test_drafts_of_two_ranks_change_nothing(tmp_path: Path) -> None:
    hidden, vocabulary, layers = CONFIG["hidden_size"], CONFIG["vocab_size"], CONFIG["num_hidden_layers"]
    head = EagleFolder(target_hidden=hidden, vocabulary=vocabulary, ids=(1, layers), nested=True).write(
        tmp_path / "head"
    )
    params = SamplingParams(max_tokens=24, temperature=0.7, seed=1, ignore_eos=True)
    options = {"num_kv_blocks": 64, "max_model_len": 128, "threads": 1, "device": "cpu"}
    with LLM("tiny", **options) as llm:
        expected = [answer.outputs[0].token_ids for answer in llm.generate(PROMPTS, params)]
    with LLM("tiny", speculation=f"eagle3:{head},tokens=3", tensor_parallel_size=2, **options) as llm:
        proposer = HeadProposer(3)
        llm.engine.core.scheduler.drafting = Drafting((proposer,), EveryDraft(), 3, proposer)
        found = [answer.outputs[0].token_ids for answer in llm.generate(PROMPTS, params)]
        drafting = llm.engine.core.scheduler.drafting
        assert drafting is not None and drafting.counts["eagle3"].steps > 20
    assert found == expected


@pytest.mark.exhaustive
def test_two_ranks_with_a_head_of_the_models_own(tmp_path: Path) -> None:
    """The ranks share the model's output matrix, its states and their drafts."""
    model = make_reference("qwen3.5")
    MtpReference(model).add_to(save_reference(model, tmp_path))
    core = start(tmp_path)
    expected = texts_of(core)
    core.close()
    core = start(tmp_path, speculation="mtp,tokens=3", device="cpu", tensor_parallel_size=2)
    proposer = HeadProposer(3, MTP)
    core.scheduler.drafting = drafting = Drafting((proposer,), EveryDraft(), 3, proposer)
    assert texts_of(core) == expected
    assert drafting.counts[MTP].steps > 20
    core.close()
