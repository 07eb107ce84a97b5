"""The script for a memory checker, at small sizes."""

import pytest
import torch

from roseinfer.kernels.common.triton_support import HAS_TRITON
from tests.helpers.cases import cases
from tests.runner.test_cuda_inputs import HostStaging

if not HAS_TRITON:
    pytest.skip("Triton is not installed", allow_module_level=True)

from roseinfer.runner import cuda_inputs
from roseinfer.state.delta_spec import DeltaSpec
from tests.kernels import memcheck
from tests.kernels.memcheck import PARTS, Heads, Sizes, gpt_oss_experts, qwen3_experts

pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value)")  # the interpreter's exponentials
SMALL = Sizes(
    rows=4,
    longest=32,
    mixed=(24,),
    heads=(Heads(4, 2, 16, True), Heads(2, 2, 8, False, 10)),
    vocab=300,
    linears=((24, 128, False, (1, 3)), (256, 128, True, (2,))),
    eight=((64, 384, (1, 17)),),
    mixture=(qwen3_experts(3, 2, 128, 128), (1, 20)),
    packed=(gpt_oss_experts(3, 2, 96), (1, 20)),
    wide=(2, 96),
    delta=DeltaSpec(key_heads=1, value_heads=2, key_dim=16, value_dim=16, taps=4),
    dtype=torch.float16,
    ranks=(8, 16),
    adapted=(20,),
)


@cases("part", ["products"], exhaustive=[part for part in PARTS if part != "products"])
def test_parts(part, device, monkeypatch, capsys):
    if device.type == "cpu":
        monkeypatch.setattr(cuda_inputs, "Staging", HostStaging)
    memcheck.main([part], SMALL, device.type)
    assert capsys.readouterr().out == f"{part}: launched\n"
