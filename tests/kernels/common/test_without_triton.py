"""Modules of kernels on systems without Triton, where only the reference functions are used."""

import subprocess
import sys

IMPORT_ALL = """
import importlib, pkgutil, sys
sys.modules["triton"] = None
import roseinfer.kernels
for module in pkgutil.walk_packages(roseinfer.kernels.__path__, "roseinfer.kernels."):
    importlib.import_module(module.name)
    print(module.name)
"""


def test_every_module_is_imported() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORT_ALL], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert {"roseinfer.kernels.delta.scan_bulk", "roseinfer.kernels.linear.int4_bulk"} <= set(done.stdout.split())
