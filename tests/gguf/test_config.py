"""config.json built from a GGUF file's metadata, and keys that are refused by name."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from roseinfer.core.errors import UnsupportedModelError
from roseinfer.gguf.files import open_gguf
from roseinfer.gguf.tokens import TokenKind, read_vocabulary
from roseinfer.models.config import read_model_spec
from roseinfer.models.generation import read_generation_config
from tests.helpers.checkpoints import make_reference
from tests.helpers.gguf_files import as_floats, metadata_of, tensors_of, write, write_model

EXPERTS = {"llama.expert_count": 8, "llama.expert_used_count": 2}
YARN = {
    "llama.rope.scaling.type": "yarn",
    "llama.rope.scaling.factor": 4.0,
    "llama.rope.scaling.original_context_length": 128,
}


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"general.type": "adapter"}, "general.type = 'adapter' is not supported"),
        ({"general.architecture": "mamba"}, "general.architecture = 'mamba' is not supported; known: llama, qwen2"),
        ({"llama.block_count": None}, r"llama\.block_count is missing"),
        ({"llama.block_count": "two"}, "one integer is needed"),
        ({"llama.block_count": [2, 2]}, "llama.block_count = a list is not supported"),
        ({"llama.attention.head_count_kv": [2, 0]}, "head_count_kv = a list is not supported"),
        ({"llama.attention.head_count_kv": 3}, "num_key_value_heads = 3 is not supported"),
        ({"llama.attention.layer_norm_rms_epsilon": None}, "layer_norm_rms_epsilon is missing"),
        ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, "a finite number is needed"),
        ({"llama.attention.value_length": 16}, "the width of heads is 8"),
        ({"llama.rope.dimension_count": 4}, "rope.dimension_count = 4 is not supported; the width of heads is 8"),
        ({"llama.rope.freq_base": -1.0}, "a number of 1 or more is needed"),
        ({"llama.rope.freq_base": 1e-45}, "a number of 1 or more is needed"),
        ({"llama.rope.scaling.type": "dynamic", "llama.rope.scaling.factor": 4.0}, "known: none, linear"),
        ({"llama.rope.scaling.type": "yarn"}, r"llama\.rope\.scaling\.original_context_length is missing"),
        ({**YARN, "llama.rope.scaling.yarn_ext_factor": 0.5}, "yarn_ext_factor = 0.5 is not supported; only 1"),
        ({**YARN, "llama.rope.scaling.yarn_attn_factor": 1.5}, "yarn_attn_factor = 1.5 .* only 1.13863 is supported"),
        ({**YARN, "llama.rope.scaling.yarn_log_multiplier": 0.1}, "yarn_log_multiplier = .* the key is unknown"),
        ({"llama.rope.scaling.type": "longrope"}, "tensors of LongRoPE are missing; rope_factors_short.weight and"),
        ({"llama.expert_count": 8}, r"llama\.expert_used_count is missing"),
        ({"llama.expert_used_count": 2}, "llama.expert_used_count = 2 is not supported; the key is unknown"),
        ({**EXPERTS, "llama.expert_weights_norm": False}, "expert_weights_norm = False is not supported"),
        ({**EXPERTS, "llama.expert_gating_func": 2}, r"expert_gating_func = 2 is not supported; only 1 \(softmax"),
        ({**EXPERTS, "llama.expert_weights_scale": 2.5}, "expert_weights_scale = 2.5 is not supported"),
        ({**EXPERTS, "llama.expert_shared_count": 1}, "expert_shared_count = 1 is not supported"),
        ({"llama.attention.sliding_window": 1024}, "sliding_window = 1024 is not supported"),
        ({"llama.logit_scale": 8.0}, "llama.logit_scale"),
        ({"llama.attention.causal": False}, "attention.causal = False"),
        ({"llama.context_length": 2**31}, "max_position_embeddings = 2147483648"),
        ({"llama.block_count": 2**20}, "describes .* weights|layers are not supported"),
        ({"llama.embedding_length": 2**20, "llama.feed_forward_length": 2**20}, "describes .* weights"),
        ({"tokenizer.ggml.model": None}, r"tokenizer\.ggml\.model is missing"),
        ({"tokenizer.ggml.tokens": None}, r"tokenizer\.ggml\.tokens is missing"),
        ({"tokenizer.ggml.tokens": ["a"] * 99}, "contains a token twice"),
        ({"tokenizer.ggml.token_type": [1]}, "token_type has 1 values for 99 tokens"),
        ({"tokenizer.ggml.token_type": [float("nan")] * 99}, "token_type contains a value that is not an integer"),
        ({"tokenizer.ggml.scores": [float("nan")] * 99}, "scores holds NaN or infinity"),
        ({"llama.rope.freq_base": float("inf")}, "a finite number is needed"),
        ({"tokenizer.ggml.eos_token_id": 99}, "eos_token_id = 99 is not supported; the file has 99 tokens"),
        ({"tokenizer.ggml.tokens": [str(i) for i in range(200)], "tokenizer.ggml.token_type": None}, "99 rows"),
    ],
)
def test_refused_by_name(tmp_path: Path, changes: dict[str, Any], match: str) -> None:
    path = write_model(tmp_path / "m.gguf", make_reference("llama"), **changes)
    with pytest.raises(UnsupportedModelError, match=match):
        read_model_spec(path)


LOG_MULTIPLIER = "rope.scaling.yarn_log_multiplier"
PATTERN = "attention.sliding_window_pattern"


@pytest.mark.parametrize(
    ("family", "changes", "match"),
    [
        ("phi3", {"phi3.attention.sliding_window": None}, r"phi3\.attention\.sliding_window is missing"),
        ("phi3", {"phi3.rope.dimension_count": 3}, "partial_rotary_factor = 0.375"),
        ("granite", {"granite.rope.scaling.finetuned": False}, "rope.scaling.finetuned = False is not supported"),
        ("granite", {"granite.expert_count": 4}, "granite.expert_count = 4 is not supported"),
        ("granite", {"granite.logit_scale": None}, r"granite\.logit_scale is missing"),
        ("olmo3", {f"olmo2.{PATTERN}": [True, False]}, "layer_types = .* a list of 4 of"),
        ("olmo3", {f"olmo2.{PATTERN}": [0.5] * 4}, "sliding_window_pattern = a list is not supported"),
        ("olmo3", {f"olmo2.{PATTERN}": 0}, "sliding_window_pattern = 0 is not supported"),
        ("olmo3", {f"olmo2.{PATTERN}": "LLLG"}, "a list of numbers is needed"),
        ("exaone4", {"exaone4.attention.sliding_window": 0}, "sliding_window_pattern = a list is not supported"),
        ("glm4", {"glm4.rope.dimension_sections": [1, 1, 1, 0]}, "rope.dimension_sections = a list is not supported"),
        ("glm4", {"glm4.nextn_predict_layers": 1}, "nextn_predict_layers = 1 is not supported"),
        ("cohere2", {"cohere2.attention.sliding_window": None}, r"cohere2\.attention\.sliding_window is missing"),
        ("cohere2", {"cohere2.rope.dimension_count": 4}, "rope.dimension_count = 4 is not supported"),
        ("ministral3", {f"mistral3.{LOG_MULTIPLIER}": 0.5}, "yarn_log_multiplier = 0.5 is not supported; only 1"),
        ("ministral3", {f"mistral3.{LOG_MULTIPLIER}": None}, r"yarn_log_multiplier is missing"),
        ("ministral3", {"mistral3.attention.temperature_scale": None}, "temperature_scale is None"),
        ("gemma3", {f"gemma3.{PATTERN}": [0.5] * 4}, "sliding_window_pattern = a list is not supported"),
        ("gemma3", {"gemma3.attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0 is not supported"),
        ("ministral3", {"mistral3.rope.scaling.type": "none"}, r"temperature_scale is 0\.1"),
    ],
)
def test_refused_by_name_in_other_architectures(
    tmp_path: Path, family: str, changes: dict[str, Any], match: str
) -> None:
    path = write_model(tmp_path / "m.gguf", make_reference(family), **changes)
    with pytest.raises(UnsupportedModelError, match=match):
        read_model_spec(path)


def test_intervals_stand_for_the_layers_without_a_window(tmp_path: Path) -> None:
    reference = make_reference("olmo3")
    expected = read_model_spec(write_model(tmp_path / "a.gguf", reference))
    assert expected.windows == (13, 13, 13, None)
    for interval in (4, None):  # 4 is the default
        path = write_model(tmp_path / "b.gguf", reference, **{f"olmo2.{PATTERN}": interval})
        assert read_model_spec(path) == expected
    path = write_model(tmp_path / "b.gguf", reference, **{f"olmo2.{PATTERN}": 3})
    assert read_model_spec(path).windows == (13, 13, None, 13)


def test_divisors_that_contradict_each_other(tmp_path: Path) -> None:
    reference = make_reference("phi3-long")
    metadata, tensors = metadata_of(reference, 99), tensors_of(reference, as_floats)
    factors = tensors.pop("rope_factors_short.weight")
    for changed, match in (
        (tensors, r"tensors of LongRoPE are rope_factors_long\.weight; rope_factors_short"),
        ({**tensors, "rope_factors_short.weight": factors, "rope_freqs.weight": factors}, "and no other divisors"),
        ({**tensors, "rope_factors_short.weight": (factors[0][:3], "F32")}, r"rope_factors_short\.weight is \[3\]"),
        ({**tensors, "rope_factors_short.weight": (-factors[0], "F32")}, "rope_factors_short.weight is damaged"),
    ):
        path = write(tmp_path / "m.gguf", metadata, changed)
        with pytest.raises(UnsupportedModelError, match=match):
            read_model_spec(path)


def test_keys_that_change_nothing(tmp_path: Path) -> None:
    reference = make_reference("llama")
    plain = read_model_spec(write_model(tmp_path / "a.gguf", reference))
    harmless = {
        "general.file_type": 3,
        "general.name": "A name",
        "llama.vocab_size": 99,
        "llama.rope.dimension_count": 8,
        "llama.rope.scaling.type": "none",
        "llama.rope.scaling.finetuned": True,
        "llama.expert_count": 0,
        "llama.attention.causal": True,
        "tokenizer.ggml.padding_token_id": 3,
    }
    assert read_model_spec(write_model(tmp_path / "b.gguf", reference, **harmless)) == plain


@pytest.mark.parametrize(
    ("encodings", "dtype"),
    [(["F32"], "float32"), (["F16", "F32"], "float16"), (["BF16", "F32"], "bfloat16"), (["F16", "BF16"], "bfloat16")],
)
def test_the_dtype_is_that_of_the_matrices(tmp_path: Path, encodings: list[str], dtype: str) -> None:
    reference = make_reference("llama")
    tensors = tensors_of(reference, as_floats)
    for encoding, name in zip(encodings, ("token_embd.weight", "output.weight"), strict=False):
        values = tensors[name][0]
        raw = {"F32": values, "F16": values.astype(np.float16), "BF16": values.astype(np.float16).view(np.uint8)}
        tensors[name] = (raw[encoding], encoding)
    matrices = {name for name, (data, _) in tensors.items() if data.ndim > 1} if "F32" not in encodings else set()
    for name in matrices - {"token_embd.weight", "output.weight"}:
        tensors[name] = (tensors[name][0].astype(np.float16), "F16")
    path = write(tmp_path / "m.gguf", metadata_of(reference, 99), tensors)
    assert read_model_spec(path).dtype == dtype


def test_tokens_that_end_an_answer(tmp_path: Path) -> None:
    """Check the tokens that the file names and the known control tokens; tokens of ordinary text do not count."""
    ends = ["<|im_end|>", "<|endoftext|>", "<|eot_id|>", "</s>", "<|end|>", "<end_of_turn>"]
    tokens = [*(str(i) for i in range(90)), *ends]
    changes = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * 90 + [3, 3, 1, 3, 3, 3],
        "tokenizer.ggml.eos_token_id": 93,
        "tokenizer.ggml.eot_token_id": 90,
    }
    path = write_model(tmp_path / "m.gguf", make_reference("llama"), **changes)
    assert read_generation_config(path).eos_token_ids == (93, 90, 91, 94, 95)


def test_tokens_that_end_an_answer_of_gpt_oss(tmp_path: Path) -> None:
    """Check that <|end|> is none of them: it ends each message of an answer."""
    ends = ["<|return|>", "<|call|>", "<|endoftext|>", "<|end|>"]
    changes = {
        "tokenizer.ggml.tokens": [*(str(i) for i in range(95)), *ends],
        "tokenizer.ggml.token_type": [1] * 95 + [3] * 4,
        "tokenizer.ggml.eos_token_id": 95,
        "tokenizer.ggml.eot_token_id": 98,
    }
    path = write_model(tmp_path / "m.gguf", make_reference("llama"), **changes)
    assert read_generation_config(path).eos_token_ids == (95, 96, 97)


@pytest.mark.parametrize("kind", [1, 4])
def test_turns_of_gemma_are_control_tokens_in_every_file(tmp_path: Path, kind: int) -> None:
    """Check files that list them as text, or as tokens of the user."""
    changes = {
        "tokenizer.ggml.tokens": [*(str(i) for i in range(97)), "<start_of_turn>", "<end_of_turn>"],
        "tokenizer.ggml.token_type": [1] * 97 + [kind] * 2,
        "tokenizer.ggml.eos_token_id": 96,
    }
    path = write_model(tmp_path / "m.gguf", make_reference("llama"), **changes)
    assert read_generation_config(path).eos_token_ids == (96, 98)
    assert read_vocabulary(open_gguf(path)).kinds[97:] == [TokenKind.CONTROL] * 2


def test_sampling_that_no_request_could_use(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", make_reference("llama"), **{"general.sampling.temp": -1.0})
    with pytest.raises(UnsupportedModelError, match=r"m\.gguf: .*temperature"):
        read_generation_config(path)
