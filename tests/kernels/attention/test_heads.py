from dataclasses import replace

import pytest
import torch

from roseinfer.attention.heads import HeadNorms, HeadTransform
from roseinfer.attention.rope import Rotary, default_frequencies, rotate
from roseinfer.attention.rope_spec import QueryScale
from roseinfer.attention.store_qkv import turn_qk
from roseinfer.kernels.attention.heads import (
    HeadPreparation,
    cos_sin_table,
    store_heads,
    store_heads_reference,
    turn_heads,
    turn_heads_reference,
)
from tests.helpers.attention import spec_of, store_of
from tests.helpers.cases import each_value, pairwise

TOLERANCE = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.bfloat16: {"rtol": 8e-3, "atol": 1e-3},
    torch.float16: {"rtol": 1e-3, "atol": 1e-3},
}
BLOCK_SIZE = 16
# heads, kv_heads, head_dim, rotary, norm
SHAPES = [
    (12, 12, 64, False, False),
    (16, 8, 128, True, True),
    (32, 2, 128, True, False),
    (5, 1, 80, True, True),
    (3, 3, 96, False, True),
    (8, 4, 256, True, True),
    (20, 1, 64, True, False),
]


class Case:
    def __init__(self, shape, tokens, dtype, device, kv_dtype=None):
        """kv_dtype: the dtype of K and V in the cache, if another; codes have a scale for each KV head."""
        self.heads, self.kv_heads, self.head_dim, rotary, norm = shape
        width = (self.heads + 2 * self.kv_heads) * self.head_dim
        self.qkv = torch.full((tokens, width + 16), torch.nan, dtype=dtype, device=device)[:, :width]
        self.qkv.copy_(torch.randn(tokens, width, device=device))
        self.store = store_of(6, 2, BLOCK_SIZE, self.kv_heads, self.head_dim, kv_dtype or dtype, device)
        slots = torch.randperm(6 * BLOCK_SIZE)[:tokens]
        slots[1::3] = -1
        self.slots = slots.to(device)
        self.positions = torch.randint(0, 4000, (tokens,)).to(device)
        table = cos_sin_table(default_frequencies(self.head_dim, 1e4), 4000).to(device)
        weights = [torch.randn(self.head_dim, device=device).to(dtype) if norm else None for _ in range(2)]
        angles = table if rotary else None
        self.preparation = HeadPreparation(angles, angles, None, *weights, 1e-6)
        scales = [0.1 + torch.rand(self.kv_heads, device=device) for _ in range(2)]
        self.kv_scales = None if kv_dtype is None else tuple(scales)

    def run(self, function):
        """Return qkv and the store's data afterwards."""
        qkv, data = self.qkv.clone(), self.store.data.clone()
        function(
            qkv,
            self.heads,
            self.kv_heads,
            self.head_dim,
            data[:, 1, 0],
            data[:, 1, 1],
            self.slots,
            self.positions,
            self.preparation,
            self.kv_scales,
        )
        return qkv, data


