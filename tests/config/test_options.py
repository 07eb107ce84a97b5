"""Dataclasses to command-line options and back."""

import argparse
import dataclasses
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from roseinfer.config.file import load_file
from roseinfer.config.options import Group, OptionSet
from roseinfer.config.parser import OptionParser, with_dashes
from roseinfer.config.readers import parse_int
from roseinfer.core.config.adapters import AdapterConfig
from roseinfer.core.config.engine import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    PricedConfig,
    ProfileConfig,
    SchedulerConfig,
)
from roseinfer.core.config.kv_events import KvEventsConfig
from roseinfer.core.config.option import option
from roseinfer.core.config.replicas import ReplicasConfig
from roseinfer.core.config.server import ServerConfig
from roseinfer.core.config.speculation import SpeculationConfig
from roseinfer.core.errors import ConfigError
from roseinfer.sched.registry import all_options


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    name: str = option("anna", "who it is", metavar="NAME")
    max_size: int = option(4, "how large, 100% sure")
    share: float = option(0.5, "how much")
    limit: int | None = option(None, "how far; default: no limit")
    mode: str = option("slow", "how fast", choices=("slow", "fast"))
    loud: bool = option(False, "whether loud")
    cached: bool | None = option(None, "whether cached")
    tags: tuple[str, ...] = option((), "labels")
    ids: tuple[int, ...] = option((1, 2), "numbers")
    bias: tuple[tuple[int, float], ...] = option((), "pairs")

    def __post_init__(self) -> None:
        if self.max_size <= 0:
            raise ConfigError(f"max_size must be positive, got {self.max_size}")
        if self.name == "bert":
            raise ConfigError("name must not be bert, and the name matters")


@dataclass(frozen=True, slots=True, kw_only=True)
class Other:
    port: int = option(1, "where")


OPTIONS = OptionSet(
    Group(Example, "example", positional="name"), Group(Other, "other"), removed={"old_size": "use --max-size"}
)


def parse(*argv: str) -> dict[str, object]:
    parser = OptionParser(prog="x")
    OPTIONS.add_to(parser)
    return OPTIONS.read(parser.parse_args(argv))


def build(*argv: str) -> Example:
    return OPTIONS.build(Example, parse(*argv))


def help_text() -> str:
    parser = OptionParser(prog="x")
    OPTIONS.add_to(parser)
    return " ".join(parser.format_help().split())


def test_nothing_given_is_the_default():
    assert parse() == {} and build() == Example()


def test_every_kind_of_option():
    argv = "--max-size 8 --share 1 --limit 2k --mode fast --loud --no-cached --tags a --tags=b --ids 3 --bias 5:-1.5"
    expected = Example(
        max_size=8,
        share=1.0,
        limit=2000,
        mode="fast",
        loud=True,
        cached=False,
        tags=("a", "b"),
        ids=(3,),
        bias=((5, -1.5),),
    )
    assert build(*argv.split()) == expected
    assert build("--no-loud").loud is False and build("--cached").cached is True


def test_options_back_to_flags():
    argv = "--name=eve --max-size=8 --share=0.25 --limit=2000 --mode=fast --loud --no-cached --tags=a --tags=-b"
    argv += " --ids=3 --bias=5:-1.5"
    given = parse(*argv.split())
    flags = [flag for name, value in given.items() for flag in OPTIONS.options[name].as_flags(value)]
    assert flags == argv.split() and parse(*flags) == given
    assert OPTIONS.options["limit"].as_flags(None) == []


def test_each_group_takes_its_own():
    given = parse("--port", "9", "--share", "0.1")
    assert OPTIONS.build(Other, given) == Other(port=9) and OPTIONS.build(Example, given) == Example(share=0.1)


def test_the_positional_option():
    for argv in (["eve"], ["--name", "eve"], ["eve", "--port", "2"], ["--port", "2", "eve"], ["eve", "--name=eve"]):
        assert build(*argv).name == "eve"
    with pytest.raises(ConfigError, match="'eve' and 'adam'"):
        build("eve", "--name", "adam")


