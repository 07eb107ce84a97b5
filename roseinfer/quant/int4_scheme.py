"""Description of a checkpoint's weights in four bits, from its config: plain data, read without torch."""

import re
from dataclasses import dataclass
from typing import Literal

from roseinfer.quant.ignored import is_ignored

# Types of tensors in GGUF files that GPUs keep in four bits.
GGUF_ENCODINGS = ("Q4_0", "Q4_K")
GGUF_GROUP_COLUMNS = 32


@dataclass(frozen=True, slots=True)
class Int4Groups:
    """Columns of a row that share a scale.

    size: 32, 64 or 128 columns; None for all of them. symmetric: code 8 stands for zero; otherwise each group has a
    zero of its own.
    """

    size: int | None
    symmetric: bool


@dataclass(frozen=True, slots=True)
class Int4Scheme:
    """Storage of linear layers' weights in four bits.

    layout: how tensors hold codes, scales and zeros; each is a file of `quant/int4_layouts/`. exceptions: regular
    expressions, which have to match a layer's name from its start, and the groups of such layers; the first one that
    matches counts. ignored: entries for layers that are not quantised, as in `quant/ignored.py`.
    """

    layout: Literal["awq", "gptq", "gptq_v2", "pack-quantized", "gguf"]
    groups: Int4Groups
    exceptions: tuple[tuple[str, Int4Groups], ...] = ()
    ignored: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """Description for people."""
        return "int4 by channel" if self.groups.size is None else f"int4 in groups of {self.groups.size}"

    def ignores(self, name: str) -> bool:
        """Return True if the layer with the tensor `name`.weight is not quantised.

        Only drawn weights need this: the tensors of a checkpoint show it themselves.
        """
        return is_ignored(name, self.ignored)

    def groups_of(self, name: str) -> Int4Groups:
        """Return the groups of the layer called `name`."""
        return next((groups for pattern, groups in self.exceptions if re.match(pattern, name)), self.groups)
