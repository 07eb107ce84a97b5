"""Products of few rows with what adapters add, against float64."""

import pytest
import torch

from roseinfer.kernels.linear.skinny import skinny_linear, skinny_linear_reference
from roseinfer.kernels.linear.skinny_configs import DirectConfig
from roseinfer.kernels.lora.slots import SlotRows
from tests.helpers.cases import cases, each_value, pairwise
from tests.helpers.skinny import CONFIGS, TOLERANCE, case, dtype_of, exact
from tests.helpers.slot_matrices import FEW_RANKS, exact_delta, slot_matrices, slots_of_rows
from tests.kernels.linear.test_skinny_fp8 import fp8_case
from tests.kernels.linear.test_skinny_pairs import CONFIGS as PAIRS

DIRECT = DirectConfig(block_n=16, block_k=512, ahead=True, max_registers=128)


def check(inputs, matrices, config=None, **options):
    """Compare rows with adapters to float64, and rows without to the product alone: the same bits, but for elementwise
    products on a GPU, which the compiler may fuse with other additions.
    """
    x, norm = inputs["x"], inputs.get("norm")
    slots = slots_of_rows(x.device, len(x), len(matrices.ranks))
    out = skinny_linear(**inputs, delta=SlotRows(slots, matrices), config=config, **options)
    alone = skinny_linear(**inputs, config=config, **options)
    base = (slots < 0) | (matrices.ranks[slots.clamp_min(0)] == 0)
    fused = x.is_cuda and not getattr(config, "dot", True)
    step = torch.finfo(out.dtype).eps if fused else 0.0
    torch.testing.assert_close(out[base], alone[base], rtol=step, atol=1e-5 if fused else 0.0)
    added = exact_delta(x, slots, matrices, norm)
    # A bias of each row's own, so that the activation follows.
    expected = torch.stack(
        [
            exact(**inputs | {"x": x[row : row + 1], "bias": _bias(inputs, added[row]), **_row(inputs, row)})[0]
            for row in range(len(x))
        ]
    )
    error = (out.double() - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert (error < TOLERANCE[out.dtype]).all(), error
    return out


def _bias(inputs, added):
    return added if inputs.get("bias") is None else inputs["bias"].double() + added


def _row(inputs, row):
    return {"residual": inputs["residual"][row : row + 1]} if "residual" in inputs else {}


@each_value(
    config=CONFIGS,
    rows=[1, 2, 7, 16],
    widths=[(40,), (37, 8, 11), (64, 32, 32)],
    norm=[None, "rms", "layer"],
    kind=["float16", "bfloat16"],
)
def test_stacked_modules_with_bias_and_residual(device, config, rows, widths, norm, kind):
    dtype = dtype_of(kind, config)
    inputs, random = case(device, rows, 96, sum(widths), dtype, norm=norm)
    inputs |= {"bias": random(sum(widths)), "residual": random(rows, sum(widths))}
    check(inputs, slot_matrices(device, 96, widths, dtype, FEW_RANKS, 16), config)


@each_value(config=CONFIGS, rows=[1, 3, 16], activation=["silu", "gelu_tanh"], kind=["float16", "bfloat16"])
def test_gate_and_up(device, config, rows, activation, kind):
    dtype = dtype_of(kind, config)
    inputs, _ = case(device, rows, 160, 19, dtype, norm="rms", gated=True)
    inputs |= {"gated": True, "activation": activation}
    check(inputs, slot_matrices(device, 160, (19, 19), dtype, FEW_RANKS, 16), config)


@each_value(config=PAIRS, rows=[1, 2], gated=[False, True], scales=["channel", "block"])
def test_weights_in_fp8_by_pairs(device, config, rows, gated, scales):
    inputs, random = fp8_case(device, rows, 256, 128, torch.bfloat16, scales, norm="rms", gated=gated)
    inputs |= {"gated": True, "activation": "silu"} if gated else {"residual": random(rows, 128)}
    widths = (128, 128) if gated else (128,)
    check(inputs, slot_matrices(device, 256, widths, torch.bfloat16, FEW_RANKS, 16), config)


@pytest.mark.parametrize("scales", ["channel", "block"])
def test_weights_in_fp8(device, scales):
    inputs, random = fp8_case(device, 5, 256, 40, torch.float16, scales)
    inputs["residual"] = random(5, 40)
    check(inputs, slot_matrices(device, 256, (20, 20), torch.float16), CONFIGS["elementwise"])


@cases("norm", ["layer"], exhaustive=["rms"])
def test_several_blocks_of_columns(device, norm):
    """Columns that a program reads before and after it waits for the input, and a part of a block."""
    inputs, _ = case(device, 3, 16400, 8, torch.float16, norm=norm)
    check(inputs, slot_matrices(device, 16400, (8,), torch.float16, FEW_RANKS, 16), CONFIGS["elementwise"])


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_large_ranks(device, config):
    inputs, _ = case(device, 5, 64, 12, dtype_of("float16", config))
    check(inputs, slot_matrices(device, 64, (12,), inputs["x"].dtype), config)


@each_value(config=CONFIGS)
def test_a_row_does_not_depend_on_the_others(device, config):
    inputs, _ = case(device, 8, 96, 24, dtype_of("bfloat16", config), norm="rms")
    x = inputs["x"]
    matrices, slots = slot_matrices(device, 96, (24,), x.dtype, FEW_RANKS, 16), slots_of_rows(device, 8, 4)
    together = skinny_linear(**inputs, delta=SlotRows(slots, matrices), config=config)
    for row in (1, 2):
        others, others_slots = torch.randn_like(x) * 100, slots.roll(1)
        others[row], others_slots[row] = x[row], slots[row]
        inputs["x"] = others
        delta = SlotRows(others_slots, matrices)
        assert torch.equal(skinny_linear(**inputs, delta=delta, config=config)[row], together[row])


def test_an_adapter_of_zeros_changes_nothing(device):
    inputs, _ = case(device, 4, 96, 24, torch.float16)
    matrices = slot_matrices(device, 96, (24,), torch.float16)
    matrices.b[:] = 0
    slots = torch.zeros(4, dtype=torch.int32, device=device)
    assert torch.equal(skinny_linear(**inputs, delta=SlotRows(slots, matrices)), skinny_linear(**inputs))


def test_reference_adds_the_same(device):
    inputs, _ = case(device, 4, 96, 24, torch.float16)
    matrices, slots = slot_matrices(device, 96, (24,), torch.float16), slots_of_rows(device, 4)
    expected = skinny_linear_reference(**inputs, delta=SlotRows(slots, matrices))
    out = skinny_linear(**inputs, delta=SlotRows(slots, matrices))
    torch.testing.assert_close(out, expected, rtol=1e-2, atol=1e-2)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="Gluon kernels need a GPU")
@pairwise(rows=[2, 8], gated=[False, True], kind=["bfloat16", "float16"], overlap=[False, True])
def test_weights_to_registers(device, rows, gated, kind, overlap):
    dtype = getattr(torch, kind)
    inputs, random = case(device, rows, 1024, 37, dtype, gated=gated)
    inputs |= {"gated": True, "activation": "silu"} if gated else {"residual": random(rows, 37)}
    check(inputs, slot_matrices(device, 1024, (37, 37) if gated else (20, 17), dtype), DIRECT, overlap=overlap)