def test_underscores_and_dashes_alike():
    assert build("--max_size=3").max_size == build("--max_size", "3").max_size == 3
    assert with_dashes(["--a_b=c_d", "e_f", "-g_h", "--", "--i_j"]) == ["--a-b=c_d", "e_f", "-g_h", "--", "--i_j"]


def test_help_shows_defaults_choices_and_groups():
    text = help_text()
    assert "--max-size N how large, 100% sure (default: 4)" in text
    assert "--mode {slow,fast} how fast (default: slow)" in text
    assert "--loud, --no-loud whether loud (default: off)" in text
    assert "--limit N how far; default: no limit --" in text
    assert "--tags TEXT labels --" in text and "--cached, --no-cached whether cached --" in text
    assert "example:" in text and "other:" in text and "who it is (default: anna)" in text


@pytest.mark.parametrize(
    "argv", [["--max-size", "x"], ["--mode", "odd"], ["--max-siz=3"], ["--unknown"], ["--bias", "5"], ["a", "b"]]
)
def test_usage_errors(argv, capsys):
    with pytest.raises(SystemExit) as exit:
        parse(*argv)
    assert exit.value.code == 2
    assert argv[-1].removeprefix("--") in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["--old-size"], ["--old-size", "3"], ["--old_size=3"]])
def test_a_removed_option_is_rejected_by_name(argv, capsys):
    with pytest.raises(SystemExit):
        parse(*argv)
    assert "--old-size was removed: use --max-size" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="options: option 'old-size' was removed: use --max-size"):
        OPTIONS.read_values({"old-size": 3}, "options")


def test_errors_of_the_dataclass_name_the_flag():
    with pytest.raises(ConfigError) as error:
        build("--max-size", "0")
    assert OPTIONS.with_flags(str(error.value)) == "--max-size must be positive, got 0"
    with pytest.raises(ConfigError) as error:
        build("bert")
    assert OPTIONS.with_flags(str(error.value)) == "--name must not be bert, and the name matters"
    for kept in ("--max-size, no_max_size", "'/m/max_size.json', max_size.json"):
        assert OPTIONS.with_flags(kept) == kept
    assert OPTIONS.with_flags("see max_size. 'max_size'") == "see --max-size. '--max-size'"
    assert OPTIONS.with_flags("name needs mode=fast, the mode") == "--name needs --mode=fast, the mode"


def test_integers_with_units():
    assert [parse_int(text) for text in ("12", "-1", "1k", "128K", "2M", "1.5k", "1g")] == [
        12,
        -1,
        1000,
        131072,
        2 * 2**20,
        1500,
        10**9,
    ]
    for text in ("", "k", "1.0001k", "1e999k", "1.5", "nank"):
        with pytest.raises(ValueError):
            parse_int(text)


FILES = {
    "c.toml": 'max-size = 7\nshare = 1\nlimit = "4k"\nloud = true\ntags = ["a"]\nids = 5\nport = 3\nbias = ["1:2"]\n',
    "c.json": json.dumps(
        {"max_size": 7, "share": 1, "limit": 4000, "loud": True, "tags": "a", "ids": [5], "port": 3, "bias": ["1:2"]}
    ),
    "c.yaml": "max_size: 7\nshare: 1\nlimit: 4k\nloud: yes\ntags: [a]\nids: [5]\nport: 3\nbias: ['1:2']\n",
}


def write(folder: Path, name: str, text: str) -> str:
    (folder / name).write_text(text)
    return str(folder / name)


@pytest.mark.parametrize("name", FILES)
def test_config_file(tmp_path, name):
    path = write(tmp_path, name, FILES[name])
    given = parse("--config", path)
    expected = Example(max_size=7, share=1.0, limit=4000, loud=True, tags=("a",), ids=(5,), bias=((1, 2.0),))
    assert OPTIONS.build(Example, given) == expected and OPTIONS.build(Other, given) == Other(port=3)
    assert isinstance(OPTIONS.build(Example, given).share, float)


