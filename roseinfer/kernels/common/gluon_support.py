"""Optional import of Gluon, Triton's language for kernels that program each warp.

Importing its modules takes a while. Therefore only Gluon kernels import this module, and only their launchers import
them.
"""

from types import SimpleNamespace
from typing import Any

from roseinfer.kernels.common.triton_support import HAS_TRITON, tl, unavailable

gluon: Any
gl: Any
ampere: Any
hopper: Any
BulkDescriptor: Any
# All threads of a group of warps wait for each other.
thread_barrier: Any = None
HAS_GLUON = False

if HAS_TRITON:
    try:
        from triton.experimental import gluon
        from triton.experimental.gluon import language as gl
        from triton.experimental.gluon.language.nvidia import ampere, hopper
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as BulkDescriptor

        thread_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier  # since Triton 3.7
        HAS_GLUON = True
    except ImportError:  # Gluon is not yet a stable part of Triton
        pass

if not HAS_GLUON:
    gluon = SimpleNamespace(jit=unavailable)
    layouts = dict.fromkeys(("NVMMASharedLayout", "DistributedLinearLayout"), lambda *_: None)
    gl = SimpleNamespace(constexpr=getattr(tl, "constexpr", None), **layouts)
    ampere = SimpleNamespace(mma_v2=None)
    hopper = SimpleNamespace(mbarrier=None, tma=None)
    BulkDescriptor = None
