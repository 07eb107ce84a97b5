"""Names of the tensors of a layer with experts, as plain data; without torch."""

from dataclasses import asdict, dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class StackedExpertNames:
    """Names of tensors that hold a matrix of all experts; `StackedExperts` reads them.

    halves: the gate's rows come first, then those of up, and no matrix is transposed, as in Qwen3.5; otherwise as
    gpt-oss stores them.
    """

    gate_up: str
    down: str
    halves: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedExpertNames:
    """Names of the expert that computes every token, and of the matrix [1, hidden] whose product is its gate."""

    gate: str = "mlp.shared_expert.gate_proj"
    up: str = "mlp.shared_expert.up_proj"
    down: str = "mlp.shared_expert.down_proj"
    factor: str = "mlp.shared_expert_gate"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertNames:
    """Names of a layer's matrices in a checkpoint, without ".weight".

    gate, up, down: with a placeholder for the expert's number, as in "mlp.experts.{}.gate_proj". stacked: of tensors
    that may replace these. shared: of the shared expert; None without one.
    """

    router: str
    gate: str
    up: str
    down: str
    stacked: StackedExpertNames | None = None
    shared: SharedExpertNames | None = None

    def under(self, prefix: str) -> "ExpertNames":
        """Return the same names after `prefix` and a dot."""
        stacked, shared = self.stacked, self.shared
        if stacked is not None:
            stacked = replace(stacked, gate_up=f"{prefix}.{stacked.gate_up}", down=f"{prefix}.{stacked.down}")
        if shared is not None:
            shared = SharedExpertNames(**{name: f"{prefix}.{value}" for name, value in asdict(shared).items()})
        return ExpertNames(
            router=f"{prefix}.{self.router}",
            gate=f"{prefix}.{self.gate}",
            up=f"{prefix}.{self.up}",
            down=f"{prefix}.{self.down}",
            stacked=stacked,
            shared=shared,
        )