@each_value(shape=SHAPES, dtype=list(TOLERANCE))
def test_heads(shape, dtype, device):
    case = Case(shape, 7, dtype, device)
    for ours, expected in zip(case.run(store_heads), case.run(store_heads_reference), strict=True):
        torch.testing.assert_close(ours, expected, **TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_weights_may_be_wider(dtype, device):
    """Take weights of a norm in float32, where an offset is added to them."""
    case = Case((4, 2, 256, True, True), 7, dtype, device)
    wide = [1.0 + torch.randn(256, device=device) for _ in range(2)]
    case.preparation = replace(case.preparation, q_weight=wide[0], k_weight=wide[1])
    for ours, expected in zip(case.run(store_heads), case.run(store_heads_reference), strict=True):
        torch.testing.assert_close(ours, expected, **TOLERANCE[dtype])


def test_only_queries_and_named_slots_change(device):
    case = Case((4, 2, 64, True, True), 5, torch.float32, device)
    case.store.data.fill_(torch.nan)
    qkv, data = case.run(store_heads)
    assert torch.equal(qkv[:, 4 * 64 :], case.qkv[:, 4 * 64 :])
    assert not torch.equal(qkv[:, : 4 * 64], case.qkv[:, : 4 * 64])
    written = ~data.isnan().any(-1).any(-1)  # [blocks, layers, 2, block_size]
    slots = case.slots[case.slots >= 0]
    expected = torch.zeros_like(written)
    expected[slots // BLOCK_SIZE, 1, :, slots % BLOCK_SIZE] = True
    assert torch.equal(written, expected)


def test_one_token_and_none(device):
    for tokens in (0, 1):
        case = Case((4, 2, 64, True, False), tokens, torch.float32, device)
        for ours, expected in zip(case.run(store_heads), case.run(store_heads_reference), strict=True):
            torch.testing.assert_close(ours, expected)


def test_without_rotary_and_norm_queries_are_not_touched(device):
    case = Case((4, 4, 64, False, False), 3, torch.bfloat16, device)
    qkv, _ = case.run(store_heads)
    assert torch.equal(qkv, case.qkv)


def test_the_table_turns_as_the_rotary_layer_does(device):
    case = Case((4, 2, 80, True, False), 6, torch.float32, device)
    qkv, _ = case.run(store_heads)
    rotary = Rotary(default_frequencies(80, 1e4).to(device), 4000)
    query = case.qkv[:, : 4 * 80].unflatten(-1, (4, 80))
    expected = rotate(query, rotary.angles(case.positions)).flatten(1)
    torch.testing.assert_close(qkv[:, : 4 * 80], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("group", "num_warps"), [(1, 1), (2, 2), (16, 8)])
def test_any_division_of_the_work_gives_the_same(group, num_warps, device):
    case = Case((12, 3, 64, True, True), 4, torch.float32, device)
    expected = case.run(store_heads)
    varied = case.run(lambda *args: store_heads(*args, group=group, num_warps=num_warps))
    for ours, theirs in zip(varied, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


@pairwise(rotated=[24, 80], interleaved=[False, True], norm_after=[False, True])
def test_other_pairs_of_a_head(rotated, interleaved, norm_after, device):
    case = Case((6, 2, 80, True, True), 5, torch.float32, device)
    rotary = Rotary(
        default_frequencies(rotated, 1e4).to(device),
        4000,
        80,
        interleaved=interleaved,
        magnitude=1.3,
        query_scale=QueryScale(beta=0.5, original_max_position=100),
    )
    rotary.make_tables(4000)
    old = case.preparation
    case.preparation = HeadPreparation(
        rotary.queries_cos_sin, rotary.cos_sin, rotary.pairs, old.q_weight, old.k_weight, 1e-6, norm_after
    )
    for ours, expected in zip(case.run(store_heads), case.run(store_heads_reference), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
    qkv, _ = case.run(store_heads)
    both = torch.cat((old.q_weight.expand(6, -1), old.k_weight.expand(2, -1)))
    transform = HeadTransform(spec_of(6, 2, 80), HeadNorms(old.q_weight, old.k_weight, both, 1e-6, norm_after), rotary)
    queries, _, _ = transform.split(case.qkv, case.positions)
    torch.testing.assert_close(qkv[:, : 6 * 80], queries.flatten(1), rtol=1e-4, atol=1e-4)


@each_value(shape=[shape for shape in SHAPES if shape[3] or shape[4]], dtype=list(TOLERANCE))
def test_heads_turned_in_place(shape, dtype, device):
    case = Case(shape, 7, dtype, device)
    arguments = (case.heads, case.head_dim, case.positions, case.preparation)
    ours, expected = case.qkv.clone(), case.qkv.clone()
    turn_heads(ours, *arguments)
    turn_heads_reference(expected, *arguments)
    torch.testing.assert_close(ours, expected, **TOLERANCE[dtype])
    assert torch.equal(ours[:, case.heads * case.head_dim :], case.qkv[:, case.heads * case.head_dim :])


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("scale", [None, QueryScale(beta=0.5, original_max_position=100)])
def test_queries_and_keys_are_turned_as_on_a_cpu(scale, norm, device):
    case = Case((6, 2, 80, True, norm), 5, torch.float32, device)
    rotary = Rotary(default_frequencies(80, 1e4).to(device), 4000, 80, query_scale=scale)
    rotary.make_tables(4000)
    norms = None
    if norm:
        query, key = case.preparation.q_weight, case.preparation.k_weight
        norms = HeadNorms(query, key, torch.cat((query.expand(6, -1), key.expand(2, -1))), 1e-6)
    heads = HeadTransform(spec_of(6, 2, 80), norms, rotary)
    ours = case.qkv.clone()
    turn_qk(ours, heads, case.positions)
    expected = torch.cat([part.flatten(1) for part in heads.split(case.qkv.contiguous(), case.positions)], 1)
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


def test_no_tokens_are_turned(device):
    case = Case((4, 2, 64, True, False), 0, torch.float32, device)
    turn_heads(case.qkv, 4, 64, case.positions, case.preparation)
