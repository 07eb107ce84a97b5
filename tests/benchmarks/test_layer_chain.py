from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks.layer_chain import LONGEST_PROMPT, Part, blocks_of, make_batch, read_step
from roseinfer.attention.base import ShortRows


def test_steps() -> None:
    """Decoding rows come first; prompts are as even as possible."""
    step = read_step("3x600+2500")
    assert [part.tokens for part in step] == [1, 1, 1, 833, 833, 834]
    assert all(560 < part.start < 640 for part in step[:3]) and all(part.start == 0 for part in step[3:])
    assert max(part.tokens for part in read_step("+8192")) <= LONGEST_PROMPT
    assert read_step("2x5") == [Part(0, 1), Part(12, 1)]
    assert read_step("2x5/4") == [Part(0, 4), Part(12, 4)]


def fake_attention(queries: int) -> SimpleNamespace:
    """Return a backend that takes rows of up to `queries` tokens without a map, and undivided chunks."""
    return SimpleNamespace(
        map_chunks=lambda *of: np.array([[of[1], 0, 0, 1]], dtype=np.int32),
        is_divided=lambda chunk_map: False,
        short_rows=lambda tokens: ShortRows(4, queries) if queries > 1 else None,
    )


@pytest.mark.parametrize("text", ["", "24", "x600", "24x", "24x600+", "24x600+512 "])
def test_what_is_no_step(text: str) -> None:
    with pytest.raises(ValueError, match="ROWSxCONTEXT"):
        read_step(text)


def test_a_batch_has_its_tokens_in_blocks_of_their_own() -> None:
    step = read_step("3x40+100")
    model = SimpleNamespace(device=torch.device("cpu"), spec=SimpleNamespace(vocab_size=50))
    attention = fake_attention(1)
    store = SimpleNamespace(num_blocks=blocks_of(step))
    chain = SimpleNamespace(model=model, store=store, attention=attention, adapters=0, states=None)
    batch = make_batch(step, chain)  # type: ignore[arg-type]
    (paging,) = batch.paging
    assert len(set(paging.slots.tolist())) == len(batch.input_ids) == 103
    assert paging.tables.flatten().sort().values.tolist() == list(range(blocks_of(step)))
    assert batch.decode_len is not None and (batch.decode_len > 0).tolist() == [True] * 3 + [False]
    assert batch.chunk_map is not None and batch.chunk_map[0, 0] == 3
    assert batch.query_start.tolist() == [0, 1, 2, 3, 103] and batch.adapters is None


def test_rows_of_several_tokens_are_padded_and_need_no_map() -> None:
    step = read_step("2x40/5")
    model = SimpleNamespace(device=torch.device("cpu"), spec=SimpleNamespace(vocab_size=50))
    store = SimpleNamespace(num_blocks=blocks_of(step))
    chain = SimpleNamespace(model=model, store=store, attention=fake_attention(8), adapters=2, states=None)
    batch = make_batch(step, chain)  # type: ignore[arg-type]
    assert batch.chunk_map is None and (batch.num_decodes, batch.max_query) == (0, 8)
    assert len(batch.input_ids) == 16 and batch.query_start.tolist() == [0, 5, 10]
    assert batch.paging[0].slots[10:].tolist() == [-1] * 6 and batch.positions[:5].tolist() == [10, 11, 12, 13, 14]
    assert batch.adapters is not None
    assert batch.adapters.of_tokens.tolist() == [0] * 5 + [1] * 5 + [-1] * 6
    assert make_batch(step, chain, chunks=True).chunk_map is not None  # type: ignore[arg-type]
