"""Two processes that share a model with a draft head, which each of them holds whole."""

import json
from pathlib import Path

import roseinfer
from roseinfer import LLM, SamplingParams
from roseinfer.sched.drafting.drafting import Drafting
from roseinfer.sched.drafting.head import HeadProposer
from tests.helpers.drafters import EveryDraft
from tests.helpers.eagle_folders import EagleFolder

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
