"""config.json and generation_config.json of the model in a GGUF file, built from its metadata.

The readers of other checkpoints' configs read these documents too, so one place decides what is supported. A metadata
key that is set and not read here is refused by name.
"""

from typing import Any

from roseinfer.core.errors import UnsupportedModelError
from roseinfer.gguf.architectures import EMBEDDING, READERS
from roseinfer.gguf.metadata import MetadataFields
from roseinfer.gguf.reader import GgufFile
from roseinfer.gguf.tokens import read_vocabulary

# Keys after the architecture's name that do not change the result, or repeat other keys.
_HARMLESS = frozenset(
    {"vocab_size", "tensor_data_layout", "rope.scaling.finetuned", "rope.scaling.original_context_length"}
)
_HEAD = "output.weight"
# general.sampling.X and its field in generation_config.json.
_SAMPLING = {"top_p": "top_p", "min_p": "min_p", "temp": "temperature", "penalty_repeat": "repetition_penalty"}


def config_of(file: GgufFile) -> dict[str, Any]:
    """Return config.json. Raise `UnsupportedModelError` naming what is missing or not supported."""
    fields = MetadataFields(file)
    kind = fields.text("general.type")
    if kind not in (None, "model"):
        fields.refuse("general.type", "only whole models are")
    arch = fields.needed_text("general.architecture")
    if arch not in READERS:
        fields.refuse("general.architecture", f"known: {', '.join(READERS)}")
    keys = MetadataFields(file, f"{arch}.")
    config = READERS[arch](keys)
    if keys.flag("attention.causal") is False:
        keys.refuse("attention.causal")
    keys.refuse_unread(_HARMLESS)
    vocabulary = read_vocabulary(file)
    if len(vocabulary.texts) > config["vocab_size"]:
        tokens, rows = len(vocabulary.texts), config["vocab_size"]
        raise UnsupportedModelError(f"{file.path}: {tokens} tokens, but {EMBEDDING} has {rows} rows")
    return {
        **config,
        "tie_word_embeddings": _HEAD not in file.tensors,
        "dtype": _dtype(file),
        "eos_token_id": list(vocabulary.endings),
    }


def generation_config_of(file: GgufFile) -> dict[str, Any]:
    """Return generation_config.json; empty if the file proposes no sampling."""
    fields = MetadataFields(file)
    found: dict[str, Any] = {ours: fields.number(f"general.sampling.{key}") for key, ours in _SAMPLING.items()}
    found["top_k"] = fields.integer("general.sampling.top_k")
    proposed = {name: value for name, value in found.items() if value is not None}
    return {"do_sample": True, **proposed} if proposed else {}


def _dtype(file: GgufFile) -> str:
    """Return the matrices' dtype. Quantised ones use bfloat16, whose range covers scales and activations."""
    encodings = {tensor.encoding.name for tensor in file.tensors.values() if len(tensor.shape) > 1}
    if encodings <= {"F32"}:
        return "float32"
    return "float16" if encodings <= {"F32", "F16"} else "bfloat16"
