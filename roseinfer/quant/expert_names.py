"""Names of the tensors of a layer with experts, as plain data; without torch."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertNames:
    """Names of a layer's matrices in a checkpoint, without ".weight".

    gate, up, down: with a placeholder for the expert's number, as in "mlp.experts.{}.gate_proj".
    """

    router: str
    gate: str
    up: str
    down: str

    def under(self, prefix: str) -> "ExpertNames":
        """Return the same names after `prefix` and a dot."""
        return ExpertNames(
            router=f"{prefix}.{self.router}",
            gate=f"{prefix}.{self.gate}",
            up=f"{prefix}.{self.up}",
            down=f"{prefix}.{self.down}",
        )
