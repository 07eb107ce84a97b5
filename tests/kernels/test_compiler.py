"""The compiler takes the kernels, which tests otherwise interpret where there is no GPU."""

import os
import subprocess
import sys

import pytest

from roseinfer.kernels.common.gluon_support import HAS_GLUON
from tests.helpers.cases import cases


@pytest.mark.skipif(not HAS_GLUON, reason="needs Triton with Gluon")
@cases("arguments", [[]], exhaustive=[["everything"]])
def test_the_compiler_takes_every_kernel(arguments):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.compiles", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
