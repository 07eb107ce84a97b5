"""One layer's decode in one launch against its two steps: on a GPU where there is one, else interpreted."""

import pytest
import torch

from roseinfer.kernels.attention.decode import decode_attention_reference
from roseinfer.kernels.attention.decode_few import MAX_ROWS, FewWorkspace, decode_few, few_pays
from roseinfer.kernels.attention.heads import HeadPreparation, RotatedPairs, cos_sin_table, store_heads_reference
from tests.helpers.cases import cases
from tests.helpers.interpreter import round_codes
from tests.helpers.paged import PagedCase, assert_near, hide_before, paged_case, with_sinks

CONTEXTS = (1, 17, 64, 65, 300)


@pytest.fixture(autouse=True)
def _interpreter() -> None:
    round_codes()


class Layer:
    """Rows whose last token's key and value are not stored yet, and the transformation of heads."""

    def __init__(self, case: PagedCase, *, llama: bool, window: int = 0, skips_first: bool = False) -> None:
        self.case, self.window, self.skips_first = case, window, skips_first
        self.rows, self.heads, self.dim = case.q.shape
        self.kv_heads = case.k_cache.shape[2]
        device, dtype = case.q.device, case.q.dtype
        self.qkv = torch.randn(self.rows, (self.heads + 2 * self.kv_heads) * self.dim, device=device).to(dtype)
        last = case.context_len.long() - 1
        size = case.k_cache.shape[1]
        blocks = torch.stack(
            [case.tables[row, at // size] for row, at in zip(case.table_rows.long(), last, strict=True)]
        )
        self.slots = blocks.long() * size + last % size
        frequencies = 1e4 ** (-torch.arange(self.dim // 2, device=device) / self.dim)
        self.preparation = HeadPreparation()
        if llama:
            weights = [torch.rand(self.dim, device=device).to(dtype) + 0.5 for _ in range(2)]
            angles = cos_sin_table(frequencies, 512)
            self.preparation = HeadPreparation(angles, angles, None, *weights, 1e-6)

    def expected(self) -> torch.Tensor:
        case, qkv = self.case, self.qkv.clone()
        heads = self.heads, self.kv_heads, self.dim
        turning = self.slots, case.context_len.long() - 1, self.preparation
        store_heads_reference(qkv, *heads, case.k_cache, case.v_cache, *turning, case.kv_scales)
        q = qkv[:, : self.heads * self.dim].view(case.q.shape)
        paged = case.k_cache, case.v_cache, case.tables, case.table_rows, case.context_len
        options = (case.scale, self.window, case.kv_scales)
        return decode_attention_reference(q, *paged, *options, skips_first=self.skips_first, sinks=case.sinks)

    def run(self, workspace: FewWorkspace) -> torch.Tensor:
        case = self.case
        case.out.fill_(float("nan"))
        paged = case.k_cache, case.v_cache, case.tables, case.table_rows, case.context_len
        turning = self.slots, self.preparation
        rest = case.out, case.scale, workspace, self.window, case.kv_scales, case.sinks
        decode_few(self.qkv, *paged, *turning, *rest, skips_first=self.skips_first)
        return case.out


def layer_of(contexts, heads, kv_heads, dim, block_size, dtype, device, *, codes=False, **more) -> Layer:
    rows = [(context - 1, 1) for context in contexts]
    return Layer(paged_case(rows, heads, kv_heads, dim, block_size, dtype, device, codes=codes), **more)


def workspace_of(layer: Layer, parts: int) -> FewWorkspace:
    """Return a workspace that divides contexts into at most `parts` parts."""
    processors = -(-parts * layer.rows * layer.kv_heads // 4)
    return FewWorkspace.allocate(layer.heads, layer.kv_heads, layer.dim, processors, layer.qkv.device)


@cases(
    ("heads", "kv_heads", "dim", "llama", "block_size", "window", "codes", "parts", "dtype"),
    [
        (3, 1, 80, True, 32, 33, False, 4, torch.float32),
        (2, 2, 64, False, 1, 0, True, 3, torch.float16),
        (17, 1, 16, False, 16, 70, True, 2, torch.float32),
    ],
    exhaustive=[
        (8, 2, 128, True, 16, 0, False, 4, torch.float16),
        (8, 2, 128, True, 16, 0, True, 1, torch.bfloat16),
        (4, 1, 256, True, 16, 40, False, 2, torch.float16),
    ],
)
def test_one_launch_is_two(heads, kv_heads, dim, llama, block_size, window, codes, parts, dtype, device) -> None:
    layer = layer_of(CONTEXTS, heads, kv_heads, dim, block_size, dtype, device, codes=codes, llama=llama, window=window)
    workspace = workspace_of(layer, parts)
    caches = layer.case.k_cache, layer.case.v_cache
    before = [cache.clone() for cache in caches]
    # Twice, the second time with the workspace that the first launch left.
    found = [layer.run(workspace).clone() for _ in range(2)]
    stored = [cache.clone() for cache in caches]
    for cache, was in zip(caches, before, strict=True):
        cache.view(torch.uint8).copy_(was.view(torch.uint8))
    expected = layer.expected()
    assert_near(found[0], expected, 4)  # norm and rotation may round to the next code
    assert torch.equal(found[0], found[1]) and not workspace.arrived.any()
    for ours, theirs in zip(stored, caches, strict=True):
        assert torch.equal(ours.float().isnan(), theirs.float().isnan())
        torch.testing.assert_close(
            ours.float(), theirs.float(), rtol=0.14 if codes else 1e-2, atol=1e-2, equal_nan=True
        )


@pytest.mark.parametrize(("window", "codes", "parts"), [(0, False, 1), (0, True, 4), (128, False, 4)])
def test_sinks(window, codes, parts, device) -> None:
    """The parts of a row add its sinks once."""
    layer = layer_of((1, 128, 129, 300), 6, 2, 16, 16, torch.float32, device, codes=codes, llama=True, window=window)
    layer.case = with_sinks(layer.case)
    assert_near(layer.run(workspace_of(layer, parts)), layer.expected(), 4)


@cases("parts", [16], exhaustive=[2])
def test_more_parts_than_tiles_and_as_many_rows_as_there_may_be(parts, device) -> None:
    contexts = (1, 2, 64, 65, 66, 129, 1, 200, *range(30, 54))
    layer = layer_of(contexts, 4, 2, 16, 16, torch.float32, device, llama=True)
    assert layer.rows == MAX_ROWS
    found = layer.run(workspace_of(layer, parts)).clone()
    assert_near(found, layer.expected())


def test_a_long_context_has_more_parts_than_are_merged_at_once(device) -> None:
    layer = layer_of((2200, 40), 2, 1, 16, 16, torch.float32, device, llama=False)
    assert_near(layer.run(workspace_of(layer, 32)), layer.expected())


def test_a_token_that_is_not_to_be_written_is_in_the_cache_already(device) -> None:
    layer = layer_of((40, 65, 1), 4, 2, 16, 16, torch.float32, device, llama=True)
    expected = layer.expected()
    layer.slots.fill_(-1)
    layer.qkv[:, 4 * 16 :] = float("nan")
    before = layer.case.k_cache.clone()
    assert_near(layer.run(workspace_of(layer, 2)), expected)
    assert torch.equal(layer.case.k_cache.nan_to_num(9.0), before.nan_to_num(9.0))


@pytest.mark.parametrize("parts", [1, 3])
def test_tokens_before_a_window_are_not_read(parts, device) -> None:
    layer = layer_of((70, 33, 40, 4), 4, 2, 16, 4, torch.float32, device, llama=True, window=10)
    expected = layer.expected()
    hide_before(layer.case, [context - 10 for context in layer.case.context_len.tolist()])
    assert_near(layer.run(workspace_of(layer, parts)), expected)


@pytest.mark.parametrize(("window", "codes"), [(0, False), (33, True)])
def test_only_a_row_of_one_token_sees_a_first_key_that_is_skipped(window, codes, device) -> None:
    options = {"codes": codes, "llama": True, "window": window, "skips_first": True}
    layer = layer_of((1, 2, 17, 34, 65), 4, 2, 16, 16, torch.float32, device, **options)
    found = layer.run(workspace_of(layer, 3)).clone()
    assert_near(found, layer.expected(), 4)
    layer.slots.fill_(-1)
    assert_near(layer.run(workspace_of(layer, 1)), found, 4)


def test_rows_that_it_is_for() -> None:
    """More rows pay where few KV heads leave the GPU idle."""
    assert not few_pays(0, 8) and few_pays(1, 64) and few_pays(16, 64)
    assert not few_pays(17, 8) and few_pays(MAX_ROWS, 4) and not few_pays(MAX_ROWS + 1, 1)


@pytest.mark.parametrize("norm_after", [False, True])
@pytest.mark.parametrize(("rotated", "interleaved"), [(24, False), (24, True), (64, True)])
def test_other_pairs_of_a_head(rotated, interleaved, norm_after, device):
    layer = layer_of([1, 40, 77], 4, 2, 64, 16, torch.float32, device, llama=True)
    frequencies = 1e4 ** (-torch.arange(rotated // 2, device=device) / rotated)
    keys = cos_sin_table(frequencies, 512, 64)
    queries = keys * (1 + torch.arange(512, device=device)[:, None] / 100)
    old = layer.preparation
    layer.preparation = HeadPreparation(
        queries, keys, RotatedPairs(rotated, interleaved), old.q_weight, old.k_weight, 1e-6, norm_after
    )
    result = layer.run(workspace_of(layer, 2)).clone()
    torch.testing.assert_close(result, layer.expected(), rtol=1e-4, atol=1e-4)
