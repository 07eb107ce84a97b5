"""Checkpoints in bfloat16 with the proportions of real models: activations and logits of about unit size."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import torch

from tests.helpers.checkpoints import make_reference, save_reference
from tests.helpers.mxfp4_files import pack_folder, round_experts

VOCAB = 1000
PACKED = "-mxfp4"  # at the end of a family's name
_COMMON = {"vocab_size": VOCAB, "max_position_embeddings": 512}
# A layer of GPT-2; heads of 64 in groups of 4, as in small Llamas; a layer of Qwen3-0.6B; heads in groups as Mistral's,
# with a window that most prompts exceed.
SHAPES = {
    "gpt2": {"vocab_size": VOCAB, "n_positions": 512, "n_embd": 768, "n_head": 12, "n_layer": 6},
    "llama3": {
        **_COMMON,
        "hidden_size": 1024,
        "intermediate_size": 2048,
        "num_hidden_layers": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
    },
    "qwen3": {
        **_COMMON,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "attention_bias": False,
    },
    "mistral-window": {
        **_COMMON,
        "hidden_size": 1024,
        "intermediate_size": 2048,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "sliding_window": 41,
    },
    "qwen3-moe": {
        **_COMMON,
        "hidden_size": 1024,
        "moe_intermediate_size": 384,
        "num_experts": 4,  # all are chosen: else rounding decides now and then which are
        "num_experts_per_tok": 4,
        "num_hidden_layers": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "attention_bias": False,
    },
}
SHAPES["gpt-oss"] = {
    **_COMMON,
    "hidden_size": 1024,
    "intermediate_size": 384,
    "num_local_experts": 4,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "sliding_window": 41,
}
SHAPES["gpt-oss-mxfp4"] = SHAPES["gpt-oss"]  # with experts in MXFP4
# Families of other blocks and rotations, all in the size of a small Llama.
_SIZES = {
    **_COMMON,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
_OWN_HEADS = ("seed-oss", "glm4", "ernie", "hunyuan", "ministral", "ministral3")
_OTHERS = ("phi3", "phi4-mini", "smollm3", "granite", "granite4", "olmo2", "olmo3", "exaone4", "cohere2", "starcoder2")
OTHER_SHAPES = {
    **dict.fromkeys(_OTHERS, _SIZES),
    **{family: {**_SIZES, "head_dim": 64} for family in _OWN_HEADS},
    # Heads as wide as in Gemma 3's models up to 12B.
    "gemma3": {**_SIZES, "head_dim": 256, "query_pre_attn_scalar": 256},
}
# The same kinds of model for a CPU.
SMALL_SHAPES = {
    "gpt2": {"vocab_size": VOCAB, "n_positions": 512, "n_embd": 64, "n_head": 4, "n_layer": 2},
    "qwen3": {"vocab_size": VOCAB, "hidden_size": 64, "head_dim": 32, "intermediate_size": 96},
    "mistral-window": {"vocab_size": VOCAB, "hidden_size": 128, "intermediate_size": 192, "sliding_window": 41},
    "olmo3": {"vocab_size": VOCAB, "hidden_size": 128, "intermediate_size": 192, "sliding_window": 41},
    "gpt-oss-mxfp4": {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "head_dim": 32,
        "intermediate_size": 96,
        "num_local_experts": 4,
        "num_experts_per_tok": 4,
        "sliding_window": 41,
    },
}


@torch.no_grad()
def save_model(
    family: str, shape: Mapping[str, object], folder: Path, gains: Mapping[str, float] = MappingProxyType({})
) -> Path:
    """Save a model whose matrices keep the size of their input. gains: factors of matrices by a part of their names."""
    model = make_reference(family.removesuffix(PACKED), **shape)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            # GPT-2's layers hold [in, out]; tied or not, embeddings are [vocab, hidden].
            inputs = parameter.shape[0] if ".c_" in name else parameter.shape[1]
            parameter.mul_(inputs**-0.5 / parameter.std())
        for part, gain in gains.items():
            if part in name:
                parameter.mul_(gain)
    if not family.endswith(PACKED):
        return save_reference(model.bfloat16(), folder)
    return pack_folder(save_reference(round_experts(model.bfloat16()), folder))
