"""What a checkpoint's config says of weights in FP8: plain data, read without torch."""

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from roseinfer.quant.name_pattern import name_pattern

PATTERN = "re:"  # begins an ignored name that is a regular expression


@dataclass(frozen=True, slots=True)
class Fp8Scheme:
    """How the weights of linear layers are kept in FP8 (e4m3fn).

    layout: what shares a scale: 128 x 128 weights, an output channel, or the whole matrix. ignored: layers that are not
    quantised, by their names, with or without "model." in front, by all that is above or below a name, by a pattern of
    a shell ("*.mlp.*"), or by a simple regular expression after "re:" (`NamePattern`).
    """

    layout: Literal["block", "channel", "tensor"]
    ignored: tuple[str, ...] = ()

    @property
    def shown(self) -> str:
        """For people to read. One scale for a matrix is kept as one for each of its channels."""
        return f"fp8 by {'block' if self.layout == 'block' else 'channel'}"

    def ignores(self, name: str) -> bool:
        """Whether the layer whose tensor is `name`.weight is among the ignored ones.

        For weights that are drawn: of those that are stored, it is seen from the tensors.
        """
        return any(_matches(pattern, name) for pattern in self.ignored)


def _matches(pattern: str, name: str) -> bool:
    if pattern.startswith(PATTERN):
        return name_pattern(pattern.removeprefix(PATTERN)).matches(name)
    short, wanted = name.removeprefix("model."), pattern.removeprefix("model.")
    if "*" in wanted:
        return fnmatchcase(short, wanted) or fnmatchcase(name, pattern)
    return f".{short}.".startswith(f".{wanted}.") or short.endswith(f".{wanted}")
