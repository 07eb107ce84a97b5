"""One layer's attention for few rows of several tokens against its two steps: on a GPU, else interpreted."""

import pytest
import torch

from roseinfer.kernels.attention.decode_few import MAX_QUERIES, MAX_TOKENS, FewWorkspace, verify_few
from roseinfer.kernels.attention.heads import HeadPreparation, RotatedPairs, cos_sin_table, store_heads_reference
from roseinfer.kernels.attention.prefill import prefill_attention_reference
from tests.helpers.cases import cases
from tests.helpers.interpreter import round_codes
from tests.helpers.paged import assert_near, hide_before, paged_case, with_sinks

# Position of the first token, and number of tokens, of each row.
ROWS = ((0, 1), (0, 4), (15, 3), (63, 2), (64, 4), (299, 1), (1, 4))


@pytest.fixture(autouse=True)
def _codes() -> None:
    round_codes()


class Step:
    """Rows whose tokens' keys and values are not stored yet, and the transformation of heads."""

    def __init__(self, rows, heads, kv_heads, dim, block_size, dtype, device, *, codes=False, llama=True) -> None:
        case = self.case = paged_case(rows, heads, kv_heads, dim, block_size, dtype, device, codes=codes)
        self.sizes = heads, kv_heads, dim
        tokens = sum(count for _, count in rows)
        self.qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim, device=device).to(dtype)
        at = [(i, start + j) for i, (start, count) in enumerate(rows) for j in range(count)]
        self.positions = torch.tensor([position for _, position in at], device=device)
        seats = case.table_rows.long()[[row for row, _ in at]]
        self.slots = case.tables[seats, self.positions // block_size].long() * block_size + self.positions % block_size
        self.preparation = HeadPreparation()
        if llama:
            pairs = RotatedPairs(dim // 2, interleaved=True)
            frequencies = 1e4 ** (-torch.arange(dim // 4, device=device) / dim)
            angles = cos_sin_table(frequencies, 4096, dim)
            weights = [torch.rand(dim, device=device).to(dtype) + 0.5 for _ in range(2)]
            self.preparation = HeadPreparation(angles, 2 * angles, pairs, *weights, 1e-6)

    def caches(self) -> list[torch.Tensor]:
        return [self.case.k_cache, self.case.v_cache]

    def run(self, parts: int = 4, window: int = 0, rows: int | None = None) -> torch.Tensor:
        """Run the kernel with at most about `parts` parts a row. rows: of the launch, those past the step's empty."""
        case, (heads, kv_heads, dim) = self.case, self.sizes
        used = len(case.context_len)
        rows = rows or used
        workspace = FewWorkspace.allocate(heads, kv_heads, dim, -(-parts * used * kv_heads // 4), self.qkv.device)
        starts = torch.cat((case.query_start, case.query_start[-1:].expand(rows - used)))
        lengths = torch.cat((case.context_len, case.context_len.new_zeros(rows - used)))
        seats = torch.cat((case.table_rows, case.table_rows[:1].expand(rows - used)))
        out = torch.full((len(self.qkv), heads, dim), float("nan"), dtype=self.qkv.dtype, device=self.qkv.device)
        paged = *self.caches(), case.tables, seats, starts, lengths, self.slots
        rest = out, case.scale, workspace, window, case.kv_scales, case.sinks
        verify_few(self.qkv, *paged, self.preparation, *rest)
        return out

    def expected(self, window: int = 0) -> torch.Tensor:
        case, qkv, (heads, kv_heads, dim) = self.case, self.qkv.clone(), self.sizes
        turning = self.slots, self.positions, self.preparation, case.kv_scales
        store_heads_reference(qkv, heads, kv_heads, dim, *self.caches(), *turning)
        q = qkv[:, : heads * dim].unflatten(1, (heads, dim))
        rows = case.tables, case.table_rows, case.query_start, case.context_len
        return prefill_attention_reference(q, *self.caches(), *rows, case.scale, window, case.kv_scales, case.sinks)


@cases(
    ("heads", "kv_heads", "dim", "llama", "block_size", "window", "codes", "parts", "dtype"),
    [
        (3, 1, 80, True, 32, 33, False, 4, torch.float32),
        (2, 2, 64, False, 1, 3, True, 3, torch.float16),
        (14, 1, 16, False, 16, 70, True, 2, torch.float32),
    ],
    exhaustive=[
        (8, 2, 128, True, 16, 0, False, 4, torch.float16),
        (8, 2, 128, True, 16, 0, True, 1, torch.bfloat16),
        (4, 2, 256, True, 16, 40, False, 2, torch.float16),
    ],
)
def test_a_launch_is_store_and_causal_attention(
    heads, kv_heads, dim, llama, block_size, window, codes, parts, dtype, device
) -> None:
    step = Step(ROWS, heads, kv_heads, dim, block_size, dtype, device, codes=codes, llama=llama)
    before = [cache.clone() for cache in step.caches()]
    found = step.run(parts, window, rows=len(ROWS) + 3)
    stored = [cache.clone() for cache in step.caches()]
    for cache, was in zip(step.caches(), before, strict=True):
        cache.view(torch.uint8).copy_(was.view(torch.uint8))
    assert_near(found, step.expected(window), 4)  # norm and rotation may round to the next code
    for ours, theirs in zip(stored, step.caches(), strict=True):
        assert torch.equal(ours.float().isnan(), theirs.float().isnan())
        torch.testing.assert_close(
            ours.float(), theirs.float(), rtol=0.14 if codes else 1e-2, atol=1e-2, equal_nan=True
        )


@pytest.mark.parametrize(("window", "codes", "parts"), [(0, False, 1), (0, True, 4), (128, False, 4)])
def test_sinks(window, codes, parts, device) -> None:
    """The parts of a row add its sinks once for each query."""
    step = Step(((0, 4), (126, 4), (299, 1), (300, 7)), 6, 2, 16, 16, torch.float32, device, codes=codes)
    step.case = with_sinks(step.case)
    assert_near(step.run(parts, window), step.expected(window), 4)


@cases("group", [3, 20], exhaustive=[1, 8])
def test_rows_of_one_tile_of_queries_and_of_several(group, device) -> None:
    rows = [(count * 20, count) for count in (1, 2, 3, 5, 7, MAX_QUERIES)]
    step = Step(rows, group, 1, 16, 16, torch.float32, device)
    assert_near(step.run(), step.expected())


def test_a_long_context_has_more_parts_than_are_merged_at_once(device) -> None:
    step = Step([(2200, 3), (40, 2)], 2, 1, 16, 16, torch.float32, device)
    assert_near(step.run(32), step.expected())


def test_as_many_rows_as_there_may_be(device) -> None:
    step = Step([(30 * i % 70, 1 + i % 2) for i in range(21)], 2, 1, 16, 16, torch.float32, device)
    assert len(step.qkv) == MAX_TOKENS - 1
    assert_near(step.run(2), step.expected())


def test_tokens_that_are_not_to_be_written_and_those_of_no_row(device) -> None:
    step = Step([(40, 4), (0, 3)], 4, 2, 16, 16, torch.float32, device)
    expected = step.expected()
    step.slots[:3] = step.slots[4] = -1
    before = [cache.clone() for cache in step.caches()]
    step.qkv = torch.cat((step.qkv, torch.full_like(step.qkv[:5], float("nan"))))
    step.slots = torch.cat((step.slots, step.slots.new_full((5,), -1)))
    found = step.run()
    assert_near(found[:-5], expected)
    assert found[-5:].isnan().all()
    for cache, was in zip(step.caches(), before, strict=True):
        torch.testing.assert_close(cache.nan_to_num(9.0), was.nan_to_num(9.0), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("parts", [1, 3])
def test_tokens_before_a_window_are_not_read(parts, device) -> None:
    rows = [(70, 5), (33, 1), (40, 3), (2, 2)]
    step = Step(rows, 4, 2, 16, 4, torch.float32, device)
    expected = step.expected(10)
    hide_before(step.case, [start + 1 - 10 for start, _ in rows])
    assert_near(step.run(parts, 10), expected)
