"""`roseinfer serve A B`, and [models.NAME] in a config file."""

import json
from pathlib import Path
from typing import Any

import pytest

from roseinfer.cli.commands import serve
from roseinfer.cli.commands.served_models import served_models
from roseinfer.config.parser import OptionParser
from roseinfer.core.config.models import ServedModelConfig
from roseinfer.core.errors import ConfigError

FILE = """
max_model_len = 1024
[models.chat]
model = "big"
max_model_len = 512
served_model_name = ["chat", "gpt-4"]
tool_call_parser = "none"
[models."org/small"]
gpu-memory-utilization = 0.1
replicas = 2
runner = "pooling"
"""


def read(*arguments: str) -> tuple[ServedModelConfig, ...]:
    parser = OptionParser(prog="x")
    serve.OPTIONS.add_to(parser)
    return served_models(serve.OPTIONS, serve.OPTIONS.read(parser.parse_args(arguments)))


def file(tmp_path: Path, text: str) -> str:
    path = tmp_path / "models.toml"
    path.write_text(text)
    return str(path)


def test_one_model_is_as_before() -> None:
    (only,) = read("big", "--served-model-name", "a", "b")
    assert (only.model_name, only.names, only.engine.other_engines) == ("big", ("a", "b"), 0)


def test_several_models_share_the_options() -> None:
    one, other = read("--max-model-len", "1024", "big", "org/small")
    assert (one.names, other.names) == (("big",), ("org/small",))
    assert one.engine.model.max_model_len == other.engine.model.max_model_len == 1024
    assert one.engine.cache.gpu_memory_utilization == other.engine.cache.gpu_memory_utilization == 0.45


def test_each_model_can_be_given_a_name() -> None:
    one, other = read("same", "same", "--served-model-name", "a", "b")
    assert (one.names, other.names) == (("a",), ("b",))
    assert one.model_name == other.model_name == "same"


def test_tables_have_options_of_their_own(tmp_path: Path) -> None:
    chat, small = read("--config", file(tmp_path, FILE), "--seed", "7")
    assert (chat.model_name, chat.names, small.model_name, small.names) == (
        "big", ("chat", "gpt-4"), "org/small", ("org/small",),
    )  # fmt: skip
    assert [each.engine.model.max_model_len for each in (chat, small)] == [512, 1024]
    assert [each.engine.model.seed for each in (chat, small)] == [7, 7]
    assert [each.engine.model.runner for each in (chat, small)] == ["auto", "pooling"]
    assert [each.server.tool_call_parser for each in (chat, small)] == ["none", None]
    assert [each.replicas.count for each in (chat, small)] == [1, 2]
    assert [round(each.engine.cache.gpu_memory_utilization, 3) for each in (chat, small)] == [0.8, 0.1]


def test_json_has_tables_too(tmp_path: Path) -> None:
    path = tmp_path / "models.json"
    path.write_text(json.dumps({"models": {"a": {"model": "x"}, "b": {"model": "x"}}}))
    assert [model.name for model in read("--config", str(path))] == ["a", "b"]


@pytest.mark.parametrize(
    ("arguments", "text", "message"),
    [
        (["a", "b", "--served-model-name", "x", "y", "z"], "", "one name per model, got 3 names for 2 models"),
        (["a", "a"], "", "two models have the name 'a'"),
        (["a", "b", "--model", "c"], "", "model is given twice: a b and 'c'"),
        (["a", "b"], FILE, "models are given twice"),
        (["a"], FILE, "model cannot be combined with models"),
        (["--served-model-name", "x"], "[models.a]\n[models.b]", "served_model_name cannot be combined with models"),
        ([], "[models.a]\nport = 1\n[models.b]", "port is an option of the whole server"),
        ([], "[models.a]\nnonsense = 1", "models.a: unknown option 'nonsense'"),
        ([], "[models.a]\nmax_model_len = 0", "models.a: max_model_len"),
        ([], "models = 3", "must have a table for each name"),
        ([], "[models.a]\n[models.a.models.b]", "unknown option 'models'"),
    ],
)
def test_what_cannot_be_meant_is_rejected(tmp_path: Path, arguments: list[str], text: str, message: str) -> None:
    given: list[Any] = [*arguments, "--config", file(tmp_path, text)] if text else arguments
    with pytest.raises(ConfigError, match=message):
        read(*given)
