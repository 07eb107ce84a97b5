"""Registry of architectures in config.json and the families that compute them."""

from collections.abc import Callable

from roseinfer.core.errors import UnsupportedModelError
from roseinfer.models.base import CausalLM
from roseinfer.models.decoder import Decoder, ModelFamily
from roseinfer.models.gpt2 import GPT2
from roseinfer.models.llama import Llama
from roseinfer.models.mixture import Mixtral, Qwen3Mixture
from roseinfer.models.spec import ModelSpec
from roseinfer.quant.base import Build

_FAMILIES: dict[str, Callable[[ModelSpec, Build], ModelFamily]] = {
    "GPT2LMHeadModel": GPT2,
    "LlamaForCausalLM": Llama,
    "MistralForCausalLM": Llama,
    "Qwen2ForCausalLM": Llama,
    "Qwen3ForCausalLM": Llama,
    "Qwen3MoeForCausalLM": Qwen3Mixture,
    "MixtralForCausalLM": Mixtral,
}


def build_model(spec: ModelSpec, build: Build) -> CausalLM:
    """Return the model without weights; no memory is allocated for them yet.

    Raise `UnsupportedModelError` for an unknown architecture, `ConfigError` for a group that cannot share the model.
    """
    if spec.architecture not in _FAMILIES:
        raise UnsupportedModelError(f"{spec.architecture} is not supported; known: {', '.join(_FAMILIES)}")
    return Decoder(spec, build, _FAMILIES[spec.architecture](spec, build))
