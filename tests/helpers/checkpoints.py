"""Small random checkpoints, made and saved by transformers."""

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

VOCAB = 99
_LLAMA = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
_QWEN3_MOE = {
    **_LLAMA,
    "head_dim": 12,
    "attention_bias": True,
    "moe_intermediate_size": 20,
    "num_experts": 6,
    "num_experts_per_tok": 2,
}
_GPT2 = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512}

_DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_LONGROPE = {
    **_DEFAULT_ROPE,
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.0, 2.0, 3.5, 5.0],
}
# transformers chooses between the factors by the length of a prompt: here, all lengths but the shortest are long.
_PHI3_LONG = {"original_max_position_embeddings": 4, "rope_parameters": _LONGROPE, "pad_token_id": 0}
_YARN_ROPE = {**_DEFAULT_ROPE, "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
_GRANITE = {
    **_LLAMA,
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.4,
    "logits_scaling": 2.0,
}

_ALPHA_ROPE = {**_DEFAULT_ROPE, "rope_type": "dynamic", "alpha": 50.0, "factor": 1.0}
_MINISTRAL3 = {
    **_LLAMA,
    "head_dim": 12,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 16.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
}
_PIXTRAL = {
    "model_type": "pixtral",
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "head_dim": 8,
    "image_size": 28,
    "patch_size": 14,
}
_GEMMA3 = {
    **_LLAMA,
    "head_dim": 12,
    "num_hidden_layers": 4,
    "pad_token_id": 0,
    "query_pre_attn_scalar": 20,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        "sliding_attention": _DEFAULT_ROPE,
    },
    "sliding_window": 13,
    "sliding_window_pattern": 3,
}
_SIGLIP = {
    "model_type": "siglip_vision_model",
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
    "vision_use_head": False,
}
# Heads are wider than the hidden size, and prompts cross the window several times.
_GPT_OSS = {
    **_LLAMA,
    "head_dim": 12,
    "num_hidden_layers": 3,
    "intermediate_size": 36,
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "sliding_window": 13,
    "attn_implementation": "eager",
    "rope_parameters": {**_YARN_ROPE, "rope_theta": 150000.0, "beta_fast": 4.0, "truncate": False},
}

