import json
from pathlib import Path

import pytest

from roseinfer.core import json_file
from roseinfer.core.errors import UnsupportedModelError
from roseinfer.core.json_file import MAX_DEPTH, parse_json, read_object


def test_what_is_json_is_returned_as_it_is() -> None:
    value = {"a": [1, 2.5, None, {"é": "😀"}], "b": 10**30, "c": {"d": True}}
    assert parse_json(json.dumps(value)) == value
    assert parse_json(json.dumps(value).encode()) == value


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not JSON"),
        (b"\xff", "not JSON"),
        ("1" * 5000, "not JSON"),
        ("[" * 200_000, "nested too deeply"),
        ("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), "nested too deeply"),
        ('{"a": ' * 200_000, "nested too deeply"),
        ('{"rope": {"theta": NaN}}', r"rope\.theta = nan is not a finite number"),
        ('{"eps": [1, -Infinity]}', r"eps\[1\] = -inf is not a finite number"),
        ('{"eps": 1e999}', "eps = inf is not a finite number"),
        (r'{"bos_token": "a\ud800"}', r"bos_token = 'a\\ud800' holds a lone surrogate"),
        (r'{"a": {"\udc00": 1}}', r"a key in a = '\\udc00' holds a lone surrogate"),
    ],
)
def test_anything_else_is_one_error_that_names_the_field(text: str | bytes, said: str) -> None:
    with pytest.raises(ValueError, match=said) as raised:
        parse_json(text)
    assert str(raised.value).isascii() and "\n" not in str(raised.value)


def test_the_deepest_value_that_is_allowed() -> None:
    parse_json("[" * MAX_DEPTH + "]" * MAX_DEPTH)


def test_files_of_a_model_are_objects_of_a_limited_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"a": 1}')
    assert read_object(path) == {"a": 1}
    monkeypatch.setattr(json_file, "MAX_FILE_BYTES", 4)
    with pytest.raises(UnsupportedModelError, match=r"config\.json: the file has more than 4 bytes"):
        read_object(path)
    monkeypatch.undo()
    path.write_text("[1]")
    with pytest.raises(UnsupportedModelError, match=r"config\.json does not hold a JSON object"):
        read_object(path)
    with pytest.raises(UnsupportedModelError, match=r"none\.json cannot be read: No such file"):
        read_object(tmp_path / "none.json")
    with pytest.raises(UnsupportedModelError, match="cannot be read: Is a directory"):
        read_object(tmp_path)
