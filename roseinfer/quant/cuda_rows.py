"""Parts that all products on a GPU share, whatever their weights are stored as."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from roseinfer.kernels.linear.activation import gated, pointwise
from roseinfer.kernels.linear.int4_codes import PackedInt4
from roseinfer.kernels.linear.int4_linear import int4_linear
from roseinfer.kernels.linear.int4_linear import pays as int4_pays
from roseinfer.kernels.linear.skinny import SkinnyNorm, pays, skinny_linear
from roseinfer.kernels.linear.small_product import SmallProduct
from roseinfer.kernels.lora.slots import SlotRows
from roseinfer.quant.base import NO_EPILOGUE, Epilogue, Norm


class SkinnyMatmul:
    """Product of few rows by `skinny_linear`, which fuses the operations around it.

    It may overlap the preceding kernel: everything that a product reads, except its input and residual, never changes.
    """

    def __init__(
        self,
        weight: torch.Tensor | PackedInt4,
        scales: torch.Tensor | None,
        bias: torch.Tensor | None,
        epilogue: Epilogue,
        inputs: torch.Tensor | None = None,
    ) -> None:
        """weight [out, in], scales and bias: as in `skinny_linear`, or a weight of `int4_linear`.

        inputs: the column of x that each column of the weight multiplies; None: in their order.
        """
        self._linear: Callable[..., torch.Tensor]
        self._pays: Callable[[int], bool]
        if isinstance(weight, PackedInt4):
            self._linear = partial(int4_linear, weight=weight)
            self._pays = partial(int4_pays, weight=weight, gated=epilogue.gated)
        else:
            self._linear = partial(skinny_linear, weight=weight, scales=scales)
            self._pays = partial(pays, weight=weight, gated=epilogue.gated, scales=scales)
        self._bias = bias
        self._epilogue = epilogue
        self._inputs = inputs
        self._known: dict[int, bool] = {}

    def pays(self, rows: int) -> bool:
        """Return True if this is the fastest product of so many rows."""
        known = self._known.get(rows)
        if known is None:
            known = self._known[rows] = self._pays(rows)
        return known

    def __call__(
        self,
        x: torch.Tensor,
        *,
        norm: Norm | None = None,
        residual: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        delta: SlotRows | None = None,
        small: SmallProduct | None = None,
    ) -> torch.Tensor:
        """Return epilogue(norm(x) @ weight.T + bias) + residual [T, out], for x [T, in]; overwrites a residual.

        delta: slots of rows, whose adapters change the outputs before the epilogue. small: as in `skinny_linear`.
        """
        if self._inputs is not None:
            x, norm = (x if norm is None else norm(x)), None
            delta = None if delta is None else delta._replace(inputs=x.contiguous())
            x = x.index_select(1, self._inputs)
        return self._linear(
            x,
            bias=self._bias,
            residual=residual,
            norm=None if norm is None else SkinnyNorm(norm.weight, norm.eps, norm.bias),
            activation=self._epilogue.activation,
            gated=self._epilogue.gated,
            out=out if residual is None else residual,
            delta=delta,
            overlap=True,
            **({} if small is None else {"small": small}),
        )


class FewOrMany:
    """`Matmul` of two products: `few`, which fuses everything around it, for rows that it pays for, else `many`."""

    few: SkinnyMatmul
    _epilogue: Epilogue

    def bare(self) -> "FewOrMany":
        raise NotImplementedError

    def many(
        self,
        x: torch.Tensor,
        norm: Norm | None = None,
        residual: torch.Tensor | None = None,
        ready: Callable[[], None] | None = None,
    ) -> tuple[Any, torch.Tensor]:
        """Return the inputs of a product of many rows, x or norm(x), and the product with bias and residual, which
        `finish` completes. It overwrites a residual. ready: called between the launches of both.
        """
        inputs = self.prepared(x, norm)
        if ready is not None:
            ready()
        return inputs, self.product(inputs, x.dtype, residual)

    def prepared(self, x: torch.Tensor, norm: Norm | None) -> Any:
        """Return x or norm(x), in the form that `product` takes."""
        return x if norm is None else norm(x)

    def product(self, inputs: Any, dtype: torch.dtype, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Return the product of many rows of `inputs` with bias and residual, in `dtype`, without the epilogue."""
        raise NotImplementedError

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        if self.few.pays(x.shape[0]):
            return self.few(x, residual=residual, out=out)
        assert residual is None or self._epilogue == NO_EPILOGUE, "only the few rows' kernel has both"
        return self._of_many(x, None, residual, out)

    def after(self, norm: Norm, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        if self.few.pays(x.shape[0]):
            return self.few(x, norm=norm, out=out)
        return self._of_many(x, norm, None, out)

    def _of_many(
        self, x: torch.Tensor, norm: Norm | None, residual: torch.Tensor | None, out: torch.Tensor | None
    ) -> torch.Tensor:
        result = finish(self.many(x, norm, residual)[1], self._epilogue)
        return result if out is None else out.copy_(result)


def finish(y: torch.Tensor, epilogue: Epilogue) -> torch.Tensor:
    """Apply the epilogue to a product y [T, out] with its bias: [T, out], or half as wide if it is gated."""
    activation = epilogue.activation
    if epilogue.gated:
        assert activation is not None, "a gate without an activation"
        return gated(y, activation)
    return y if activation is None else pointwise(y, activation)
