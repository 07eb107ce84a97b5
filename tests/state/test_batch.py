"""Tables of a step's rows for kernels."""

import numpy as np
import pytest
import torch

from roseinfer.state.batch import (
    DRAFTS,
    MAX_PIECE_TOKENS,
    NUM_PIECED,
    PIECED,
    REPLAYED,
    SNAPSHOT,
    SNAPSHOT_AFTER,
    RowSnapshot,
    StateRow,
    lay_out,
    make_tables,
    max_pieces,
    table_size,
    tables_in,
)


def test_rows_of_one_token_have_no_pieces():
    lines, pieces = lay_out([StateRow(7, 12, 1), StateRow(2, 0, 5), StateRow(4, 3, 1)], [RowSnapshot(2, 1, 9)])
    assert lines[:PIECED].T.tolist() == [
        [7, 12, 0, 1, -1, 0, 0, 0, 0, 0],
        [2, 0, 1, 5, -1, 0, 1, 0, 0, 0],
        [4, 3, 6, 1, 9, 1, 1, 0, 0, 1],
    ]
    assert pieces.tolist() == [[1, 1, 5, -1]]


def test_pieces_end_at_snapshots_and_after_64_tokens():
    rows = [StateRow(0, 5, 1), StateRow(1, 10, 150), StateRow(3, 0, 64)]
    lines, pieces = lay_out(rows, [RowSnapshot(1, 150, 20), RowSnapshot(1, 70, 21), RowSnapshot(2, 1, 22)])
    found = [(row, first, tokens, slot) for row, first, tokens, slot in pieces.tolist()]
    assert found == [
        (1, 1, 64, -1),
        (1, 65, 6, 21),
        (1, 71, 58, -1),
        (1, 129, 22, 20),
        (2, 151, 1, 22),
        (2, 152, 63, -1),
    ]
    assert lines[5:7, 1:].T.tolist() == [[0, 4], [4, 6]]
    assert lines[[PIECED, NUM_PIECED]].tolist() == [[1, 2, 0], [2, 2, 2]]


def test_rows_with_drafts_have_no_pieces():
    rows = [StateRow(3, 20, 1, 0, 2), StateRow(1, 9, 4, 3), StateRow(2, 40, 3, 2, 4), StateRow(4, 0, 2)]
    lines, pieces = lay_out(rows, [RowSnapshot(0, -1, 9), RowSnapshot(1, 1, 8), RowSnapshot(2, 0, 7)])
    assert lines[2:4].T.tolist() == [[0, 1], [1, 4], [5, 3], [8, 2]] and pieces.tolist() == [[3, 8, 2, -1]]
    fields = [[9, 2, 0, -1], [8, 0, 3, 1], [7, 4, 2, 0], [-1, 0, 0, 0]]
    assert lines[[SNAPSHOT, REPLAYED, DRAFTS, SNAPSHOT_AFTER]].T.tolist() == fields


def test_bound_of_pieces_holds():
    draw = np.random.default_rng(0)
    for _ in range(200):
        rows = [StateRow(i, 0, int(draw.integers(1, 200))) for i in range(draw.integers(1, 6))]
        cuts = {(int(row), int(draw.integers(1, rows[row].tokens + 1))) for row in draw.integers(0, len(rows), 4)}
        snapshots = [RowSnapshot(row, tokens, 10 + i) for i, (row, tokens) in enumerate(cuts)]
        _, pieces = lay_out(rows, snapshots)
        assert len(pieces) <= max_pieces(sum(row.tokens for row in rows), len(rows), len(snapshots))
        assert all(0 < tokens <= MAX_PIECE_TOKENS for tokens in pieces[:, 2].tolist())
        assert sum(pieces[:, 2]) + [row.tokens for row in rows].count(1) == sum(row.tokens for row in rows)


def test_padding_has_no_tokens():
    lines, pieces = lay_out([StateRow(1, 0, 3)], [], (4, 5))
    assert lines[3].tolist() == [3, 0, 0, 0] and pieces[:, 2].tolist() == [3, 0, 0, 0, 0]
    assert lines[5:7, 1:].tolist() == [[0] * 3] * 2, "a padding row has no pieces"


def test_uploaded_tables_are_those_that_were_laid_out():
    rows, snapshots = [StateRow(1, 0, 3), StateRow(2, 8, 1)], [RowSnapshot(0, 2, 5)]
    tables = make_tables(rows, snapshots, torch.device("cpu"))
    lines, pieces = lay_out(rows, snapshots)
    assert tables.rows.tolist() == lines.tolist() and tables.pieces.tolist() == pieces.tolist()
    again = tables_in(torch.arange(table_size(2, 3), dtype=torch.int32), 2, 3)
    assert again.rows.flatten().tolist() + again.pieces.flatten().tolist() == list(range(table_size(2, 3)))


@pytest.mark.parametrize("tokens", [-2, 2])
def test_a_snapshot_holds_known_tokens_that_the_row_consumes(tokens):
    with pytest.raises(AssertionError, match="row 0 has no state"):
        lay_out([StateRow(1, 9, 4, 3, 2)], [RowSnapshot(0, tokens, 5)])


@pytest.mark.parametrize(
    "snapshots", [[RowSnapshot(0, 4, 9)], [RowSnapshot(0, 0, 9)], [RowSnapshot(0, 2, 8), RowSnapshot(0, 2, 9)]]
)
def test_impossible_snapshots_are_bugs(snapshots):
    with pytest.raises(AssertionError, match="row 0 has"):
        lay_out([StateRow(1, 0, 3)], snapshots)
