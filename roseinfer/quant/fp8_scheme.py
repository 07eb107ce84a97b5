"""Description of a checkpoint's weights in FP8, from its config: plain data, read without torch."""

from dataclasses import dataclass
from typing import Literal

from roseinfer.quant.ignored import is_ignored


@dataclass(frozen=True, slots=True)
class Fp8Scheme:
    """Storage of linear layers' weights in FP8 (e4m3fn).

    layout: the weights that share a scale: 128 x 128 of them, an output channel, or the whole matrix. ignored: entries
    for layers that are not quantised, as in `quant/ignored.py`.
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
        return is_ignored(name, self.ignored)
