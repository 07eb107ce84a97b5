"""Registry of encoder architectures, and the reader of their config.json.

A family is one file with its config reader and its network. It is imported on use, so this module needs no torch.
"""

from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast

from roseinfer.core.errors import UnsupportedModelError
from roseinfer.core.json_file import shortened
from roseinfer.models.config import MAX_WEIGHTS_PER_BYTE
from roseinfer.models.documents import CONFIG, document_path, read_config, weight_bytes
from roseinfer.models.encoders.config_fields import HARMLESS, HARMLESS_PREFIXES
from roseinfer.models.encoders.spec import EncoderSpec
from roseinfer.models.fields import ConfigFields

_FAMILIES = {
    "BertModel": "bert",
    "BertForMaskedLM": "bert",
    "BertForSequenceClassification": "bert",
    "XLMRobertaModel": "xlm_roberta",
    "XLMRobertaForMaskedLM": "xlm_roberta",
    "XLMRobertaForSequenceClassification": "xlm_roberta",
    "RobertaModel": "xlm_roberta",
    "RobertaForMaskedLM": "xlm_roberta",
    "RobertaForSequenceClassification": "xlm_roberta",
    "ModernBertModel": "modernbert",
    "ModernBertForMaskedLM": "modernbert",
    "ModernBertForSequenceClassification": "modernbert",
    "Gemma3TextModel": "gemma3",
}
# Encoders that people embed with, whose networks differ from ours.
_REFUSED = {
    "MPNetModel": "its attention adds relative positions",
    "MPNetForMaskedLM": "its attention adds relative positions",
    "DistilBertModel": "its tensors have other names",
    "DebertaV2Model": "its attention adds relative positions",
    "DebertaV2ForSequenceClassification": "its attention adds relative positions",
    "NomicBertModel": "its network is code beside the checkpoint",
    "NewModel": "its network is code beside the checkpoint",
    "JinaBertModel": "its network is code beside the checkpoint",
    "XLMRobertaLoRA": "its network is code beside the checkpoint",
}


class EncoderModule(Protocol):
    """Functions of a family's module."""

    def read_spec(self, fields: ConfigFields, architecture: str) -> EncoderSpec:
        """Read every field that the family knows."""
        ...

    def network(self, spec: Any, build: Any) -> Any:
        """Return the family's `EncoderNetwork` for a spec of `read_spec`, without weights."""
        ...


def family_module(architecture: str) -> EncoderModule:
    return cast(EncoderModule, import_module(f"roseinfer.models.encoders.{_FAMILIES[architecture]}"))


def is_encoder(folder: Path) -> bool:
    """Return True if `read_encoder_spec` is the reader for this folder, even if it refuses the model by name.

    Raise like `read_config`.
    """
    names = read_config(folder).get("architectures")
    return isinstance(names, list) and len(names) == 1 and names[0] in [*_FAMILIES, *_REFUSED]


def read_encoder_spec(folder: Path) -> EncoderSpec:
    """Return the spec of the encoder in `folder`.

    Raise `ModelNotFoundError` without a config.json, `UnsupportedModelError` naming the field that is not supported.
    """
    path = document_path(folder, CONFIG)
    data = read_config(folder)
    architecture = _architecture(data, str(path))
    fields = ConfigFields(data, f"{path} ({architecture})")
    spec = family_module(architecture).read_spec(fields, architecture)
    fields.refuse_unread(HARMLESS, HARMLESS_PREFIXES)
    _check_size(spec, folder, fields.where)
    return spec


def _architecture(data: dict[str, Any], where: str) -> str:
    names = data.get("architectures")
    known = f"known: {', '.join(_FAMILIES)}"
    # Compare with lists, since names from JSON may not be hashable.
    if not isinstance(names, list) or len(names) != 1 or names[0] not in list(_FAMILIES):
        reason = _REFUSED[names[0]] if isinstance(names, list) and names and names[0] in list(_REFUSED) else known
        raise UnsupportedModelError(f"{where}: architectures = {shortened(names)} is not supported; {reason}")
    return names[0]


def _check_size(spec: EncoderSpec, folder: Path, where: str) -> None:
    """Raise `UnsupportedModelError` if the config describes far more weights than the checkpoint's files can hold."""
    held = weight_bytes(folder)
    block = 4 * spec.hidden_size + 2 * spec.intermediate_size
    weights = spec.hidden_size * (spec.vocab_size + spec.num_layers * block)
    if held and weights > held * MAX_WEIGHTS_PER_BYTE:
        sizes = f"{weights:.3g} weights, but the checkpoint's files hold only {held:.3g} bytes"
        raise UnsupportedModelError(f"{where} describes {sizes}")