def test_flag_beats_file_beats_default(tmp_path):
    path = write(tmp_path, "c.toml", 'max_size = 7\nloud = true\nids = [9]\nname = "carl"\n')
    assert build("--config", path, "--max-size", "8", "--no-loud") == Example(max_size=8, ids=(9,), name="carl")
    assert build("eve", "--config", path, "--ids", "1").ids == (1,)
    assert build("eve", "--config", path).name == "eve"


def test_null_is_for_optional_ones(tmp_path):
    assert build("--config", write(tmp_path, "c.json", '{"limit": null, "cached": null}')) == Example()
    with pytest.raises(ConfigError, match="max_size"):
        build("--config", write(tmp_path, "d.json", '{"max_size": null}'))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("c.toml", "max_sizes = 1", "unknown option 'max_sizes'"),
        ("c.toml", "max_size = 1.5", "max_size: invalid value 1.5 (expected an integer)"),
        ("c.toml", 'max_size = "many"', "max_size: invalid value 'many' (expected an integer)"),
        ("c.toml", "max_size = true", "max_size: invalid value True (expected an integer)"),
        ("c.toml", 'loud = "yes"', "loud: invalid value 'yes' (expected true or false)"),
        ("c.toml", "name = 3", "name: invalid value 3 (expected text)"),
        ("c.toml", "tags = [1]", "tags: invalid value 1 (expected text)"),
        ("c.toml", "max_size = [1]", "max_size"),
        ("c.toml", "[example]\nmax_size = 1", "unknown option 'example'"),
        ("c.toml", "= 1", "c.toml"),
        ("c.json", "[1]", "does not map"),
        ("c.json", "{", "c.json"),
        ("c.json", "[" * 100_000, "nested too deeply"),
        ("c.toml", "a = " + "[" * 100_000, "nested too deeply"),
        ("c.yaml", "a: [", "c.yaml"),
        ("c.ini", "a", "is not a .toml, .json or .yaml"),
    ],
)
def test_bad_files(tmp_path, name, text, message):
    with pytest.raises(ConfigError) as error:
        build("--config", write(tmp_path, name, text))
    assert message in str(error.value) and "\n" not in str(error.value)


def test_missing_file(tmp_path):
    with pytest.raises(ConfigError, match="cannot read"):
        load_file(tmp_path / "none.toml")


