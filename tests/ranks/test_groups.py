"""Two processes that share a model with window groups, or with recurrent states, generate the same as one."""

from pathlib import Path

import pytest

from roseinfer.core.request import Prompt
from roseinfer.core.sampling import SequenceParams
from roseinfer.engine.messages import Add
from tests.equivalence.small_engines import PROMPTS, start
from tests.helpers.cases import cases
from tests.helpers.checkpoints import make_reference, save_reference
from tests.helpers.engines import run_dry

OPTIONS = {"device": "cpu", "num_kv_blocks": 22, "max_num_batched_tokens": 7, "state_slots": 12}


# States of two ranks are compared by default in `parallel/test_two_processes` and `test_adapters_of_two`.
@pytest.mark.usefixtures("executed")
@cases("family", ["gemma3"], exhaustive=["qwen3.5"])
def test_tokens_equal_those_of_one_process(family: str, tmp_path: Path) -> None:
    path, found = save_reference(make_reference(family), tmp_path), []
    params = SequenceParams(max_tokens=10, temperature=0.0, ignore_eos=True)
    for ranks in (1, 2):
        core, done = start(path, tensor_parallel_size=ranks, **OPTIONS), {}
        for number in range(2):
            for name, ids in PROMPTS.items():
                core.add(Add(f"{name} {number}", Prompt(ids, params), 2))
            run_dry(core, done)
        stats = core.stats()
        core.close()
        assert stats.preemptions > 0 and stats.prefix_hits > 0
        found.append({name: answer.tokens for name, answer in done.items()})
    assert found[0] == found[1] and len(found[0]) == 4 * len(PROMPTS)
