"""Description of a checkpoint's weights in FP8, from its config: plain data, read without torch."""

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

REGEX_PREFIX = "re:"  # an ignored name that is a regular expression


@dataclass(frozen=True, slots=True)
class Fp8Scheme:
    """Storage of linear layers' weights in FP8 (e4m3fn).

    layout: the weights that share a scale: 128 x 128 of them, an output channel, or the whole matrix. ignored: layers
    that are not quantised. An entry is a layer's name, with or without "model." before it; a part of the name, for all
    layers above or below it; a shell pattern ("*.mlp.*"); or a Python regular expression after "re:", which has to
    match from the name's start.
    """

    layout: Literal["block", "channel", "tensor"]
    ignored: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """Description for people. One scale for a matrix is stored as one for each of its channels."""
        return f"fp8 by {'block' if self.layout == 'block' else 'channel'}"

    def ignores(self, name: str) -> bool:
        """Return True if the layer with the tensor `name`.weight is not quantised.

        Only drawn weights need this: the tensors of a checkpoint show it themselves.
        """
        return any(_matches(pattern, name) for pattern in self.ignored)


def check_ignored(pattern: str) -> None:
    """Raise `ValueError` if `pattern`, an entry of `Fp8Scheme.ignored`, is an invalid regular expression."""
    if pattern.startswith(REGEX_PREFIX):
        try:
            re.compile(pattern.removeprefix(REGEX_PREFIX))
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(f"invalid regular expression: {error}") from None


def _matches(pattern: str, name: str) -> bool:
    if pattern.startswith(REGEX_PREFIX):
        return re.match(pattern.removeprefix(REGEX_PREFIX), name) is not None
    short, wanted = name.removeprefix("model."), pattern.removeprefix("model.")
    if "*" in wanted:
        return fnmatchcase(short, wanted) or fnmatchcase(name, pattern)
    return f".{short}.".startswith(f".{wanted}.") or short.endswith(f".{wanted}")
