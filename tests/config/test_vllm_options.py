"""Options of `vllm serve`: each one of the table works, is ignored with a line, or is refused by name."""

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

from roseinfer.cli.commands import serve
from roseinfer.config.parser import OptionParser
from roseinfer.config.vllm_names import (
    LISTS,
    VLLM_OPTIONS,
    Ignored,
    IgnoredValue,
    Refused,
    RefusedValue,
    Works,
    is_switch,
)
from roseinfer.config.vllm_options import Translation
from roseinfer.core.errors import ConfigError

ROOT = Path(__file__).parents[2]
OPTIONS = serve.OPTIONS
SAMPLES = {int: "7", float: "0.5", str: "x"}
works = [option for option in VLLM_OPTIONS.values() if isinstance(option, Works) and option.name != "config"]
ignored = [option for option in VLLM_OPTIONS.values() if isinstance(option, Ignored)]
refused = [option for option in VLLM_OPTIONS.values() if isinstance(option, Refused)]


@pytest.fixture(scope="module")
def parser() -> OptionParser:
    made = OptionParser(prog="serve")
    OPTIONS.add_to(made)
    return made


def flags(option: Any) -> list[str]:
    long = f"--{option.name.replace('_', '-')}"
    return [long, f"--{option.name}", *option.short]


def sample(option: Works) -> str:
    if option.name == "speculative_config":
        return '{"method": "ngram"}'
    if option.name == "lora_modules":
        return "name=path"
    ours = OPTIONS.options[option.ours]
    return ours.choices[0] if ours.choices else SAMPLES[ours.type]


@pytest.mark.parametrize("option", works, ids=lambda option: option.name)
def test_an_option_that_works_is_one_of_ours(option, parser, capsys):
    ours = OPTIONS.options[option.ours]
    for flag in flags(option):
        if ours.type is bool:
            assert OPTIONS.read(parser.parse_args([flag])) == {option.ours: not option.inverse}
            if flag.startswith("--"):
                off = flag.replace("--", "--no-", 1)
                assert OPTIONS.read(parser.parse_args([off])) == {option.ours: option.inverse}
        else:
            value = OPTIONS.read(parser.parse_args([flag, sample(option)]))[option.ours]
            if option.name == "speculative_config":
                assert value == "ngram"
                continue
            assert value == ours.from_file([sample(option)] if ours.many else sample(option))
    assert capsys.readouterr().err == ""


WORDS = [(option, word, meant) for option in works for word, meant in option.values.items()]


@pytest.mark.parametrize(("option", "word", "meant"), WORDS, ids=[f"{option.name}-{word}" for option, word, _ in WORDS])
def test_words_for_values(option, word, meant, parser, capsys):
    flag = flags(option)[0]
    translation = Translation()
    if isinstance(meant, RefusedValue):
        with pytest.raises(SystemExit):
            parser.parse_args([flag, word])
        assert f"{word} is not supported: {meant.why}; see docs/from-vllm.md" in capsys.readouterr().err
        with pytest.raises(ConfigError, match="is not supported: "):
            translation.add(option.name, word)
        return
    translation.add(option.name, word)
    given = OPTIONS.read(parser.parse_args([flag, word]))
    if isinstance(meant, IgnoredValue):
        note = f"{flag} {word} is ignored: {meant.why}"
        assert given == {option.ours: None} and capsys.readouterr().err == f"roseinfer: note: {note}\n"
        assert translation.options == {} and translation.notes == [note.replace(flag, option.name)]
    else:
        assert given == translation.options == {option.ours: meant}
        assert capsys.readouterr().err == ""


def argument(option: Ignored | Refused) -> list[str]:
    return [] if is_switch(option.name) else ["3", "4"] if option.name in LISTS else ["3"]


@pytest.mark.parametrize("option", ignored, ids=lambda option: option.name)
def test_an_ignored_option_gets_one_line(option, parser, capsys):
    for flag in flags(option):
        args = parser.parse_args([flag, *argument(option)])
        assert OPTIONS.read(args) == {}
        shown = flag if flag.startswith("-") and not flag.startswith("--") else flags(option)[0]
        assert capsys.readouterr().err == f"roseinfer: note: {shown} is ignored: {option.why}\n"
    if is_switch(option.name):
        assert OPTIONS.read(parser.parse_args([f"--no-{option.name}"])) == {}
        assert capsys.readouterr().err == ""


