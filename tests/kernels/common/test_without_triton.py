"""Systems without Triton, where only the reference functions of kernels are used, and with one that does not work."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from roseinfer.core.errors import ResourceError
from roseinfer.kernels.common.availability import has_triton

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


def test_a_triton_that_does_not_work_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Otherwise the first kernel ends in "'function' object is not subscriptable"."""
    (tmp_path / "triton.py").write_text("raise ImportError('built for another Python')")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.partition(".")[0] == "triton"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ResourceError, match=r"cannot be imported.*uninstall it.*built for another Python"):
        has_triton(torch.device("cuda"))
    assert not has_triton(torch.device("cpu"))
