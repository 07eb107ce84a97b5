"""Reader of the types of a GGUF file's tensors, of which GPUs keep some in four bits."""

from pathlib import Path

from roseinfer.gguf.files import open_gguf
from roseinfer.quant.int4_scheme import GGUF_ENCODINGS, GGUF_GROUP_COLUMNS, Int4Groups, Int4Scheme


def read_gguf_scheme(path: Path) -> Int4Scheme | None:
    """Return how layers are stored if any layer has four bits; None if all are read as floats."""
    tensors = open_gguf(path).tensors.values()
    kept = {tensor.encoding.name for tensor in tensors if len(tensor.shape) > 1} & set(GGUF_ENCODINGS)
    return Int4Scheme("gguf", Int4Groups(GGUF_GROUP_COLUMNS, symmetric="Q4_K" not in kept)) if kept else None
