"""Reader of a checkpoint's config.json, or of the same facts in its GGUF file; without torch.

Every field is read, listed as harmless, or refused by name. An unknown field that is set (not null, false, zero or
empty) may change the result, and a wrong answer is worse than none.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from roseinfer.core.errors import UnsupportedModelError
from roseinfer.core.json_file import shortened
from roseinfer.models.documents import CONFIG, document_path, read_config, weight_bytes
from roseinfer.models.families import family_of, known_models_hint
from roseinfer.models.families.family import ModelFamily
from roseinfer.models.fields import ConfigFields
from roseinfer.models.harmless import HARMLESS, HARMLESS_PREFIXES
from roseinfer.models.quantization import read_quantization
from roseinfer.models.spec import ModelSpec

# Weights per byte of the densest format.
MAX_WEIGHTS_PER_BYTE = 8

# Names of models that were stored without their head, as embedders are.
_HEADLESS = {
    "LlamaModel": "LlamaForCausalLM",
    "MistralModel": "MistralForCausalLM",
    "Qwen2Model": "Qwen2ForCausalLM",
    "Qwen3Model": "Qwen3ForCausalLM",
}


def read_model_spec(folder: Path, max_model_len: int | None = None) -> ModelSpec:
    """Return the spec of the checkpoint in `folder`.

    `max_model_len` is the context that will be used: a sliding window of at least that length is full attention. Raise
    `ModelNotFoundError` without a config.json, `UnsupportedModelError` naming the field that is not supported.
    """
    path = document_path(folder, CONFIG)
    data = read_config(folder)
    architecture, family = _architecture(data, str(path))
    fields = ConfigFields(data, f"{path} ({architecture})", max_model_len)
    spec = family.read(fields, architecture)
    spec = replace(spec, quantization=read_quantization(fields, folder))
    fields.refuse_unread(HARMLESS, HARMLESS_PREFIXES)
    _check_size(spec, folder, fields.where)
    return spec


def _check_size(spec: ModelSpec, folder: Path, where: str) -> None:
    """Raise `UnsupportedModelError` if the config describes far more weights than the checkpoint's files can hold.

    This runs before memory is allocated for them.
    """
    held = weight_bytes(folder)
    deltas = sum(delta.channels + 2 * delta.values for delta in spec.deltas)
    attention = deltas + sum((2 * layer.heads + 2 * layer.kv_heads) * layer.head_dim for layer in spec.attention)
    dense = spec.num_layers - spec.expert_layers
    feed_forward = 2 * spec.intermediate_size * dense
    if spec.experts is not None:
        feed_forward += spec.experts.count * (1 + 3 * spec.experts.width) * spec.expert_layers
    weights = spec.hidden_size * (spec.vocab_size + attention + feed_forward)
    if held and weights > held * MAX_WEIGHTS_PER_BYTE:
        sizes = f"{weights:.3g} weights, but the checkpoint's files hold only {held:.3g} bytes"
        raise UnsupportedModelError(f"{where} describes {sizes}")


def _architecture(data: dict[str, Any], where: str) -> tuple[str, ModelFamily]:
    names, name = data.get("architectures"), ""
    if isinstance(names, list) and len(names) == 1:
        name = _HEADLESS.get(str(names[0]), str(names[0]))
        family = family_of(name)
        if family is not None:
            return name, family
    shown, hint = shortened(names, 100), known_models_hint(name)
    raise UnsupportedModelError(f"{where}: architectures = {shown} is not supported; {hint}")