# Config class, model class and config values.
Kind = tuple[str, str, dict[str, Any]]
# Three value heads a key head; a quarter of 16 dimensions is rotated.
_QWEN3_5 = {
    **_LLAMA,
    "num_hidden_layers": 4,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "rope_parameters": {**_DEFAULT_ROPE, "partial_rotary_factor": 0.25, "mrope_section": [1, 1, 0]},
}
_QWEN3_5_MOE = {
    **_QWEN3_5,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 28,
    "num_experts": 6,
    "num_experts_per_tok": 3,
}
FAMILIES: dict[str, Kind] = {
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", _GPT2),
    "gpt2-erf": ("GPT2Config", "GPT2LMHeadModel", {**_GPT2, "activation_function": "gelu", "n_inner": 40}),
    "gpt2-untied": ("GPT2Config", "GPT2LMHeadModel", {**_GPT2, "tie_word_embeddings": False}),
    "llama": ("LlamaConfig", "LlamaForCausalLM", _LLAMA),
    "llama-mha": ("LlamaConfig", "LlamaForCausalLM", {**_LLAMA, "num_key_value_heads": 4}),
    "llama-tied": ("LlamaConfig", "LlamaForCausalLM", {**_LLAMA, "tie_word_embeddings": True}),
    "llama-bias": ("LlamaConfig", "LlamaForCausalLM", {**_LLAMA, "attention_bias": True, "mlp_bias": True}),
    "llama-linear": ("LlamaConfig", "LlamaForCausalLM", {**_LLAMA, "rope_parameters": _LINEAR_ROPE}),
    "llama3": ("LlamaConfig", "LlamaForCausalLM", {**_LLAMA, "rope_parameters": _LLAMA3_ROPE}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {**_LLAMA, "num_key_value_heads": 1}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {**_LLAMA, "head_dim": 12, "attention_bias": True}),
    "mistral": ("MistralConfig", "MistralForCausalLM", {**_LLAMA, "sliding_window": None}),
    "mistral-window": ("MistralConfig", "MistralForCausalLM", {**_LLAMA, "sliding_window": 13}),
    "qwen2-window": (
        "Qwen2Config",
        "Qwen2ForCausalLM",
        {**_LLAMA, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    ),
    "qwen3-moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", {**_QWEN3_MOE, "norm_topk_prob": True}),
    "qwen3-moe-dense": (
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        {
            **_QWEN3_MOE,
            "num_hidden_layers": 4,
            "mlp_only_layers": [3],
            "decoder_sparse_step": 2,
            "use_sliding_window": True,
            "sliding_window": 13,
        },
    ),
    "mixtral": (
        "MixtralConfig",
        "MixtralForCausalLM",
        {**_LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 13},
    ),
    "gpt-oss": ("GptOssConfig", "GptOssForCausalLM", _GPT_OSS),
}
# Families of other shapes. The slower tests leave them out: what they differ in does not depend on batches.
SHAPES: dict[str, Kind] = {
    "phi3": ("Phi3Config", "Phi3ForCausalLM", {**_LLAMA, "pad_token_id": 0, "sliding_window": 13}),
    "phi3-long": ("Phi3Config", "Phi3ForCausalLM", {**_LLAMA, **_PHI3_LONG}),
    "phi4-mini": (
        "Phi3Config",
        "Phi3ForCausalLM",
        {**_LLAMA, "pad_token_id": 0, "rope_parameters": {**_DEFAULT_ROPE, "partial_rotary_factor": 0.75}},
    ),
    "smollm3": (
        "SmolLM3Config",
        "SmolLM3ForCausalLM",
        {
            **_LLAMA,
            "num_hidden_layers": 3,
            "no_rope_layer_interval": 2,
            "attention_bias": True,
            "mlp_bias": True,
            "pad_token_id": 0,
        },
    ),
    "granite": ("GraniteConfig", "GraniteForCausalLM", {**_GRANITE, "attention_bias": True, "mlp_bias": True}),
    "granite4": (
        "GraniteMoeHybridConfig",
        "GraniteMoeHybridForCausalLM",
        {
            **_GRANITE,
            "num_local_experts": 0,
            "shared_intermediate_size": 40,
            "layer_types": ["full_attention"] * 2,
            "position_embedding_type": "rope",
            "mamba_n_heads": 4,  # must divide the hidden size
        },
    ),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM", {**_LLAMA, "pad_token_id": 0}),
    "olmo3": (
        "Olmo3Config",
        "Olmo3ForCausalLM",
        {
            **_LLAMA,
            "pad_token_id": 0,
            "num_hidden_layers": 4,
            "sliding_window": 13,
            "rope_parameters": {"full_attention": _YARN_ROPE, "sliding_attention": _DEFAULT_ROPE},
        },
    ),
    "seed-oss": (
        "SeedOssConfig",
        "SeedOssForCausalLM",
        {**_LLAMA, "head_dim": 12, "attention_out_bias": True, "mlp_bias": True, "pad_token_id": 0},
    ),
    "exaone4": (
        "Exaone4Config",
        "Exaone4ForCausalLM",
        {**_LLAMA, "num_hidden_layers": 3, "sliding_window": 13, "sliding_window_pattern": 3},
    ),
    "exaone4-full": (
        "Exaone4Config",
        "Exaone4ForCausalLM",
        {**_LLAMA, "sliding_window": None, "layer_types": ["full_attention"] * 2},
    ),
    "glm4": ("Glm4Config", "Glm4ForCausalLM", {**_LLAMA, "head_dim": 12, "pad_token_id": 0}),
    "ernie": ("Ernie4_5Config", "Ernie4_5ForCausalLM", {**_LLAMA, "head_dim": 12, "use_bias": True}),
    "hunyuan": (
        "HunYuanDenseV1Config",
        "HunYuanDenseV1ForCausalLM",
        {**_LLAMA, "head_dim": 12, "attention_bias": True, "rope_parameters": _ALPHA_ROPE},
    ),
    "cohere2": (
        "Cohere2Config",
        "Cohere2ForCausalLM",
        {**_LLAMA, "num_hidden_layers": 4, "sliding_window": 13, "logit_scale": 0.5, "attention_bias": True},
    ),
    "starcoder2": ("Starcoder2Config", "Starcoder2ForCausalLM", {**_LLAMA, "sliding_window": 13}),
    "ministral": (
        "MinistralConfig",
        "MinistralForCausalLM",
        {
            **_LLAMA,
            "head_dim": 12,
            "sliding_window": 13,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "ministral3": ("Ministral3Config", "Ministral3ForCausalLM", _MINISTRAL3),
    "mistral3": (
        "Mistral3Config",
        "Mistral3ForConditionalGeneration",
        {"text_config": {**_MINISTRAL3, "model_type": "ministral3"}, "vision_config": _PIXTRAL},
    ),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", {**_GEMMA3, "final_logit_softcapping": 5.0}),
    "gemma3-vision": (
        "Gemma3Config",
        "Gemma3ForConditionalGeneration",
        {
            "text_config": {**_GEMMA3, "attention_bias": True},
            "vision_config": _SIGLIP,
            "mm_tokens_per_image": 1,
        },
    ),
}


# Families whose layers keep states.
HYBRIDS: dict[str, Kind] = {
    "qwen3.5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", _QWEN3_5),
    "qwen3.5-moe": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", _QWEN3_5_MOE),
    "qwen3-next": (
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        {**_QWEN3_5_MOE, "norm_topk_prob": False, "mlp_only_layers": [2], "linear_num_value_heads": 4},
    ),
    "qwen3.5-vision": (
        "Qwen3_5Config",
        "Qwen3_5ForConditionalGeneration",
        {
            "text_config": {**_QWEN3_5, "attention_bias": True},
            "vision_config": {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2},
        },
    ),
}
# Of these, models with experts, which run in float32 on a CPU only.
EXPERTS = ("qwen3-moe", "qwen3-moe-dense", "mixtral", "gpt-oss", "qwen3.5-moe", "qwen3-next")


def make_reference(name: str, **changes: Any) -> PreTrainedModel:
    return random_model((FAMILIES | SHAPES | HYBRIDS)[name], **changes)


def random_model(kind: Kind, *, seed: int = 1234, **changes: Any) -> PreTrainedModel:
    """A float32 model in eval mode. Every parameter is random, biases and norms too: none may be ignored unseen."""
    config_class, model_class, values = kind
    torch.manual_seed(seed)
    config = getattr(transformers, config_class)(**{**values, **changes})
    model = getattr(transformers, model_class)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            mean = 1.0 if parameter.ndim == 1 and bool((parameter == 1).all()) else 0.0
            parameter.normal_(mean, 0.25)
    return model


def save_reference(model: PreTrainedModel, folder: Path, **options: Any) -> Path:
    model.save_pretrained(folder, **options)
    return folder


@torch.inference_mode()
def reference_logits(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    """[len(tokens), vocab] float32."""
    return model(torch.tensor([tokens])).logits[0].float()
