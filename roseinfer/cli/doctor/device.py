"""Print what PyTorch can do here as a line of JSON: `python -m roseinfer.cli.doctor.device`.

`ask_torch` runs it in a separate process, so that a broken installation or driver cannot take the doctor down.
"""

import json
import time
from typing import Any

MATRIX_ROWS = 1024  # size of the matrices of the CPU product
MAX_REPEATS = 4


def main() -> None:
    import torch

    from roseinfer.kernels.cpu import native
    from roseinfer.quant.int8_product import unsupported_reason

    said: dict[str, Any] = {"version": torch.__version__, "cuda": torch.version.cuda, "gpus": []}
    said["threads"] = torch.get_num_threads()
    said["cpu_gflops"] = _cpu_gflops()
    said["cpu_functions"] = native.instructions()
    said["int8"] = unsupported_reason() is None
    said["triton"] = _triton()
    if torch.version.cuda is not None:
        said |= _gpus()
    print(json.dumps(said), flush=True)


def _cpu_gflops() -> float:
    """Return the best of a few products."""
    import torch

    x = torch.ones(MATRIX_ROWS, MATRIX_ROWS)
    best_s = float("inf")
    for _ in range(MAX_REPEATS):
        began = time.perf_counter()
        torch.mm(x, x)
        best_s = min(best_s, time.perf_counter() - began)
    return 2 * MATRIX_ROWS**3 / best_s / 1e9


def _triton() -> str | None:
    from roseinfer.kernels.common.triton_support import HAS_TRITON, triton

    return str(triton.__version__) if HAS_TRITON else None


def _gpus() -> dict[str, Any]:
    """Return each GPU's properties, and an error if the first cannot compute."""
    import torch

    try:
        if not torch.cuda.is_available():
            torch.cuda.init()  # the message says why not
            return {"gpu_error": "PyTorch finds no GPU"}
        gpus = [_gpu(number) for number in range(torch.cuda.device_count())]
        torch.ones(8, device="cuda").sum().item()
    except Exception as error:
        return {"gpu_error": _first_line(error)}
    return {"gpus": gpus, "driver": _driver(), "kernel_error": _kernel_error()}


def _gpu(number: int) -> dict[str, Any]:
    import torch

    free, total = torch.cuda.mem_get_info(number)
    return {
        "name": torch.cuda.get_device_name(number),
        "capability": torch.cuda.get_device_capability(number),
        "total_bytes": total,
        "free_bytes": free,
    }


def _driver() -> str | None:
    """Return the newest CUDA version that the driver supports."""
    import ctypes

    version = ctypes.c_int()
    try:
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)):
            return None
    except OSError:
        return None
    return f"{version.value // 1000}.{version.value % 1000 // 10}"


def _kernel_error() -> str | None:
    """Return the error of one of our kernels on the first GPU; None if it works."""
    import torch

    if _triton() is None:
        return None
    try:
        from roseinfer.kernels.linear.norm import rms_norm

        x = torch.arange(1.0, 129.0, device="cuda").reshape(2, 64)
        expected = x / (x.square().mean(dim=1, keepdim=True) + 1e-5).sqrt()
        if not torch.allclose(rms_norm(x, torch.ones(64, device="cuda"), 1e-5), expected, rtol=1e-4, atol=1e-4):
            return "a kernel's result differs from PyTorch's"
    except Exception as error:
        return _first_line(error)
    return None


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"


if __name__ == "__main__":
    main()
