"""Build of the optional compiled functions for CPUs; everything else about the package is in pyproject.toml.

Without a C compiler they are left out, as they are with ROSEINFER_EXTENSION=0, for a wheel that suits any machine.
"""

import os

from setuptools import Extension, setup

EXTENSION = Extension(
    "roseinfer.kernels.cpu._rows",
    ["roseinfer/kernels/cpu/rows.c"],
    # Contracted operations would round differently from PyTorch's operators.
    extra_compile_args=["-O3", "-ffp-contract=off", "-pthread"],
    extra_link_args=["-pthread"],
    py_limited_api=True,
    optional=True,
)

if os.environ.get("ROSEINFER_EXTENSION") == "0":
    setup()
else:
    setup(ext_modules=[EXTENSION], options={"bdist_wheel": {"py_limited_api": "cp311"}})
