"""What a checkpoint's config says of weights in FP8: plain data, read without torch."""

import re
from dataclasses import dataclass
from typing import Literal

PATTERN = "re:"  # begins an ignored name that is a regular expression


@dataclass(frozen=True, slots=True)
class Fp8Scheme:
    """How the weights of linear layers are kept in FP8 (e4m3fn).

    layout: what shares a scale: 128 x 128 weights, an output channel, or the whole matrix. scale: the last part of a
    scale's name, which stands beside `X.weight`. ignored: layers that are not quantised, by their names, with or
    without "model." in front, by the beginning or the last parts of them, or by a regular expression after "re:".
    """

    layout: Literal["block", "channel", "tensor"]
    scale: str
    ignored: tuple[str, ...] = ()

    def ignores(self, name: str) -> bool:
        """Whether the layer whose tensor is `name`.weight is among the ignored ones."""
        return any(_matches(pattern, name) for pattern in self.ignored)


def _matches(pattern: str, name: str) -> bool:
    if pattern.startswith(PATTERN):
        return re.match(pattern.removeprefix(PATTERN), name) is not None
    parts = f".{name.removeprefix('model.')}."
    wanted = f".{pattern.removeprefix('model.').removesuffix('*').strip('.')}."
    return parts.startswith(wanted) or parts.endswith(wanted)
