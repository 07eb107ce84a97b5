"""Option of speculation: methods, values, and vLLM's JSON."""

from typing import Any

import pytest

from roseinfer.config.vllm_options import Translation
from roseinfer.core.config.engine import EngineConfig, ModelConfig, ProfileConfig
from roseinfer.core.config.speculation import (
    AutoValues,
    EagleValues,
    MtpValues,
    NgramValues,
    RecordedValues,
    SpeculationConfig,
    SuffixValues,
)
from roseinfer.core.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("off", None),
        ("auto", AutoValues()),
        ("auto,tokens=3", AutoValues(tokens=3)),
        ("ngram,min=3,max=5", NgramValues(min=3, max=5)),
        ("suffix,tokens=4,chance=0.25,factor=1.5,corpus=0", SuffixValues(tokens=4, chance=0.25, factor=1.5, corpus=0)),
        ("mtp,tokens=3", MtpValues(tokens=3)),
        ("eagle3:/a=b/c:d,aux=inputs", EagleValues(path="/a=b/c:d", aux="inputs")),
        ("recorded:f.jsonl,wrong=0.2,seed=7", RecordedValues(path="f.jsonl", wrong=0.2, seed=7)),
    ],
)
def test_methods_and_their_values(text: str, values: Any) -> None:
    assert SpeculationConfig(speculation=text).values == values


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("medusa", "unknown method 'medusa' (expected off, auto, ngram, suffix, mtp or eagle3:PATH)"),
        ("off,tokens=2", "unknown method 'off'"),
        ("ngram:path", "ngram has no path"),
        ("suffix:", "suffix has no path"),
        ("mtp:path", "mtp has no path"),
        ("eagle3", "eagle3 needs a path"),
        ("recorded:", "recorded needs a path"),
        ("ngram,chance=0.1", "ngram has no value 'chance=0.1' (expected tokens, min, max)"),
        ("ngram,path=x", "ngram has no value 'path=x'"),
        ("ngram,tokens=x", "tokens must be an integer, got 'x'"),
        ("ngram,tokens=9", "tokens must be from 1 to 8, got 9"),
        ("ngram,min=5,max=4", "max must be from 5 to 16, got 4"),
        ("suffix,chance=nan", "chance must be from 0 to 1, got nan"),
        ("eagle3:x,aux=both", "aux must be auto, inputs or outputs, got 'both'"),
        ("recorded:x,wrong=2", "wrong must be from 0 to 1"),
    ],
)
def test_what_is_wrong_is_named(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        SpeculationConfig(speculation=text)
    assert str(error.value).startswith("speculation: ") and message in str(error.value)


@pytest.mark.parametrize(
    ("text", "others", "message"),
    [
        ("recorded:x", {}, "speculation 'recorded:x' is for benchmarks with random weights: it needs load_format dum"),
        ("record:x", {}, "speculation 'record:x' is for benchmarks"),
        ("ngram", {"profile": ProfileConfig(record="f")}, "record cannot be combined with speculation=ngram"),
    ],
)
def test_options_that_exclude_each_other(text: str, others: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        EngineConfig(speculation=SpeculationConfig(speculation=text), **others)
    assert str(error.value).startswith(message)


def test_recorded_outputs_are_for_random_weights() -> None:
    config = SpeculationConfig(speculation="recorded:x")
    assert EngineConfig(model=ModelConfig(load_format="dummy"), speculation=config).speculation.values is not None


@pytest.mark.parametrize(
    ("given", "text", "notes"),
    [
        ({"method": "ngram"}, "ngram", []),
        ({"model": "[ngram]", "num_speculative_tokens": 5, "prompt_lookup_max": 4}, "ngram,tokens=5,max=4,min=4", []),
        ({"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 4}, "ngram,min=2,max=4", ["lookup_min is 2"]),
        ({"method": "ngram_gpu", "num_speculative_tokens": 20}, "ngram,tokens=8", ["at most 8 tokens are guessed"]),
        (
            {
                "method": "suffix",
                "suffix_decoding_max_tree_depth": 6,
                "suffix_decoding_max_spec_factor": 1.5,
                "suffix_decoding_min_token_prob": 0.2,
                "suffix_decoding_max_cached_requests": 0,
            },
            "suffix,tokens=6,factor=1.5,chance=0.2,corpus=0",
            [],
        ),
        (
            {"method": "suffix", "suffix_decoding_max_cached_requests": 99, "enable_adaptive_verification": True},
            "suffix",
            ["max_cached_requests is ignored: ", "enable_adaptive_verification is ignored: "],
        ),
        ({"method": "eagle3", "model": "a/b", "num_speculative_tokens": 3}, "eagle3:a/b,tokens=3", []),
        ({"method": "mtp", "num_speculative_tokens": 2}, "mtp,tokens=2", []),
        ({"method": "qwen3_next_mtp"}, "mtp", []),
        ({"method": "qwen3_5_mtp", "num_speculative_tokens": 1}, "mtp,tokens=1", []),
        ({"method": "ngram", "rejection_sample_method": "standard"}, "ngram", ["rejection_sample_method is ignored"]),
    ],
)
def test_vllms_json(given: dict[str, Any], text: str, notes: list[str]) -> None:
    translation = Translation()
    translation.add("speculative_config", given)
    assert translation.options == {"speculation": text}
    assert len(translation.notes) == len(notes)
    assert all(note in line for note, line in zip(notes, translation.notes, strict=True))
    assert SpeculationConfig(speculation=text).values is not None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("x", "must be a JSON object"),
        ({"num_speculative_tokens": 3}, "method '' is not supported"),
        ({"method": "medusa"}, "method 'medusa' is not supported (expected ngram, suffix, mtp, eagle3)"),
        ({"method": "mtp", "model": "a/b"}, "method 'mtp' has no model, got 'a/b'"),
        ({"method": "ngram", "model": "a/b"}, "method 'ngram' has no model, got 'a/b'"),
        ({"method": "ngram", "num_speculative_tokens": True}, "num_speculative_tokens must be a positive integer"),
        ({"method": "ngram", "prompt_lookup_max": "5"}, "prompt_lookup_max must be a positive integer, got '5'"),
        ({"method": "ngram", "rejection_sample_method": "synthetic"}, "rejection_sample_method is not supported"),
        ({"method": "ngram", "parallel_drafting": True}, "parallel_drafting is not supported"),
    ],
)
def test_what_vllms_json_may_not_have(given: Any, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        Translation().add("speculative_config", given, "-sc")
    assert str(error.value).startswith("-sc") and message in str(error.value)


def test_no_config_is_no_speculation() -> None:
    translation = Translation()
    translation.add("speculative_config", None)
    assert (translation.options, translation.notes) == ({}, [])
