"""What a linear layer asks of a format of weights, and what a format is given: protocols and plain data.

A layer knows its shape, the names of its tensors and which part of them is this process's; the format decides what is
kept in memory and how to multiply by it. Model files name no format: it travels with the weights, in `Build`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from roseinfer.parallel.group import RankGroup, Share


@dataclass(frozen=True, slots=True)
class Epilogue:
    """What follows a product. `activation` as `ModelSpec` names it: None, "silu", "gelu" or "gelu_tanh".

    `gated`: the product is gate and up side by side, and activation(gate) * up is wanted.
    """

    activation: str | None = None
    gated: bool = False


NO_EPILOGUE = Epilogue()


class Norm(Protocol):
    """x [T, width] -> [T, width]. `bias` is None for an RMSNorm, and tells it from a LayerNorm."""

    eps: float
    weight: torch.Tensor

    @property
    def bias(self) -> torch.Tensor | None: ...

    def load(self, source: "WeightSource", name: str) -> None: ...

    def __call__(self, x: torch.Tensor, /) -> torch.Tensor: ...


class Matmul(Protocol):
    """x [T, in] -> epilogue(x @ weight.T + bias) + residual [T, out], for a weight of [out, in].

    The result goes to `out` if that is given, and may go into the residual.
    """

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor: ...

    def after(self, norm: Norm, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """The same of norm(x), without a residual."""
        ...


class Pair(Protocol):
    """Two products, of which the second reads what the first computes, and nobody else does."""

    def __call__(self, norm: Norm, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        """second(first.after(norm, x), residual)."""
        ...


@runtime_checkable
class Pairable(Matmul, Protocol):
    """A product that can hand its result on in a form of its own."""

    def paired(self, second: Matmul) -> Pair | None:
        """This product and `second`, which follows it; None if there is nothing to gain."""
        ...


@dataclass(frozen=True, slots=True)
class Piece:
    """A matrix [rows, in] of a layer's stacked weight, as the checkpoint holds it: `name`.weight and `name`.bias.

    outs, ins: which of the checkpoint's outputs and inputs. transposed: it holds [in, out] (GPT-2's Conv1D).
    bias: whether the layer adds the piece's bias here; one that another rank adds is not read.
    """

    name: str
    outs: Share
    ins: Share
    transposed: bool = False
    bias: bool = False


@dataclass(frozen=True, slots=True)
class TensorMetadata:
    """How a tensor is stored: `dtype` as safetensors names it ("BF16", "F8_E4M3"), and its shape."""

    dtype: str
    shape: tuple[int, ...]


class WeightSource(Protocol):
    """Named tensors on their way into a model that is built as `build` says."""

    build: "Build"

    def __contains__(self, name: str) -> bool: ...

    def stored(self, name: str) -> TensorMetadata | None:
        """How the tensor called `name` is stored; None if it is not, or if nothing is (weights that are drawn)."""
        ...

    def read(
        self, name: str, into: torch.Tensor, *, shard: Sequence[Share] | None = None, transposed: bool = False
    ) -> None:
        """Fill `into` with the tensor called `name` (`transposed`: with its transpose).

        shard: of each dimension of `into`, which part of the tensor that is; None for all of it. Only that part is
        read. Raises `UnsupportedModelError` naming the tensor when it is missing, of another shape or a dtype that
        does not fit.
        """
        ...

    def skip(self, name: str) -> None:
        """Say that the tensor called `name` is another rank's to read. Raises like `read` if it is missing."""
        ...


class Table(Protocol):
    """A matrix [vocab, width] that rows are looked up in, and that hidden states are multiplied by."""

    @property
    def look_up(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """ids [T] -> rows [T, width] in the model's dtype."""
        ...

    def head(self) -> Matmul:
        """The output head's product by the matrix."""
        ...


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


class Experts(Protocol):
    """A layer of experts with weights.

    With h = norm(x), p = softmax(h @ router.T) in float32 over all experts, and the chosen those of the `top_k` largest
    p (of equal ones, the lower numbers): weight w_e = p_e, divided by the sum of the chosen ones' if `renormalise`, and
    expert_e(h) = (activation(h @ gate_e.T) * (h @ up_e.T)) @ down_e.T.
    """

    def __call__(self, norm: Norm, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        """residual + the sum of w_e * expert_e(h) over the chosen [T, hidden], for x [T, hidden]; T may be 0.

        Under a group the sum is over this rank's slice of each expert's width. `residual` may be x itself, and may be
        overwritten by the result; without one, x stays as it is. A row's result does not depend on the rows beside it,
        but for the rounding of products of more or fewer rows.
        """
        ...


class WeightFormat(Protocol):
    """How the weights of linear layers are kept and multiplied by. One object serves all layers of a model."""

    @property
    def stored_as(self) -> str | None:
        """What weights are kept as, for people to read ("fp8 by channel"); None: in the dtype that is computed in."""
        ...

    def load(self, source: WeightSource, pieces: Sequence[Piece], epilogue: Epilogue) -> Matmul:
        """Read the pieces of one layer, stacked in their order, and make its product.

        All of them are equally wide, and all or none have a bias. Raises `UnsupportedModelError` naming a tensor that
        does not fit.
        """
        ...

    def experts(self, source: WeightSource, shape: ExpertShape, share: Share, names: ExpertNames) -> Experts:
        """Read the router and the experts of one layer. share: which part of each expert's width this process holds.

        The router is never quantised. Raises like `load`, and `ConfigError` for experts that the device does not run.
        """
        ...

    def table(self, rows: torch.Tensor) -> "Table":
        """A vocabulary's matrix [vocab, width], which is loaded: to look up, to multiply by, or both."""
        ...


@dataclass(frozen=True, slots=True)
class Build:
    """What a model is built for: the dtype it computes in, its device, who shares it, the format of its weights."""

    dtype: torch.dtype
    device: torch.device
    group: RankGroup
    weight_format: WeightFormat


def read_new(source: WeightSource, name: str, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A new tensor of `shape`, filled with the tensor called `name`. dtype: a float type, by default the model's."""
    tensor = torch.empty(shape, dtype=dtype or source.build.dtype, device=source.build.device)
    source.read(name, tensor)
    return tensor
