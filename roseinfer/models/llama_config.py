"""Readers of config.json of Llama, Mistral, Qwen2 and Qwen3; without torch."""

from roseinfer.models.decoder_config import optional_integer, read_decoder, read_one_window, read_windows
from roseinfer.models.fields import ConfigFields
from roseinfer.models.spec import ModelSpec


def read_llama(fields: ConfigFields, architecture: str, max_model_len: int | None) -> ModelSpec:
    attention_bias = fields.flag("attention_bias", False)
    return read_decoder(
        fields,
        architecture,
        read_windows(fields, None, 0, max_model_len),
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        mlp_bias=fields.flag("mlp_bias", False),
    )


def read_mistral(fields: ConfigFields, architecture: str, max_model_len: int | None) -> ModelSpec:
    # transformers' MistralConfig defaults to a window of 4096, in all layers.
    window = optional_integer(fields, "sliding_window", 4096)
    return read_decoder(fields, architecture, read_one_window(fields, window, max_model_len, "Mistral"))


def read_qwen2(fields: ConfigFields, architecture: str, max_model_len: int | None) -> ModelSpec:
    return read_decoder(fields, architecture, _qwen_windows(fields, max_model_len), qkv_bias=True)


def read_qwen3(fields: ConfigFields, architecture: str, max_model_len: int | None) -> ModelSpec:
    bias = fields.flag("attention_bias", False)
    windows = _qwen_windows(fields, max_model_len)
    return read_decoder(fields, architecture, windows, qkv_bias=bias, o_bias=bias, qk_norm=True)


def _qwen_windows(fields: ConfigFields, max_model_len: int | None) -> tuple[int | None, ...]:
    """Return the windows of a Qwen model: none if `use_sliding_window` is false, else those of the later layers."""
    window = optional_integer(fields, "sliding_window", 4096)
    first = optional_integer(fields, "max_window_layers", 28) or 0
    return read_windows(fields, window if fields.flag("use_sliding_window", False) else None, first, max_model_len)
