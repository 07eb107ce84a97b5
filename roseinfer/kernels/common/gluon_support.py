"""The one place that knows whether Gluon is there, Triton's language for kernels that say what each warp does.

Its modules take a while to import, so that only kernels in it import this, and only those who launch them import these.
"""

from types import SimpleNamespace
from typing import Any

from roseinfer.kernels.common.triton_support import HAS_TRITON, tl

gluon: Any
gl: Any
hopper: Any
BulkDescriptor: Any
HAS_GLUON = False

if HAS_TRITON:
    try:
        from triton.experimental import gluon
        from triton.experimental.gluon import language as gl
        from triton.experimental.gluon.language.nvidia import hopper
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as BulkDescriptor

        HAS_GLUON = True
    except ImportError:  # it is not yet a stable part of Triton
        pass

if not HAS_GLUON:
    gluon = SimpleNamespace(jit=lambda function: function)
    gl = SimpleNamespace(constexpr=getattr(tl, "constexpr", None), NVMMASharedLayout=lambda *_: None)
    hopper = SimpleNamespace(mbarrier=None, tma=None)
    BulkDescriptor = None
