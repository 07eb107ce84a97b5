"""Programs that servers start, imported by a fresh interpreter: tests fork them from one that has imported them all."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["roseinfer.server.workers.worker", "roseinfer.cluster.remote.engine_process"])
def test_a_program_imports_what_it_needs(module: str, executed: None) -> None:
    subprocess.run([sys.executable, "-c", f"import {module}"], check=True, timeout=120)
