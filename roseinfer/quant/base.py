"""Protocols and plain data between linear layers and weight formats.

A layer knows its shape, the names of its tensors and its process's part of them. The format decides how weights are
stored and multiplied by. Model files name no format: it travels with the weights, in `Build`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from roseinfer.parallel.group import RankGroup, Share
from roseinfer.quant.expert_names import ExpertNames
from roseinfer.quant.finite import FiniteCheck


@dataclass(frozen=True, slots=True)
class Epilogue:
    """Operations after a product.

    activation: None, "silu", "gelu" or "gelu_tanh", as in `ModelSpec`. gated: the product is gate and up side by side,
    and the result is activation(gate) * up; or `clamped_swish(gate, up)`, for the activation of that name.
    """

    activation: str | None = None
    gated: bool = False


NO_EPILOGUE = Epilogue()
# `WeightFormat.form` of a matrix in the model's dtype.
FLOATS = "floats"


class Norm(Protocol):
    """Norm x [T, width] -> [T, width]. `bias` is None for an RMSNorm, and set for a LayerNorm."""

    eps: float
    weight: torch.Tensor

    @property
    def bias(self) -> torch.Tensor | None: ...

    def load(self, source: "WeightSource", name: str) -> None: ...

    def __call__(self, x: torch.Tensor, /) -> torch.Tensor: ...


class Matmul(Protocol):
    """Product x [T, in] -> epilogue(x @ weight.T + bias) + residual [T, out], for a weight of [out, in].

    The result goes to `out` if that is given. It may overwrite the residual.
    """

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor: ...

    def after(self, norm: Norm, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return the product of norm(x), without a residual."""
        ...

    def bare(self) -> "Matmul":
        """Return the product by the same weight without the epilogue: x @ weight.T + bias.

        Its dtype is the one that the epilogue is computed in. A gate's epilogue of this result is the product, bit for
        bit on a CPU.
        """
        ...