@pytest.mark.parametrize("option", refused, ids=lambda option: option.name)
def test_a_refused_option_says_why(option, parser, capsys):
    for flag in flags(option):
        with pytest.raises(ConfigError) as error:
            OPTIONS.read(parser.parse_args([flag, *argument(option)]))
        assert str(error.value).endswith(f" is not supported: {option.why}; see docs/from-vllm.md")
        for value in option.harmless:
            assert OPTIONS.read(parser.parse_args([flag, value])) == {}
    if is_switch(option.name):
        assert OPTIONS.read(parser.parse_args([f"--no-{option.name}"])) == {}
    assert capsys.readouterr().err == ""


def test_no_option_of_ours_is_ignored_or_refused():
    assert [option.name for option in (*ignored, *refused) if option.name in OPTIONS.options] == []


def test_single_keys_stand_for_the_option(parser, capsys):
    line = "--compilation-config.mode 3 -cc.cudagraph_mode=NONE -O3 --structured_outputs_config.backend=xgrammar"
    assert OPTIONS.read(parser.parse_args(line.split())) == {}
    assert [line.split()[2] for line in capsys.readouterr().err.splitlines()] == [
        "--compilation-config", "-cc", "-O", "--structured-outputs-config"
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="--speculative-config must be a JSON object"):
        OPTIONS.read(parser.parse_args(["--speculative-config.method", "ngram"]))


def test_values_in_vllms_forms(parser):
    line = ["m", "--max-model-len", "32k", "--allowed-origins", '["*", "http://a"]', "--served-model-name", "a", "b"]
    assert OPTIONS.read(parser.parse_args(line)) == {
        "model": "m",
        "max_model_len": 32_000,
        "allowed_origins": ("*", "http://a"),
        "served_model_name": ("a", "b"),
    }


@pytest.mark.parametrize(
    ("line", "model", "names"),
    [
        ("m --served-model-name a b", "m", ("a", "b")),
        ("--served-model-name a b --model m", "m", ("a", "b")),
        ("--served-model-name a m", "m", ("a",)),
        ("--served-model-name a --port 1 m", "m", ("a",)),
        ("--served-model-name a --served-model-name b", None, ("a", "b")),
    ],
)
def test_model_may_follow_the_names(parser, line, model, names):
    given = OPTIONS.read(parser.parse_args(line.split()))
    assert (given.get("model"), given["served_model_name"]) == (model, names)


def test_a_config_file_may_have_vllms_options(parser, tmp_path, capsys):
    file = tmp_path / "vllm.yaml"
    file.write_text(
        "model: m\nserved-model-name: [a, b]\nmax-model-len: auto\ndtype: half\ndata-parallel-size: 2\n"
        "pipeline_parallel_size: 1\ntrust-remote-code: true\nenable-prompt-adapter: false\ndisable-log-requests: true\n"
    )
    given = OPTIONS.read(parser.parse_args(["--config", str(file), "--served-model-name", "c", "d"]))
    assert given == {
        "model": "m",
        "served_model_name": ("c", "d"),
        "max_model_len": None,
        "dtype": "float16",
        "replicas": 2,
        "enable_log_requests": False,
    }
    assert capsys.readouterr().err.count("note: ") == 1
    file.write_text("default-chat-template-kwargs: {enable_thinking: false}\noverride-generation-config: {top_k: 5}")
    assert OPTIONS.read(parser.parse_args(["--config", str(file)])) == {
        "default_chat_template_kwargs": '{"enable_thinking": false}',
        "override_generation_config": '{"top_k": 5}',
    }
    for option, value in (("enable_prompt_adapter", True), ("quantization", "hqq"), ("disable-log-requests", "often")):
        wrong = tmp_path / "wrong.json"
        wrong.write_text(json.dumps({option: value}))
        with pytest.raises(ConfigError, match=f"wrong.json: {option}.*(not supported|expected true or false)"):
            OPTIONS.read(parser.parse_args(["--config", str(wrong)]))


def test_our_flag_wins_over_vllms(parser):
    for line in ("--api-workers 2 --api-server-count 3", "--api-server-count 3 --api-workers 2"):
        assert OPTIONS.read(parser.parse_args(line.split())) == {"api_workers": 2}


def test_options_as_keyword_arguments():
    translation = Translation()
    given = {"dtype": "half", "trust_remote_code": True, "max_model_len": -1, "enable_sleep_mode": False}
    for name, value in given.items():
        translation.add(name, value)
    assert translation.options == {"dtype": "float16", "max_model_len": None}
    assert translation.notes == ["trust_remote_code is ignored: no code that comes with a model is run"]


def test_the_page_has_the_tables():
    """`python .ci/vllm_table.py` writes them."""
    table = runpy.run_path(str(ROOT / ".ci" / "vllm_table.py"))
    text = table["PAGE"].read_text(encoding="utf-8")
    assert text == table["page"](text)
    assert all(f"`--{name.replace('_', '-')}`" in text for name in VLLM_OPTIONS)