def test_yaml_without_its_package(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(ConfigError, match="PyYAML"):
        load_file(Path(write(tmp_path, "c.yaml", "a: 1")))


OWN = (
    ModelConfig,
    CacheConfig,
    SchedulerConfig,
    SpeculationConfig,
    AdapterConfig,
    ProfileConfig,
    PricedConfig,
    KvEventsConfig,
    ReplicasConfig,
    ServerConfig,
    all_options(),
)


@pytest.mark.parametrize("kind", OWN)
def test_own_options_round_trip_and_are_described(kind):
    nested = frozenset({"policy_options", "rank", "served_name"})  # own dataclasses; values come from the server
    options = OptionSet(Group(kind, "own", skip=nested))
    parser = OptionParser(prog="x")
    options.add_to(parser)
    assert options.build(kind, options.read(parser.parse_args([]))) == kind()
    for own in options.options.values():
        assert own.help, f"{own.name} has no help"
    assert {f.name for f in dataclasses.fields(kind)} - nested == set(options.options)


def test_the_parts_of_the_engines_config_are_all_own():
    parts = {f.default_factory for f in dataclasses.fields(EngineConfig)} - {dataclasses.MISSING}
    assert parts <= set(OWN) and len(parts) == 8


def test_one_name_one_home():
    with pytest.raises(AssertionError, match="one home"):
        OptionSet(Group(Other, "a"), Group(Other, "b"))


def test_groups_can_adjust_what_the_dataclass_says():
    group = Group(Example, "e", skip=frozenset({"tags"}), help={"share": "renamed"}, defaults={"max_size": 9})
    options, parser = OptionSet(group, config_file=False), argparse.ArgumentParser()
    options.add_to(parser)
    text = " ".join(parser.format_help().split())
    assert "--tags" not in text and "renamed (default: 0.5)" in text and "--config" not in text
    assert "how large, 100% sure (default: 9)" in text
    assert options.build(Example, options.read(parser.parse_args([]))).max_size == 9
    assert options.build(Example, options.read(parser.parse_args(["--max-size", "5"]))).max_size == 5


def test_aliases_are_the_same_option():
    options = OptionSet(Group(SchedulerConfig, "scheduler", skip=frozenset({"policy_options"})))
    parser = OptionParser()
    options.add_to(parser)
    for flag in ("--no-chunked-prefill", "--no-enable-chunked-prefill", "--no_chunked_prefill"):
        assert options.read(parser.parse_args([flag])) == {"enable_chunked_prefill": False}
    assert options.resolve("chunked_prefill") == "enable_chunked_prefill"


@dataclass(frozen=True, slots=True, kw_only=True)
class Spaced:
    """Config whose option takes several values after one flag."""

    limits: tuple[str, ...] = option((), "which", spaced=True)


def test_spaced_values_follow_one_flag_or_several():
    options = OptionSet(Group(Spaced, "spaced"))
    parser = OptionParser()
    options.add_to(parser)
    for argv in (["--limits", "a", "b", "--limits", "c"], ["--limits", "a", "--limits=b", "--limits", "c"]):
        assert options.read(parser.parse_args(argv)) == {"limits": ("a", "b", "c")}
    assert options.build(Spaced, {}).limits == ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedPaths:
    """Config with a positional option, texts, and values of the form NAME=PATH."""

    name: str = option("anna", "who it is")
    words: tuple[str, ...] = option((), "which", spaced=True)
    paths: tuple[str, ...] = option((), "where", metavar="NAME=PATH", spaced=True)


@pytest.mark.parametrize(
    ("argv", "given"),
    [
        (["--words", "a", "b"], {"words": ("a",), "name": "b"}),
        (["--paths", "a=x", "b"], {"paths": ("a=x",), "name": "b"}),
        (["--paths", "a=x", "b=y"], {"paths": ("a=x", "b=y")}),
        (["--paths", "a=x", "runs/b=y"], {"paths": ("a=x",), "name": "runs/b=y"}),
        (["--words", "a", "b", "--paths", "a=x", "b=y"], {"words": ("a",), "name": "b", "paths": ("a=x", "b=y")}),
    ],
)
def test_the_positional_option_may_follow_spaced_values(argv, given):
    options = OptionSet(Group(NamedPaths, "named", positional="name"))
    parser = OptionParser()
    options.add_to(parser)
    assert options.read(parser.parse_args(argv)) == given


@dataclass(frozen=True, slots=True, kw_only=True)
class Guarded:
    """Config with a positional option, and secrets that may stand before it."""

    model: str = option("tiny", "which model")
    keys: tuple[str, ...] = option((), "who may use it", spaced=True, secret=True)


def read_guarded(argv):
    options = OptionSet(Group(Guarded, "guarded", positional="model"))
    parser = OptionParser()
    options.add_to(parser)
    return options.read(parser.parse_args(argv))


@pytest.mark.parametrize("model", ["tiny", "/"])
def test_a_model_may_follow_secrets(model):
    assert read_guarded(["--keys", "k", model]) == {"keys": ("k",), "model": model}
    assert read_guarded([model, "--keys", "k", "l"]) == {"keys": ("k", "l"), "model": model}


@pytest.mark.parametrize("last", ["sk-secret", "a/b", "x" * 300])
def test_several_secrets_without_a_model_are_no_model(last):
    with pytest.raises(ConfigError) as raised:
        read_guarded(["--keys", "k", last])
    several = "keys has several values, the last of which may be the model"
    assert str(raised.value) == f"{several}: put the model first, or --keys before each value"
    assert read_guarded(["--keys", "k", "--keys", last]) == {"keys": ("k", last)}
