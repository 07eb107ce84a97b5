"""Names of the tensors of a layer with experts, as plain data; without torch."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StackedExpertNames:
    """Names of tensors that hold a matrix of all experts, as gpt-oss stores them; `StackedExperts` reads them."""

    gate_up: str
    down: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertNames:
    """Names of a layer's matrices in a checkpoint, without ".weight".

    gate, up, down: with a placeholder for the expert's number, as in "mlp.experts.{}.gate_proj". stacked: of tensors
    that may replace these.
    """

    router: str
    gate: str
    up: str
    down: str
    stacked: StackedExpertNames | None = None

    def under(self, prefix: str) -> "ExpertNames":
        """Return the same names after `prefix` and a dot."""
        stacked = self.stacked and StackedExpertNames(
            gate_up=f"{prefix}.{self.stacked.gate_up}", down=f"{prefix}.{self.stacked.down}"
        )
        return ExpertNames(
            router=f"{prefix}.{self.router}",
            gate=f"{prefix}.{self.gate}",
            up=f"{prefix}.{self.up}",
            down=f"{prefix}.{self.down}",
            stacked=stacked,
        )
