"""The compiler takes the kernels, which tests otherwise interpret where there is no GPU, and forks compile ahead."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from roseinfer.kernels.common.gluon_support import HAS_GLUON

pytestmark = pytest.mark.skipif(not HAS_GLUON, reason="needs Triton with Gluon")


def compiled(program: str, cache: Path) -> list[str]:
    """Return what a program prints that does not interpret kernels."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)}
    command = [sys.executable, "-c", f"from tests.kernels import compiles, compiles_ahead; {program}"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


def test_the_compiler_takes_every_kernel_and_forks_compile_launches(tmp_path: Path) -> None:
    """One process does both, since importing Triton takes long.

    Forks compile two kernels, one of them twice, which are not run, and one that does not compile, which fails only
    when it is used.
    """
    printed = compiled("compiles.main(everything=False); compiles_ahead.main()", tmp_path)
    assert printed == ["True 2 True 64.0", str([("double", True)] * 2)]


@pytest.mark.exhaustive
def test_the_compiler_takes_every_form(tmp_path: Path) -> None:
    assert compiled("compiles.main(everything=True)", tmp_path) == []
