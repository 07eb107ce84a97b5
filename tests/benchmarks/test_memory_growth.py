"""An engine that kept a kernel for every number of rows would grow without bound."""

import os
import re
import subprocess
import sys

import pytest

from roseinfer.core.cpu_settings import KEPT_KERNELS, prepare_cpu_libraries

CAPACITIES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "DNNL_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")


@pytest.mark.exhaustive
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads resident memory from /proc")
def test_new_prompt_lengths_do_not_make_the_engine_grow() -> None:
    """60 new lengths add about 45 MB; 150 MB if the libraries keep all kernels."""
    command = [sys.executable, "-m", "benchmarks.memory_growth", "tiny", "--new", "60", "--longest", "200"]
    clean = {name: value for name, value in os.environ.items() if name not in CAPACITIES}
    done = subprocess.run(command, env=clean, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    found = re.search(r"growth over 60 new lengths after the first 40: (-?\d+) MB", done.stdout)
    assert found is not None, done.stdout
    assert int(found[1]) < 95


def test_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"DNNL_PRIMITIVE_CACHE_CAPACITY": "500"}
    monkeypatch.setattr(os, "environ", given)
    prepare_cpu_libraries()
    assert "ONEDNN_PRIMITIVE_CACHE_CAPACITY" not in given
    assert given["LRU_CACHE_CAPACITY"] == KEPT_KERNELS
    given["LRU_CACHE_CAPACITY"] = "77"
    prepare_cpu_libraries()
    assert given["LRU_CACHE_CAPACITY"] == "77"
