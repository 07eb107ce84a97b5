"""Router and the norm before it as two matrices of 16 bits, which `route` multiplies by.

The product of two numbers of 16 bits, norm weight times router weight, has at most 16 (bfloat16) or 22 (float16)
significant bits: it is the sum of two such numbers.
"""

from typing import NamedTuple

import torch

from roseinfer.kernels.linear.skinny import SkinnyNorm


class RouterTerms(NamedTuple):
    """Terms of the router. values: [2, E, H], whose sum is norm weight * router * scale, in their dtype. scale: [1]
    float32.

    The scale is a power of two. If norm and router have that dtype, the sum is exact except for parts below 2^-38 of
    the largest (float16) or below 2^-133 (bfloat16).
    """

    values: torch.Tensor
    scale: torch.Tensor


def split_router(norm: SkinnyNorm, router: torch.Tensor) -> RouterTerms:
    """Split norm and router into terms. norm: an RMSNorm. router: [E, H], bfloat16 or float16. Does not wait for the
    GPU.
    """
    product = router.float() * norm.weight.float()
    # The largest becomes 2^13 to 2^14: float16 ends at 2^16, and has fewer than 11 bits below 2^-14.
    exponent = (14 - torch.frexp(product.abs().amax()).exponent).clamp(-126, 127)
    scale = ((exponent.int() + 127) << 23).view(1).view(torch.float32)  # from its bits, since pow may round
    product *= scale
    high = product.to(router.dtype)
    return RouterTerms(torch.stack([high, (product - high.float()).to(router.dtype)]), scale)
