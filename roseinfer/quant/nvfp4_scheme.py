"""Description of a checkpoint whose linear layers are in NVFP4: plain data, read without torch."""

from dataclasses import dataclass
from typing import Literal

from roseinfer.quant.ignored import is_ignored

GROUP_COLUMNS = 16  # that share a scale


@dataclass(frozen=True, slots=True)
class Nvfp4Scheme:
    """Storage of linear layers' weights in NVFP4: codes of four bits (e2m1), with a scale in FP8 for 16 columns and one
    in float32 for the matrix.

    layout: the tool, whose tensors have names of their own. ignored: entries for layers that are not quantised, as in
    `quant/ignored.py`.
    """

    layout: Literal["compressed-tensors", "modelopt"]
    ignored: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        return "nvfp4"

    def ignores(self, name: str) -> bool:
        """Return True if the layer with the tensor `name`.weight is not quantised."""
        return is_ignored(name, self.ignored)
