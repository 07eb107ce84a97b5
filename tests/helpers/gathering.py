"""Reference product by weights in four bits."""

import torch

from roseinfer.quant.base import Epilogue
from roseinfer.quant.cpu_matmul import PlainMatmul
from roseinfer.quant.int4_weight import Int4Weight


class Gathering:
    """Product by a widened weight in four bits, whose inputs are gathered first if they are in another order."""

    made = 0
    gathers = 0

    def __call__(
        self, weight: Int4Weight, bias: torch.Tensor | None, epilogue: Epilogue, inputs: torch.Tensor | None
    ) -> PlainMatmul:
        self.made += 1
        self.gathers += inputs is not None
        wide = weight.widen(torch.float32)
        return PlainMatmul(wide if inputs is None else wide[:, inputs.argsort()], bias, epilogue)
