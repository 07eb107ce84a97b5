"""Kernel tests run on a GPU if there is one, else on the CPU under Triton's interpreter (see tests/conftest.py).

A tensor that is allocated without being filled starts as NaN, or as the largest integer. So an output that a kernel
does not write everywhere fails its comparison.
"""

import warnings

import pytest
import torch

from roseinfer.kernels.common.triton_support import HAS_TRITON
from tests.helpers.interpreter import hurry


@pytest.fixture(autouse=True)
def _needs_triton():
    if not HAS_TRITON:
        pytest.skip("Triton is not installed")


@pytest.fixture(autouse=True)
def _poisoned_memory():
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)  # what makes torch fill new memory
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*deterministic")
        yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])


@pytest.fixture(autouse=True)
def _interpreter():
    hurry()


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
