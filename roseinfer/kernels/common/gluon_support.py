"""Optional import of Gluon, Triton's language for kernels that program each warp.

Importing its modules takes a while. Therefore only Gluon kernels import this module, and only their launchers import
them.
"""

from types import SimpleNamespace
from typing import Any

from roseinfer.kernels.common.triton_support import HAS_TRITON, tl

gluon: Any
gl: Any
ampere: Any
hopper: Any
BulkDescriptor: Any
HAS_GLUON = False

if HAS_TRITON:
    try:
        from triton.experimental import gluon
        from triton.experimental.gluon import language as gl
        from triton.experimental.gluon.language.nvidia import ampere, hopper
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as BulkDescriptor

        HAS_GLUON = True
    except ImportError:  # Gluon is not yet a stable part of Triton
        pass

if not HAS_GLUON:
    gluon = SimpleNamespace(jit=lambda function: function)
    gl = SimpleNamespace(constexpr=getattr(tl, "constexpr", None), NVMMASharedLayout=lambda *_: None)
    ampere = SimpleNamespace(mma_v2=None)
    hopper = SimpleNamespace(mbarrier=None, tma=None)
    BulkDescriptor = None
