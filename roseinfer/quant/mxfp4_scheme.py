"""Description of a checkpoint whose experts are in MXFP4: plain data, read without torch."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mxfp4Scheme:
    """Storage of the experts' matrices in MXFP4; all other layers are floats. ignored: names of those, for people."""

    ignored: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        return "mxfp4"

    def ignores(self, name: str) -> bool:
        """Return True if the layer with the tensor `name`.weight is not quantised."""
        return ".experts." not in f".{name}."
