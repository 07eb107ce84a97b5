"""Products of some rows by four bits in bulk: on a Hopper GPU against float64, else what a CPU can check."""

import pytest
import torch

from roseinfer.kernels.common.gluon_support import HAS_GLUON
from roseinfer.kernels.linear.fp8_tiles import Parts
from roseinfer.kernels.linear.int4_bulk import bulk_supports, int4_bulk_product
from roseinfer.kernels.linear.int4_bulk_configs import BUCKETS, TABLE, BulkConfig, choose_bulk_config
from roseinfer.kernels.linear.int4_product import Int4Factor, Int4Workspace
from tests.helpers.cases import pairwise
from tests.helpers.int4 import NVFP4, four_bits_case
from tests.helpers.skinny import assert_close, exact

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9

needs_gluon = pytest.mark.skipif(not HAS_GLUON, reason="needs Triton with Gluon")
needs_hopper = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
CONFIGS = {
    "one group": BulkConfig(16, 1, 1, 1, 8, 8, 64),
    "groups in turn": BulkConfig(16, 1, 2, 2, 8, 8, 80),
    "shares": BulkConfig(64, 1, 1, 2, 3, 6, 64),
    "two groups": BulkConfig(128, 2, 1, 2, 3, 6),
    "three": BulkConfig(64, 3, 1, 1, 4, 4),
    "four": BulkConfig(32, 2, 2, 1, 4, 6),
    "four in turn": BulkConfig(64, 1, 4, 1, 4, 8),
    "many rows": BulkConfig(256, 2, 1, 1, 2, 4),
}


def draw(device, dtype, *shape):
    return torch.randn(shape).to(dtype).to(device)


@needs_hopper
@pairwise(
    config=CONFIGS,
    group=[NVFP4, 32, 64, 128, 0],
    symmetric=[False, True],
    dtype=[torch.bfloat16, torch.float16],
    size={"few": (13, 512, 200), "some": (300, 3584, 384), "a block's end": (64, 1968, 320)},
    extra=[None, "bias", "residual"],
)
def test_products(device, config, group, symmetric, dtype, size, extra):
    rows, columns, outs = size
    if columns % (group or columns):
        group = 0
    weight, wide = four_bits_case(device, outs, columns, group or columns, symmetric=symmetric)
    x = draw(device, dtype, rows, columns)
    options = {} if extra is None else {extra: draw(device, dtype, *((outs,) if extra == "bias" else (rows, outs)))}
    expected = exact(x, wide, **options)
    assert_close(int4_bulk_product(x, weight, config, Parts.allocate(device), **options), expected)


@needs_hopper
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("group", [NVFP4, 128])
def test_a_row_does_not_depend_on_the_others(device, config, group):
    """Nor on the time: the units read a block while the next one is widened."""
    weight, _ = four_bits_case(device, 4096, 4096, group)
    x, parts = draw(device, torch.bfloat16, 200, 4096), Parts.allocate(device)
    together = int4_bulk_product(x, weight, config, parts)
    other = draw(device, torch.bfloat16, 200, 4096) * 100
    other[5] = x[5]
    assert torch.equal(int4_bulk_product(other, weight, config, parts)[5], together[5])
    assert all(torch.equal(int4_bulk_product(x, weight, config, parts), together) for _ in range(5))


@needs_hopper
@pytest.mark.parametrize(("bucket", "outs", "columns"), TABLE.entries)
def test_measured_configs_are_right_each_time(device, bucket, outs, columns):
    """Leave rows of a tile out: their copies are done earlier than others, so that copies overtake each other."""
    weight, wide = four_bits_case(device, outs, columns, NVFP4)
    factor = Int4Factor(weight, Int4Workspace.allocate(torch.device(device)))
    for rows in (bucket // 2 + 1, 9 * bucket // 16):
        x = draw(device, torch.bfloat16, rows, columns)
        first = factor(x)
        assert_close(first, exact(x, wide))
        assert all(torch.equal(factor(x), first) for _ in range(200))


def test_groups_of_warps_do_not_share_stages():
    for stages in ((6, 12), (4, 6)):
        with pytest.raises(ValueError, match=f"4 groups cannot share {stages[0]} and {stages[1]} stages"):
            BulkConfig(64, 1, 4, 2, *stages)


@needs_hopper
@pytest.mark.parametrize("rows", BUCKETS)
def test_a_graph_has_the_results_of_single_launches(device, rows):
    """Products that start while the one before ends, as layers do, with all kernels that rows of a step may take."""
    weights = [four_bits_case(device, 4096, 4096, 128)[0] for _ in range(3)]
    workspace = Int4Workspace.allocate(torch.device(device))
    factors = [Int4Factor(weight, workspace) for weight in weights]
    x = draw(device, torch.bfloat16, rows, 4096) * 0.1

    def chain():
        y = x
        for factor in factors:
            y = factor(y, residual=y.clone())
        return y

    expected = chain()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = chain()
    for _ in range(3):
        found.fill_(float("nan"))
        graph.replay()
        assert torch.equal(found, expected)


@needs_gluon
def test_what_it_supports(device):
    assert bulk_supports(four_bits_case(device, 64, 256, 64)[0]) is HOPPER
    assert not bulk_supports(four_bits_case(device, 66, 256, 64)[0]), "rows of scales begin at multiples of 16 bytes"


def test_configs_fit_the_kernel():
    shapes = [(64, 96), (4096, 4096), (24576, 4096), (3584, 18944), *{shape[1:] for shape in TABLE.entries}]
    for outs, columns in shapes:
        for bucket in BUCKETS:
            config = choose_bulk_config(bucket, outs, columns)
            if config is None:
                continue
            blocks = -(-columns // 128)
            groups = config.out_groups * config.column_groups
            memory = config.x_stages * config.block_m * 256 + config.w_stages * config.out_groups * (4096 + 1024)
            memory += (groups - config.out_groups) * config.block_m * 256
            assert blocks % (config.shares * config.column_groups) == 0 and memory < 220_000 and 1 <= groups <= 4
    assert choose_bulk_config(BUCKETS[-1] + 1, 4096, 4096) is None
