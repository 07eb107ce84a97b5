"""Mistral 7B (Jiang et al., 2023): Llama with one window in all layers."""

from roseinfer.models.decoder_config import optional_integer, read_decoder
from roseinfer.models.families.family import STORED_FREQUENCIES, ModelFamily
from roseinfer.models.fields import ConfigFields
from roseinfer.models.layer_types import read_one_window
from roseinfer.models.spec import ModelSpec


def read_mistral(fields: ConfigFields, architecture: str) -> ModelSpec:
    # transformers' MistralConfig defaults to a window of 4096, in all layers.
    window = optional_integer(fields, "sliding_window", 4096)
    return read_decoder(fields, architecture, windows=read_one_window(fields, window, "Mistral"))


FAMILIES = (ModelFamily(architectures=("MistralForCausalLM",), read=read_mistral, ignored=STORED_FREQUENCIES),)
