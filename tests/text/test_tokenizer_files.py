"""Errors in a tokenizer's files: each is found at load, and names file and field in one line."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from roseinfer.core.errors import ConfigError, UnsupportedModelError
from roseinfer.text.tokenizer import Tokenizer
from tests.text.tokenizers import byte_level


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    byte_level().backend.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def refused(folder: Path) -> str:
    with pytest.raises(UnsupportedModelError) as raised:
        Tokenizer.from_folder(folder)
    return str(raised.value)


def backtracks(data: dict[str, Any]) -> None:
    split = {"type": "Split", "pattern": {"Regex": "(a+)+$|(x*)*y"}, "behavior": "Isolated", "invert": False}
    data["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, data["pre_tokenizer"]]}


def replaces_nothing(data: dict[str, Any]) -> None:
    data["normalizer"] = {"type": "Replace", "pattern": {"String": ""}, "content": "x"}


def has_a_huge_id(data: dict[str, Any]) -> None:
    data["model"]["vocab"]["huge"] = 2**32 - 1


def pads_without_end(data: dict[str, Any]) -> None:
    fixed = {"strategy": {"Fixed": 2**40}, "direction": "Right", "pad_to_multiple_of": None}
    data["padding"] = {**fixed, "pad_id": 0, "pad_type_id": 0, "pad_token": "<|end|>"}


def change(folder: Path, how: Callable[[dict[str, Any]], None]) -> None:
    path = folder / "tokenizer.json"
    data = json.loads(path.read_text())
    how(data)
    path.write_text(json.dumps(data))


@pytest.mark.parametrize(
    ("how", "said"),
    [(backtracks, "fails on 'aaaa"), (replaces_nothing, "fails on 'Hello"), (has_a_huge_id, "token id 4294967295")],
)
def test_a_tokenizer_that_cannot_work_is_refused_in_one_line(
    folder: Path, how: Callable[[dict[str, Any]], None], said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    change(folder, how)
    message = refused(folder)
    assert "tokenizer.json: " in message and said in message and "\n" not in message
    assert capfd.readouterr().err == "", "the library's own lines are not shown"


def test_padding_of_the_file_is_not_applied_before_it_is_disabled(folder: Path) -> None:
    change(folder, pads_without_end)
    assert Tokenizer.from_folder(folder).encode("hello")


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"bos_token": "\ud800"}, "bos_token = '\\ud800' holds a lone surrogate"),
        ({"bos_token": 5}, "bos_token = 5"),
        ({"eos_token": {"content": [1]}}, "eos_token = {'content': [1]}"),
        ({"chat_template": [1, 2]}, "chat_template = [1, 2]"),
        ({"chat_template": 5}, "chat_template = 5"),
        ({"chat_template": [{"name": "default", "template": 5}]}, "chat_template = [{'name'"),
        ({"chat_template": [{"name": [], "template": "x"}]}, "chat_template = [{'name'"),
    ],
)
def test_wrong_types_in_the_config_are_refused_by_name(folder: Path, config: dict[str, Any], said: str) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    message = refused(folder)
    assert "tokenizer_config.json: " in message and said in message


@pytest.mark.parametrize(
    "template",
    ["x", [{"name": "tools", "template": "y"}, {"name": "default", "template": "x"}], {"default": "x", "tools": "y"}],
)
def test_a_template_may_be_one_of_several(folder: Path, template: Any) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template, "add_bos_token": True}))
    assert Tokenizer.from_folder(folder).chat_template == "x"


def test_template_files_that_cannot_be_read(folder: Path) -> None:
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    assert "chat_template.jinja cannot be read" in refused(folder)
    with pytest.raises(ConfigError, match=r"chat_template: cannot read .*none\.jinja"):
        Tokenizer.from_folder(folder, folder / "none.jinja")
