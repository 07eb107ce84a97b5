"""Ministral 8B (Mistral AI, 2024): Mistral with windows in some of its layers."""

from roseinfer.models.decoder_config import optional_integer, read_decoder, read_heads
from roseinfer.models.families.family import ModelFamily
from roseinfer.models.fields import ConfigFields
from roseinfer.models.layer_types import read_windows
from roseinfer.models.spec import ModelSpec


def read_ministral(fields: ConfigFields, architecture: str) -> ModelSpec:
    window = optional_integer(fields, "sliding_window", 4096)
    windows = read_windows(fields, window, 0)
    return read_decoder(fields, architecture, attention=read_heads(fields, kv_heads=8), windows=windows)


FAMILIES = (ModelFamily(architectures=("MinistralForCausalLM",), read=read_ministral),)
