"""Which class computes which architecture of config.json."""

import torch

from roseinfer.core.errors import UnsupportedModelError
from roseinfer.models.base import CausalLM
from roseinfer.models.config import ModelSpec
from roseinfer.models.gpt2 import GPT2
from roseinfer.models.llama import Llama

_MODELS: dict[str, type[GPT2] | type[Llama]] = {
    "GPT2LMHeadModel": GPT2,
    "LlamaForCausalLM": Llama,
    "MistralForCausalLM": Llama,
    "Qwen2ForCausalLM": Llama,
    "Qwen3ForCausalLM": Llama,
}


def build_model(spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> CausalLM:
    """The model without weights: no memory is taken for them yet."""
    if spec.architecture not in _MODELS:
        raise UnsupportedModelError(f"{spec.architecture} is not supported; known: {', '.join(_MODELS)}")
    return _MODELS[spec.architecture](spec, dtype, device)
