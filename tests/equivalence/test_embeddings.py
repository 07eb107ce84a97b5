"""Embeddings equal those of transformers' hidden states, pooled by the formulas of sentence-transformers.

In float32; on a GPU if there is one, with its kernels and graphs.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from roseinfer.core.outputs import FinishReason
from roseinfer.core.pooling import PoolingParams, floats
from roseinfer.core.request import RequestMeta
from roseinfer.engine.core import EngineCore
from roseinfer.engine.messages import Add
from roseinfer.engine.pooling import pooling_prompt
from tests.equivalence.small_engines import PROMPTS, start
from tests.helpers.cases import each_value
from tests.helpers.checkpoints import VOCAB, make_reference, save_reference
from tests.helpers.engines import Collected, gather, run_dry
from tests.helpers.sentence_folders import add_modules

TEXTS = {
    **PROMPTS,
    **{f"many {i}": [(i * 31 + j * 7) % VOCAB for j in range(1 + i % 9)] for i in range(20)},
}
SETTINGS = {
    "plain": {"num_kv_blocks": 128},
    "no prefix cache, whole prompts": {"enable_prefix_caching": False, "enable_chunked_prefill": False},
    "chunks of 5": {"max_num_batched_tokens": 5, "num_kv_blocks": 64},
    "preemption": {"num_kv_blocks": 12, "long_prefill_token_threshold": 3},
    "preemption, overlap, chunks of 7": {
        "num_kv_blocks": 12,
        "max_num_batched_tokens": 7,
        "long_prefill_token_threshold": 3,
        "overlap": True,
    },
    "overlap, few seats": {"num_kv_blocks": 64, "max_num_seqs": 2, "overlap": True},
}
METHODS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "lasttoken": lambda states: states[-1],
    "mean": lambda states: states.mean(0),
    "cls": lambda states: states[0],
}


def embed(core: EngineCore, prompts: dict[str, list[int]], **fields: object) -> dict[str, torch.Tensor]:
    for name, prompt in prompts.items():
        core.add(Add(name, pooling_prompt(prompt, RequestMeta(), PoolingParams(**fields))))
    done = run_dry(core)
    assert all(found.reason is FinishReason.STOP for found in done.values())
    return {name: torch.tensor(floats(done[f"{name}:0"].end.vector)) for name in prompts}


def assert_same(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.shape == want.shape
    assert F.cosine_similarity(got.double(), want.double(), dim=0) >= 1 - 1e-6
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """A checkpoint without its head, as embedders are stored, and the hidden states [T, hidden] of each prompt."""
    model = make_reference("qwen3").model
    with torch.inference_mode():
        found = {name: model(torch.tensor([ids])).last_hidden_state[0] for name, ids in TEXTS.items()}
    return save_reference(model, tmp_path_factory.mktemp("qwen3")), found


@each_value(setting=SETTINGS.keys(), method=METHODS.keys())
def test_embeddings_are_those_of_transformers(method: str, setting: str, states) -> None:
    folder, hidden = states
    core = start(add_modules(folder, {"pooling_mode": method}), **SETTINGS[setting])
    for _ in range(2):  # the second time, prefixes are cached
        for name, got in embed(core, TEXTS).items():
            assert_same(got, F.normalize(METHODS[method](hidden[name]), dim=0))
    if "preemption" in setting:
        assert core.stats().preemptions > 0
    core.close()


def test_dense_layers_and_dimensions_follow_the_pooling(states, tmp_path: Path) -> None:
    folder, hidden = states
    first, bias = torch.randn(24, 32), torch.randn(24)
    second = torch.randn(16, 24)
    flags = {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False, "word_embedding_dimension": 32}
    path = Path(tmp_path / "matryoshka-qwen3-embedding")
    path.symlink_to(folder)
    dense = ((first, bias, "torch.nn.modules.activation.Tanh"), (second, None, "torch.nn.modules.linear.Identity"))
    core = start(add_modules(path, flags, dense=dense), dtype="float32")
    whole = {name: second @ torch.tanh(first @ state.mean(0) + bias) for name, state in hidden.items()}
    for name, got in embed(core, TEXTS).items():
        assert_same(got, F.normalize(whole[name], dim=0))
    core.close()


def test_an_aborted_request_leaves_nothing_and_others_are_right(states) -> None:
    folder, hidden = states
    core = start(add_modules(folder, {"pooling_mode": "mean"}), max_num_batched_tokens=8, overlap=True)
    core.add(Add("gone", pooling_prompt([5] * 60)))
    core.add(Add("kept", pooling_prompt(TEXTS["long"])))
    done: dict[str, Collected] = {}
    for _ in range(3):
        gather(core.step(), done)
    core.abort(["gone:0"])
    run_dry(core, done)
    assert done["gone:0"].reason is FinishReason.ABORT
    assert_same(torch.tensor(floats(done["kept:0"].end.vector)), F.normalize(hidden["long"].mean(0), dim=0))
    core.close()
