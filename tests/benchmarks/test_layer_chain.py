from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks.layer_chain import LONGEST_PROMPT, Part, blocks_of, make_batch, read_step


def test_steps() -> None:
    """Decoding rows come first; prompts are as even as possible."""
    step = read_step("3x600+2500")
    assert [part.tokens for part in step] == [1, 1, 1, 833, 833, 834]
    assert all(560 < part.start < 640 for part in step[:3]) and all(part.start == 0 for part in step[3:])
    assert max(part.tokens for part in read_step("+8192")) <= LONGEST_PROMPT
    assert read_step("2x5") == [Part(0, 1), Part(12, 1)]


@pytest.mark.parametrize("text", ["", "24", "x600", "24x", "24x600+", "24x600+512 "])
def test_what_is_no_step(text: str) -> None:
    with pytest.raises(ValueError, match="ROWSxCONTEXT"):
        read_step(text)


def test_a_batch_has_its_tokens_in_blocks_of_their_own() -> None:
    step = read_step("3x40+100")
    model = SimpleNamespace(device=torch.device("cpu"), spec=SimpleNamespace(vocab_size=50))
    attention = SimpleNamespace(map_chunks=lambda *of: np.array([[of[1], 0, 0, 1]], dtype=np.int32))
    chain = SimpleNamespace(model=model, store=SimpleNamespace(num_blocks=blocks_of(step)), attention=attention)
    batch = make_batch(step, chain)  # type: ignore[arg-type]
    (paging,) = batch.paging
    assert len(set(paging.slots.tolist())) == len(batch.input_ids) == 103
    assert paging.tables.flatten().sort().values.tolist() == list(range(blocks_of(step)))
    assert batch.decode_len is not None and (batch.decode_len > 0).tolist() == [True] * 3 + [False]
    assert batch.chunk_map is not None and batch.chunk_map[0, 0] == 3
    assert batch.query_start.tolist() == [0, 1, 2, 3, 103]
