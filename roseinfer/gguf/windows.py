"""Windows of published models that their GGUF files do not record."""

import re
from typing import NamedTuple

from roseinfer.gguf.reader import GgufFile


class UnrecordedWindow(NamedTuple):
    """Window of a model's layers, in tokens, which is missing in its file."""

    model: str
    tokens: int


# By architecture and by the model's name in the file. llama.cpp's converter writes no window for these architectures.
_KNOWN = (
    ("starcoder2", "", UnrecordedWindow("StarCoder2", 4096)),
    ("llama", r"mistral.?7b.*v0\.1", UnrecordedWindow("Mistral 7B v0.1", 4096)),
    ("llama", r"ministral.?8b", UnrecordedWindow("Ministral 8B", 32768)),
)


def unrecorded_window(file: GgufFile) -> UnrecordedWindow | None:
    """Return the window that the original of a file has, if it is known to be missing."""
    architecture, name = (str(file.metadata.get(f"general.{key}", "")) for key in ("architecture", "name"))
    return next(
        (
            window
            for known, pattern, window in _KNOWN
            if architecture == known and re.search(pattern, name, re.IGNORECASE)
        ),
        None,
    )
