"""Choice of a model's weight format, by its options and its checkpoint."""

import logging

import torch

from roseinfer.core.errors import ConfigError
from roseinfer.core.support import FP8_BLOCKS, FP8_WEIGHTS
from roseinfer.kernels.common.availability import has_triton
from roseinfer.quant.base import WeightFormat, WeightSource
from roseinfer.quant.fp8_format import Fp8Format
from roseinfer.quant.fp8_head import Fp8HeadFormat
from roseinfer.quant.fp8_scheme import Fp8Scheme
from roseinfer.quant.fp8_stored import WideningSource
from roseinfer.quant.int4_format import CudaProducts, Int4Format
from roseinfer.quant.int4_scheme import Int4Scheme
from roseinfer.quant.int4_stored import Int4Source
from roseinfer.quant.int8_format import Int8Format
from roseinfer.quant.int8_product import unsupported_reason
from roseinfer.quant.mxfp4_format import Mxfp4Format
from roseinfer.quant.mxfp4_scheme import Mxfp4Scheme
from roseinfer.quant.nvfp4_format import Nvfp4Format
from roseinfer.quant.nvfp4_scheme import Nvfp4Scheme
from roseinfer.quant.nvfp4_stored import Nvfp4Source
from roseinfer.quant.plain import PlainFormat
from roseinfer.quant.scheme import QuantScheme

_logger = logging.getLogger(__name__)


def choose_format(
    asked: str | None, stored: QuantScheme | None, device: torch.device, dtype: torch.dtype, *, dummy: bool = False
) -> WeightFormat:
    """Return the format for weights on `device` of a model that computes in `dtype`.

    asked: `quantization` as in `ModelConfig`. stored: the checkpoint's scheme if it is quantised. dummy: weights are
    drawn as floats, without a checkpoint. A CPU gains nothing from FP8, and a GPU in float32 has to be exact: both
    multiply by the widened weights. A CPU rounds four bits to int8. Raises `ConfigError` for a format that the device
    does not support.
    """
    if asked == "int8" or (asked is None and _is_for_int8(stored, device)):
        return _int8(device)
    kept = has_triton(device) and dtype is not torch.float32 and asked != "floats"
    if isinstance(stored, Mxfp4Scheme):
        return _mxfp4(asked, kept)
    if asked == "floats":
        return PlainFormat(None if stored is None else f"{stored.label}, widened")
    if isinstance(stored, Int4Scheme) and asked in (None, "int4"):
        return _int4(stored, kept, dummy)
    if asked is None and isinstance(stored, Nvfp4Scheme):
        return Nvfp4Format(stored, CudaProducts(), rounds=dummy) if kept else PlainFormat(f"{stored.label}, widened")
    if asked is None and stored is None:
        return PlainFormat()
    if isinstance(stored, Int4Scheme | Nvfp4Scheme):
        stored = None  # the source gives widened weights, which are rounded like any others
    return _rounded_int4(stored, kept, dummy) if asked == "int4" else _fp8(stored, device, kept, dummy)


def with_head_dtype(chosen: WeightFormat, lm_head_dtype: str, device: torch.device, dtype: torch.dtype) -> WeightFormat:
    """Return the chosen format with the output head in `lm_head_dtype`, as in `ModelConfig`.

    Raises `ConfigError` for a head in a format that the device or the other weights do not support.
    """
    if lm_head_dtype == "auto":
        return chosen
    if isinstance(chosen, Int8Format):
        raise ConfigError("lm_head_dtype must be auto where weights are in int8, as the head is then")
    _check_fp8(device, block=False)
    return Fp8HeadFormat(chosen, dtype, widens=not has_triton(device) or dtype is torch.float32)


def _mxfp4(asked: str | None, kept: bool) -> Mxfp4Format:
    if asked not in (None, "floats"):
        raise ConfigError(f"quantization {asked} is for weights that are floats; the checkpoint's are in mxfp4")
    return Mxfp4Format(widens=not kept)


def _int4(stored: Int4Scheme, kept: bool, dummy: bool) -> WeightFormat:
    if stored.layout == "gguf" and not kept:
        return PlainFormat()
    return Int4Format(stored, CudaProducts() if kept else None, rounds=dummy)


def _rounded_int4(stored: QuantScheme | None, kept: bool, dummy: bool) -> Int4Format:
    if stored is not None:
        raise ConfigError(f"quantization int4 is for weights that are floats; the checkpoint's are in {stored.label}")
    if not dummy:
        _logger.warning(
            "quantization int4 rounds each weight to the nearest of 16 numbers; files that were calibrated for four "
            "bits (AWQ, GPTQ) answer better"
        )
    return Int4Format(None, CudaProducts() if kept else None, rounds=True)


def _fp8(stored: QuantScheme | None, device: torch.device, kept: bool, dummy: bool) -> Fp8Format:
    if stored is not None and not isinstance(stored, Fp8Scheme):
        raise ConfigError(f"no format reads weights stored as {stored.label}")
    _check_fp8(device, block=stored is not None and stored.layout == "block")
    return Fp8Format(stored, rounds=dummy or stored is None, widens=not kept)


def _is_for_int8(stored: QuantScheme | None, device: torch.device) -> bool:
    """Return True for weights in four bits on a CPU, which has no product for them. GGUF files are widened exactly."""
    four_bits = isinstance(stored, Nvfp4Scheme) or (isinstance(stored, Int4Scheme) and stored.layout != "gguf")
    return four_bits and device.type == "cpu" and unsupported_reason() is None


def _int8(device: torch.device) -> Int8Format:
    if device.type != "cpu":
        raise ConfigError("quantization int8 is for CPUs; use fp8 on a GPU")
    missing = unsupported_reason()
    if missing is not None:
        raise ConfigError(f"quantization int8 is not supported on this machine: {missing}")
    return Int8Format()


def _check_fp8(device: torch.device, *, block: bool) -> None:
    if device.type != "cuda":
        return
    found = torch.cuda.get_device_capability(device)
    # cuBLASLt supports scales by blocks on one generation only.
    if not (FP8_BLOCKS if block else FP8_WEIGHTS).runs_on(found):
        name, what = torch.cuda.get_device_name(device), "FP8 weights in blocks" if block else "FP8 weights"
        raise ConfigError(f"{what} need a GPU of compute capability 9.0; {name} has {found[0]}.{found[1]}")


def widening_source(source: WeightSource, stored: QuantScheme | None) -> WeightSource:
    """Return a source of the same tensors that also gives quantised ones as floats, to readers that expect these."""
    if isinstance(stored, Fp8Scheme):
        return WideningSource(source, stored)
    if isinstance(stored, Nvfp4Scheme):
        return Nvfp4Source(source, stored)
    return Int4Source(source, stored) if isinstance(stored, Int4Scheme) else source