class Pair(Protocol):
    """Two products; only the second one reads the result of the first."""

    def __call__(self, norm: Norm, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        """Return second(first.after(norm, x), residual)."""
        ...


@runtime_checkable
class Pairable(Matmul, Protocol):
    """Product that can pass its result on in a form of its own."""

    def paired(self, second: Matmul) -> Pair | None:
        """Combine this product and `second`, which follows it; None if there is nothing to gain."""
        ...


class JointProduct(Protocol):
    """Two products of the same input."""

    def __call__(self, norm: Norm, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return first.after(norm, x) and second.after(norm, x)."""
        ...


@runtime_checkable
class Joinable(Matmul, Protocol):
    """Product that can compute a small one in the same launch."""

    def joined(self, second: Matmul) -> JointProduct | None:
        """Combine this product and `second`; None if there is nothing to gain."""
        ...


@dataclass(frozen=True, slots=True)
class WeightPiece:
    """Matrix [rows, in] of a layer's stacked weight, as the checkpoint stores it: `name`.weight and `name`.bias.

    outs, ins: this process's share of the checkpoint's outputs and inputs. transposed: the checkpoint stores [in, out]
    (GPT-2's Conv1D). bias: whether the layer adds the piece's bias here; a bias that another rank adds is not read.
    feeds: the layer that alone reads the results, or products of pairs of them as wide as a piece; None if unknown.
    """

    name: str
    outs: Share
    ins: Share
    transposed: bool = False
    bias: bool = False
    feeds: str | None = None


@dataclass(frozen=True, slots=True)
class TensorMetadata:
    """Stored form of a tensor: `dtype` as safetensors names it ("BF16", "F8_E4M3"), and its shape."""

    dtype: str
    shape: tuple[int, ...]


class WeightSource(Protocol):
    """Named tensors for a model that is built according to `build`. `finite`: check of what was read or widened."""

    build: "Build"
    finite: FiniteCheck

    def __contains__(self, name: str) -> bool: ...

    def stored(self, name: str) -> TensorMetadata | None:
        """Return how the tensor called `name` is stored; None if it is missing, or drawn instead of stored."""
        ...

    def read(
        self, name: str, into: torch.Tensor, *, shard: Sequence[Share] | None = None, transposed: bool = False
    ) -> None:
        """Fill `into` with the tensor called `name`, or with its transpose if `transposed`.

        shard: the part of the tensor to read in each dimension of `into`; None for all of it. Raises
        `UnsupportedModelError` naming the tensor if it is missing or has another shape or an unsuitable dtype.
        """
        ...

    def skip(self, name: str) -> None:
        """Mark the tensor called `name` as another rank's to read. Raises like `read` if it is missing."""
        ...


class Table(Protocol):
    """Matrix [vocab, width] of a vocabulary: rows are looked up in it, and hidden states multiplied by it."""

    @property
    def look_up(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """Function from ids [T] to rows [T, width] in the model's dtype."""
        ...

    def head(self) -> Matmul:
        """Return the output head's product by the matrix."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertShape:
    """Router and experts of one whole layer, over all ranks.

    A router chooses `top_k` of `count` feed-forward networks for each token, and the layer adds up their weighted
    results (Shazeer et al., 2017). Every rank holds a slice of each expert's width.

    count: experts, numbered from 0. hidden: width of the residual stream. width: that of each expert's hidden layer.
    renormalise: divide the weights of the chosen experts by their sum. activation: as in `Epilogue`. bias: the router
    and the experts' matrices have biases. shared: one more expert, number `count`, computes every token; its weight is
    the sigmoid of a product of its own, whose matrix [1, hidden] follows the router's rows.
    """

    count: int
    top_k: int
    hidden: int
    width: int
    renormalise: bool
    activation: str
    bias: bool = False
    shared: bool = False

    @property
    def matrices(self) -> int:
        """Number of experts, the shared one included."""
        return self.count + self.shared

    @property
    def places(self) -> int:
        """Number of experts that compute a token."""
        return self.top_k + self.shared


class Experts(Protocol):
    """Layer of experts with weights.

    With h = norm(x), p = softmax(h @ router.T) in float32 over all experts. The `top_k` experts with the largest p are
    chosen; of equal ones, the lower numbers. The weight w_e is p_e, divided by the sum of the chosen ones' if
    `renormalise`, and expert_e(h) = (activation(h @ gate_e.T) * (h @ up_e.T)) @ down_e.T. Biases, if there are any, are
    added to each product.
    """

    def __call__(self, norm: Norm, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        """Return residual + the sum of w_e * expert_e(h) over the chosen experts [T, hidden], for x [T, hidden]; T may
        be 0.

        Under a group the sum is over this rank's slice of each expert's width. `residual` may be x itself, and the
        result may overwrite it; without a residual, x is left alone. A row's result does not depend on the other rows,
        except for the rounding of products of more or fewer rows.
        """
        ...


class WeightFormat(Protocol):
    """Storage of linear layers' weights, and products by them. One object serves all layers of a model."""

    @property
    def stored_as(self) -> str | None:
        """Storage format for people to read ("fp8 by channel"); None: the dtype of the computation."""
        ...

    def load(self, source: WeightSource, pieces: Sequence[WeightPiece], epilogue: Epilogue) -> Matmul:
        """Read the pieces of one layer, stack them in their order, and return the layer's product.

        All pieces are equally wide, and all or none have a bias. Raises `UnsupportedModelError` naming an unsuitable
        tensor.
        """
        ...

    def form(self, source: WeightSource, name: str) -> str:
        """Return the form in which the matrix called `name` is held; matrices of equal forms can be stacked."""
        ...

    def experts(self, source: WeightSource, shape: ExpertShape, share: Share, names: ExpertNames) -> Experts:
        """Read the router and the experts of one layer. share: this process's part of each expert's width.

        The router is never quantised. A shared expert has the form of the others, on a GPU. Raises like `load`, and
        `ConfigError` for experts that the device does not support.
        """
        ...

    def table(self, rows: torch.Tensor) -> "Table":
        """Return the loaded vocabulary matrix `rows` [vocab, width], to look up, to multiply by, or both."""
        ...


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """Adapters of a step's rows, of which at least one has one.

    slots: of each row in the batch's order; -1 for the model itself. Empty on a GPU, where only the device needs them.
    of_tokens: [T] int32, the same of each packed token.
    """

    slots: list[int]
    of_tokens: torch.Tensor


class LayerAdapting(Protocol):
    """Extension of a model's linear layers while they are loaded."""

    def adapt(self, matmul: Matmul, pieces: Sequence[WeightPiece], epilogue: Epilogue) -> Matmul:
        """Return a product of the loaded layer that also adds what the adapters of its rows change."""
        ...

    def begin(self, rows: AdapterRows | None) -> None:
        """Set the adapters of the next forward pass; None if no row has one."""
        ...

    @property
    def is_idle(self) -> bool:
        """Return True if no row of the current pass has an adapter."""
        ...


@dataclass(frozen=True, slots=True)
class Build:
    """Settings that a model is built for: dtype of the computation, device, group of processes and weight format.

    `adapting`: extends the products of linear layers; None without adapters.
    """

    dtype: torch.dtype
    device: torch.device
    group: RankGroup
    weight_format: WeightFormat
    adapting: LayerAdapting | None = None


def read_new(source: WeightSource, name: str, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return a new tensor of `shape`, filled with the tensor called `name`. dtype: a float type, by default the
    model's.
    """
    tensor = torch.empty(shape, dtype=dtype or source.build.dtype, device=source.build.device)
    source.read(name, tensor)
    return tensor
