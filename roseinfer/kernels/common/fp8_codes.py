"""FP8 (e4m3fn) of kernels, weights, keys and values: four bits of exponent, three of mantissa, no infinity."""

import torch

from roseinfer.kernels.common.triton_support import tl

CODES = torch.float8_e4m3fn
MAX_CODE = 448.0  # the largest finite number
KERNEL_MAX_CODE: tl.constexpr = tl.constexpr(MAX_CODE)  # the same for kernels
# Rows and columns of a weight, or columns of activations, that share a scale unless a whole row does. Kernels contain
# the literal 128: no other size is supported.
SCALE_BLOCK = 128
