"""Greedy output equals transformers' `generate`, for every family, with every feature of the engine.

In float32; on a GPU if there is one, with its kernels and graphs.
"""

from functools import cache
from pathlib import Path

import pytest
import torch

from roseinfer.core.request import Prompt
from roseinfer.core.sampling import SequenceParams
from roseinfer.engine.core import EngineCore
from roseinfer.engine.messages import Add
from tests.equivalence.small_engines import PROMPTS, start
from tests.helpers.cases import cases
from tests.helpers.checkpoints import EXPERTS, SHAPES, VOCAB, make_reference, save_reference
from tests.helpers.engines import Collected, run_dry
from tests.helpers.mxfp4_files import make_packable, pack_folder, round_experts

OUTPUT_LEN = 12
# gpt-oss with experts in MXFP4.
PACKED = "gpt-oss-mxfp4"
# Families that differ in what a schedule meets: positions, blocks of K/V, windows, and several groups of these.
FAMILIES = ["gpt2", "qwen3", "mistral-window", "gpt-oss"]
# Families whose other layers see tokens only, so that `make test` runs them with everything at once.
SIMILAR = [
    "llama",
    "llama3",
    "qwen2",
    "mistral",
    "qwen2-window",
    "qwen3-moe-dense",
    "mixtral",
    "gemma3",
    PACKED,
]
# So few tokens that outputs often reach a banned one.
FEW = (3, 8, 40, 77)
BANNED = ((3, 3), (8, 8), (40, 40), (77, 77), (3, 8, 3), (8, 3, 8), (3, 40, 77), (77, 3))
# Engine options by name. Caches hold little more than the longest request, so that requests are preempted.
SETTINGS = {
    "plain": {"num_kv_blocks": 128},
    "no prefix cache, whole prompts": {"enable_prefix_caching": False, "enable_chunked_prefill": False},
    "chunks of 5": {"max_num_batched_tokens": 5, "num_kv_blocks": 64},
    "preemption": {"num_kv_blocks": 16, "max_num_batched_tokens": 24},
    "preemption, overlap, chunks of 7": {"num_kv_blocks": 15, "max_num_batched_tokens": 7, "overlap": True},
    "preemption, overlap, one token of a prompt a step": {
        "num_kv_blocks": 15,
        "long_prefill_token_threshold": 1,
        "overlap": True,
    },
    "overlap, few seats": {"num_kv_blocks": 64, "max_num_seqs": 2, "overlap": True},
    "large blocks": {"num_kv_blocks": 8, "block_size": 64},
}
# Everything at once, for families that differ in their layers only.
COMBINED = {"num_kv_blocks": 24, "max_num_batched_tokens": 5, "overlap": True}
# Most settings at once with each of the families, and what these exclude with one.
PRODUCT = [(family, setting) for setting in SETTINGS for family in (*FAMILIES, *SIMILAR)]
USUAL = [(family, "preemption, overlap, chunks of 7") for family in FAMILIES]
USUAL += [("qwen3", "no prefix cache, whole prompts"), ("gpt2", "overlap, few seats"), ("gpt-oss", "large blocks")]
# transformers changes the factors of LongRoPE while a text grows; here a model has those of its longest context.
UNLIKE_GENERATE = ("phi3-long",)
OTHERS = [name for name in (*SHAPES, PACKED) if name not in (*FAMILIES, *UNLIKE_GENERATE)]
# `test_parity` compares the layers of each family with transformers'. Here are those with other groups or experts.
COMBINED_FAMILIES = ["gemma3", "cohere2", PACKED]


@cache
def checkpoint(family: str, folder: Path) -> tuple[Path, dict[str, list[int]]]:
    """Yield the saved model, and transformers' output for each prompt."""
    model = round_experts(make_packable()) if family == PACKED else make_reference(family)
    expected = {}
    for name, ids in PROMPTS.items():
        inputs = torch.tensor([ids])
        output = model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            do_sample=False,
            max_new_tokens=OUTPUT_LEN,
            min_new_tokens=OUTPUT_LEN,
            pad_token_id=0,
            eos_token_id=None,
        )
        expected[name] = output[0, len(ids) :].tolist()
    path = save_reference(model, folder / family)
    return pack_folder(path) if family == PACKED else path, expected


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@cases(("family", "setting"), USUAL, exhaustive=[case for case in PRODUCT if case not in USUAL])
def test_greedy_output_is_that_of_transformers(family: str, setting: str, folder: Path) -> None:
    core = run_greedy(family, folder, **SETTINGS[setting])
    if "preemption" in setting:
        assert core.stats().preemptions > 0
    if "no prefix cache" not in setting and "preemption" not in setting:
        assert core.stats().prefix_hits > 0
    core.close()


