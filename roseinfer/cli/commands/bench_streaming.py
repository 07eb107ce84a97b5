"""roseinfer bench streaming: client-side latencies of requests that arrive one after another."""

import asyncio
from argparse import Namespace
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from roseinfer.bench.config import StreamingConfig
from roseinfer.cli.commands.generate import SAMPLING_HELP
from roseinfer.cli.commands.groups import ENGINE, engine_config
from roseinfer.config.options import Group, OptionSet
from roseinfer.core.errors import ConfigError
from roseinfer.core.sampling import SequenceParams

if TYPE_CHECKING:
    from roseinfer.bench.streaming_compare import Setting, SettingRuns

NAME = "bench streaming"
HELP = "measure client-side latencies of requests that arrive one after another"
# `seed` is the engine's option, length and end have their own options, and nothing reads log probabilities.
SAMPLING = Group(
    SequenceParams,
    "sampling",
    skip=frozenset({"max_tokens", "ignore_eos", "seed", "logprobs", "prompt_logprobs"}),
    help=SAMPLING_HELP,
    defaults={"temperature": 0.0},
)
OPTIONS = OptionSet(Group(StreamingConfig, "benchmark"), SAMPLING, *ENGINE)
# Benchmark's option -> engine's option.
SYNONYMS = {"hf_model_id": "model"}
NOT_COMPARED = frozenset({"json", "plot", "compare", "warmup_runs", "repeat_runs"})
DEFAULT_SETTING = "default"
SWITCH = {"on": True, "true": True, "off": False, "false": False}


def run(args: Namespace) -> int:
    given = OPTIONS.read(args)
    settings = make_settings(given)
    bench = settings[0].load.config
    if bench.plot:
        from roseinfer.bench.plot import check_plot

        check_plot(bench.plot)

    from roseinfer.bench.report import header
    from roseinfer.bench.streaming_compare import measure
    from roseinfer.bench.streaming_report import summarise

    measured = asyncio.run(measure(settings))
    print(header("roseinfer bench streaming", given))
    reports = {name: summarise(_info(result), result.runs) for name, result in measured.items()}
    result = _print_compared(reports) if bench.compare else _print_one(reports)
    if bench.json:
        from roseinfer.bench.report import write_json

        write_json(bench.json, result, given)
    if bench.plot:
        _plot(bench.plot, measured)
    return 0


def make_settings(given: Mapping[str, Any]) -> "list[Setting]":
    """Return one setting, or the two of --compare. Raises `ConfigError` for invalid options."""
    spec = given.get("compare")
    if spec is None:
        return [make_setting("", given)]
    key, values = _parse_compare(spec)
    return [make_setting(f"{key}={value}", _with(given, key, value)) for value in values]


def make_setting(name: str, given: Mapping[str, Any]) -> "Setting":
    """Build the setting that `given` describes. Raises `ConfigError`."""
    from roseinfer.bench.streaming import StreamingLoad, check_nvtx
    from roseinfer.bench.streaming_compare import Setting

    given = _without_synonyms(given)
    bench, engine = OPTIONS.build(StreamingConfig, given), engine_config(OPTIONS, given)
    if bench.nvtx:
        check_nvtx(engine.model.device)
    names = {option.name for option in SAMPLING.options()}
    sampling = {**SAMPLING.defaults, **{key: value for key, value in given.items() if key in names}}
    sampling |= {"max_tokens": bench.max_new_tokens, "ignore_eos": not bench.stop_on_eos}
    return Setting(name, engine, StreamingLoad(bench, SequenceParams(**sampling)))


def _without_synonyms(given: Mapping[str, Any]) -> dict[str, Any]:
    """Replace synonyms by the engine's options. Raises `ConfigError` if both are given with different values."""
    plain = dict(given)
    for synonym, name in SYNONYMS.items():
        value = plain.pop(synonym, None)
        if value is None:
            continue
        if plain.setdefault(name, value) != value:
            raise ConfigError(f"{synonym} and {name} contradict each other: {value} and {plain[name]}")
    return plain


def _parse_compare(spec: str) -> tuple[str, list[str]]:
    key, equals, values = spec.partition("=")
    key = OPTIONS.resolve(key.strip().lstrip("-").replace("-", "_"))
    both = values.split(",")
    if not equals or len(both) != 2 or both[0] == both[1]:
        raise ConfigError(f"compare must be OPTION=A,B with two different values, got {spec!r}")
    if key not in OPTIONS.options or key in NOT_COMPARED:
        raise ConfigError(f"compare: {key!r} is not an option that can be compared")
    return key, both


def _with(given: Mapping[str, Any], key: str, text: str) -> dict[str, Any]:
    """Return `given` with one option set to the value of `text`."""
    option = OPTIONS.options[key]
    rest = {name: value for name, value in given.items() if name != key}
    if text == DEFAULT_SETTING:
        return rest
    value = SWITCH.get(text, text) if option.type is bool else text
    return {**rest, key: option.from_file(value)}


def _print_one(reports: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    from roseinfer.bench.streaming_report import as_text

    (report,) = reports.values()
    print(as_text(report))
    return report


def _print_compared(reports: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    from roseinfer.bench.streaming_report import as_text, ratios, ratios_as_text

    first, second = reports
    for name, report in reports.items():
        print(f"\n[{name}]\n{as_text(report)}")
    ratio = ratios(reports[first], reports[second])
    print(f"\n[{second}] / [{first}]\n{ratios_as_text(ratio)}")
    return {"settings": dict(reports), "ratio": ratio}


def _plot(path: str, measured: "Mapping[str, SettingRuns]") -> None:
    from roseinfer.bench.plot import plot_latencies
    from roseinfer.bench.streaming_report import samples

    info = _info(next(iter(measured.values())))
    title = f"roseinfer bench streaming: {info.model} on {info.facts.device}"
    plot_latencies(path, title, {name: samples(result.runs) for name, result in measured.items()})


def _info(measured: "SettingRuns") -> Any:
    assert measured.info is not None, "every setting has run"
    return measured.info
