"""Interface of descriptions of quantised checkpoints: plain data, read without torch."""

from typing import Protocol


class QuantScheme(Protocol):
    """Storage of a checkpoint's linear layers. `quant/select.py` knows the format of each scheme."""

    @property
    def label(self) -> str:
        """Description for people, as in "fp8 by block"."""
        ...

    def ignores(self, name: str) -> bool:
        """Return True if the layer with the tensor `name`.weight is not quantised."""
        ...