@cases("family", COMBINED_FAMILIES, exhaustive=[name for name in OTHERS if name not in COMBINED_FAMILIES])
def test_greedy_output_of_other_shapes_is_that_of_transformers(family: str, folder: Path) -> None:
    core = run_greedy(family, folder, **COMBINED)
    assert core.stats().preemptions > 0 and core.stats().prefix_hits > 0
    core.close()


def run_greedy(family: str, folder: Path, **options: object) -> EngineCore:
    """Run all prompts twice among others, and assert that their outputs are those of transformers."""
    path, expected = checkpoint(family, folder)
    device = {"device": "cpu"} if family in (*EXPERTS, PACKED) else {}
    core = start(path, **options, **device)
    sampling = SequenceParams(max_tokens=OUTPUT_LEN, temperature=0.0, ignore_eos=True)
    done: dict[str, Collected] = {}
    for repeat in range(2):  # the second round finds a warm prefix cache
        for name, ids in PROMPTS.items():
            core.add(Add(f"{name} {repeat}", Prompt(ids, sampling)))
            core.add(Add(f"noise {name} {repeat}", Prompt(ids[::-1], SequenceParams(max_tokens=7, seed=repeat))))
        run_dry(core, done)
    for repeat in range(2):
        got = {name: done[f"{name} {repeat}:0"].tokens for name in PROMPTS}
        assert got == expected
    return core


@cases("overlap", [True], exhaustive=[False])
def test_penalties_seeds_and_logprobs_do_not_depend_on_the_schedule(folder: Path, overlap: bool) -> None:
    path, _ = checkpoint("qwen3", folder)
    settings = [
        SequenceParams(max_tokens=20, seed=i, logprobs=2, ignore_eos=True, **more)
        for i, more in enumerate(
            [
                {"temperature": 1.2},
                {"temperature": 0.9, "top_k": 20, "frequency_penalty": 0.7},
                {"temperature": 1.0, "top_p": 0.8, "repetition_penalty": 1.3},
                {"temperature": 1.5, "min_p": 0.02, "presence_penalty": 0.5, "prompt_logprobs": 1},
                {"temperature": 0.0, "repetition_penalty": 1.2, "logit_bias": ((5, 3.0),)},
                {"temperature": 1.3, "allowed_token_ids": tuple(range(0, VOCAB, 3))},
                {"temperature": 1.0, "allowed_token_ids": FEW, "bad_token_ids": BANNED},
                {"temperature": 0.0, "allowed_token_ids": FEW, "bad_token_ids": BANNED, "presence_penalty": 1.0},
            ]
        )
    ]

    def run(**options: object) -> tuple[dict[str, Collected], EngineCore]:
        core = start(path, **options)
        for i, params in enumerate(settings):
            core.add(Add(str(i), Prompt(PROMPTS["long"][i:], params), 3 if params.bad_token_ids else 1))
        done = run_dry(core)
        core.close()
        return done, core

    expected, _ = run(num_kv_blocks=512)
    got, core = run(num_kv_blocks=22, max_num_batched_tokens=7, overlap=overlap)
    assert core.stats().preemptions > 0
    for name, want in expected.items():
        assert got[name].tokens == want.tokens
        assert got[name].logprobs == want.logprobs
        assert got[name].prompt_logprobs == want.prompt_logprobs
    for name in (f"{i}:{sample}" for i in (6, 7) for sample in range(3)):
        tokens = got[name].tokens
        assert set(tokens) <= set(FEW)
        assert not set(BANNED) & {tuple(tokens[i : i + n]) for n in (2, 3) for i in range(len(tokens))}
