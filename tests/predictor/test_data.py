"""Reading what the predictor learns from."""

import json

import pytest

from roseinfer.core.errors import ConfigError
from roseinfer.predictor.data import MIN_ROWS, read_rows

GOOD = {"prompt_token_ids": [5, 6], "output_len": 7}


def encode(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def write(tmp_path, *lines: object) -> str:
    file = tmp_path / "data.jsonl"
    file.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return str(file)


def test_prompts_as_text_or_ids(tmp_path) -> None:
    rows = read_rows(write(tmp_path, *[GOOD] * MIN_ROWS, "", {"prompt": "ab", "output_len": 1, "x": 0}), encode)
    assert len(rows) == MIN_ROWS + 1 and rows.bad == []
    assert (rows.prompts[0], rows.lengths[0]) == ([5, 6], 7)
    assert (rows.prompts[-1], rows.lengths[-1]) == ([97, 98], 1)


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ("{", "no JSON"),
        ("3", "no JSON object"),
        ({"prompt": "a"}, "output_len must be a positive integer, got None"),
        ({"prompt": "a", "output_len": 0}, "positive integer, got 0"),
        ({"prompt": "a", "output_len": True}, "positive integer, got True"),
        ({"prompt": "a", "output_len": 2.5}, "positive integer, got 2.5"),
        ({"output_len": 3}, "neither prompt"),
        ({"prompt": 3, "output_len": 3}, "neither prompt"),
        ({"prompt": "", "output_len": 3}, "the prompt is empty"),
        ({"prompt_token_ids": [1, -2], "output_len": 3}, "list of token ids"),
        ({"prompt_token_ids": "12", "output_len": 3}, "list of token ids"),
    ],
)
def test_a_bad_row_is_left_out_and_named(row: object, why: str, tmp_path) -> None:
    rows = read_rows(write(tmp_path, GOOD, row, *[GOOD] * MIN_ROWS), encode)
    assert len(rows) == MIN_ROWS + 1
    assert len(rows.bad) == 1 and rows.bad[0].startswith("line 2: ") and why in rows.bad[0]
    assert rows.complaint() == f"1 rows left out: {rows.bad[0]}"


def test_many_bad_rows_are_an_error_that_names_the_first(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"20 rows left out: line 101: no JSON.*line 103.*and 17 more.*too many"):
        read_rows(write(tmp_path, *[GOOD] * 100, *["oops"] * 20), encode)


def test_too_few_rows_and_no_file(tmp_path) -> None:
    with pytest.raises(ConfigError, match="has 49 rows"):
        read_rows(write(tmp_path, *[GOOD] * (MIN_ROWS - 1)), encode)
    with pytest.raises(ConfigError, match=r"nowhere\.jsonl"):
        read_rows("nowhere.jsonl", encode)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot read"):
        read_rows(str(tmp_path / "binary"), encode)
