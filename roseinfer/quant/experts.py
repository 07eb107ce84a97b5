"""What a layer of experts is, as a format of weights is told: plain data. `base.Experts` is what it makes of it.

A router chooses `top_k` of `count` feed-forward networks for each token, and the layer adds up what they make of it,
each with its weight (Shazeer et al., 2017). Every rank holds a slice of all experts' widths, as of a dense layer's.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertShape:
    """Of one layer, whole: what all ranks hold together.

    count: experts, numbered from 0. top_k: of them for each token. hidden: width of the residual stream. width: of each
    expert's hidden layer. renormalise: whether the weights of the chosen are divided by their sum. activation as in
    `Epilogue`.
    """

    count: int
    top_k: int
    hidden: int
    width: int
    renormalise: bool
    activation: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertNames:
    """What a checkpoint calls a layer's matrices, without ".weight".

    gate, up, down: with a place for the expert's number, as "mlp.experts.{}.gate_proj".
    """

    router: str
    gate: str
    up: str
    down: str

    def under(self, prefix: str) -> "ExpertNames":
        """The same names behind `prefix` and a dot."""
        return ExpertNames(
            router=f"{prefix}.{self.router}",
            gate=f"{prefix}.{self.gate}",
            up=f"{prefix}.{self.up}",
            down=f"{prefix}.{self.down}",
        )
