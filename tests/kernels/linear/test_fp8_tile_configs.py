import pytest

from roseinfer.kernels.linear.fp8_tile_configs import (
    BUCKETS,
    MAX_ROWS,
    MAX_UNMEASURED_ROWS,
    TABLE,
    choose_tile_config,
    rule,
)
from roseinfer.kernels.linear.fp8_tiles import MAX_SUMS, MAX_TILES

# Shared memory of a program on an H100 or H200, in bytes.
SHARED = 232_448
SHAPES = [(6144, 4096), (4096, 12288), (24576, 4096), (896, 896), (128, 128), (1024, 3072), (4096, 1664)]


def cdiv(a, b):
    return -(-a // b)


def possible_choices():
    """Yield each config that may be chosen, with its shape."""
    for bucket in BUCKETS:
        for outs, columns in SHAPES:
            yield from (
                ((bucket, outs, columns, blocks), rule(bucket, outs, columns, blocks)) for blocks in (False, True)
            )
    yield from TABLE.entries.items()


@pytest.mark.parametrize(
    ("shape", "config"), [(shape, config) for shape, config in possible_choices() if config is not None]
)
def test_a_config_fits_its_shape_and_the_hardware(shape, config):
    bucket, outs, columns, blocks = shape
    assert columns % (config.block_k * config.shares) == 0 and (config.block_k == 128 or not blocks)
    assert config.block_m >= (16 if config.weight_first else 64) and config.block_n >= 64
    held = columns // config.shares if config.ahead else config.block_k * config.stages
    assert (config.block_m + config.block_n) * held + 4 * config.block_m * config.block_n < SHARED
    assert config.weight_first or not config.ahead
    if config.shares > 1:
        tiles = cdiv(bucket, config.block_m) * cdiv(outs, config.block_n)
        assert tiles <= MAX_TILES and tiles * config.block_m * config.block_n * config.shares <= MAX_SUMS


@pytest.mark.parametrize("blocks", [False, True])
def test_shapes_left_to_the_library(blocks):
    assert choose_tile_config(MAX_UNMEASURED_ROWS, 1024, 1024, blocks=blocks) is not None
    assert choose_tile_config(MAX_UNMEASURED_ROWS + 1, 1024, 1024, blocks=blocks) is None
    for outs, columns in SHAPES:
        assert choose_tile_config(MAX_ROWS + 1, outs, columns, blocks=blocks) is None
    assert choose_tile_config(0, 1024, 1024, blocks=blocks) is None
    assert choose_tile_config(8, 1024, 1040, blocks=blocks) is None, "no whole groups of columns"


def test_a_size_of_batch_is_padded_to_a_graphs_without_another_kernel():
    """A replayed step must not differ from a launched one."""
    for rows, captured in ((5, 8), (17, 24), (33, 40), (65, 72), (130, 160), (187, 192), (193, 200)):
        chosen = {choose_tile_config(n, 4096, 4096, blocks=False) for n in (rows, captured)}
        assert len(chosen) == 1 and None not in chosen


@pytest.mark.parametrize("outs", [5120, 16384, 34816])
def test_programs_with_many_stages_run_at_once(outs):
    """Blocks of an H200: more stages than four only where four would not let more programs run."""
    config = rule(16, outs, 5120, True)
    held = (config.block_m + config.block_n) * config.block_k * config.stages
    programs = cdiv(outs, config.block_n) * config.shares
    assert programs <= 132 * (SHARED // held)
    assert config.stages == (4 if outs == 34816 else 8)
