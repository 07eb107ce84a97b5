"""Arguments of `LLM(...)`: those of vLLM's constructor, and wrong ones."""

import gc
import logging
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from roseinfer import LLM, SamplingParams
from roseinfer.core.errors import ConfigError, EngineClosedError
from roseinfer.llm.options import engine_options
from tests.test_public_face import run_python


@pytest.mark.parametrize(
    ("given", "ours"),
    [
        ({"dtype": "half"}, {"dtype": "float16"}),
        ({"dtype": torch.bfloat16}, {"dtype": "bfloat16"}),
        ({"kv_cache_dtype": "fp8_e4m3"}, {"kv_cache_dtype": "fp8"}),
        ({"max_model_len": "auto", "seed": None}, {}),
        ({"num_gpu_blocks_override": 64}, {"num_kv_blocks": 64}),
        ({"tokenizer": Path("a/b"), "scheduling_policy": "fcfs"}, {"tokenizer": "a/b", "scheduling_policy": "fifo"}),
        ({"pipeline_parallel_size": 1, "data_parallel_size": 1, "enable_sleep_mode": False}, {}),
        ({"speculative_config": None, "task": "generate", "tokenizer_mode": "auto"}, {"runner": "generate"}),
        ({"task": "embed"}, {"runner": "pooling"}),
        ({"enable_lora": True, "max_loras": 4}, {"enable_lora": True, "lora_slots": 4, "lora_dir": "/"}),
        ({"enable_lora": True, "lora_dir": "x"}, {"enable_lora": True, "lora_dir": "x"}),
        ({"enable_lora": False}, {"enable_lora": False}),
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}}, {"speculation": "ngram,tokens=4"}),
        ({"unknown": 1}, {"unknown": 1}),
    ],
)
def test_options_of_vllm_become_ours(given: dict[str, Any], ours: dict[str, Any]) -> None:
    assert engine_options(given) == (ours, [])


def test_an_override_of_the_generation_config_sets_the_default_sampling() -> None:
    override = {"temperature": 0.25, "top_k": 3}
    with LLM("tiny", threads=1, num_kv_blocks=16, override_generation_config=override) as llm:
        default = llm.get_default_sampling_params()
    assert (default.temperature, default.top_k) == (0.25, 3)


@pytest.mark.parametrize(
    "options",
    [
        {"enable_lora_bias": True},
        {"pipeline_parallel_size": 2},
        {"data_parallel_size": 2},
        {"tokenizer_mode": "mistral"},
        {"hf_overrides": {"rope_theta": 1.0}},
        {"logits_processors": [print]},
        {"quantization": "bitsandbytes"},
        {"reasoning_parser": "qwen3"},
        {"runner": "draft"},
    ],
)
def test_what_would_change_answers_is_refused_by_name(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(ConfigError, match=rf"^{name}.* is not supported: .*; see docs/from-vllm\.md$"):
        LLM("tiny", **options)


def test_several_engines_are_named_with_the_option_that_starts_them() -> None:
    with pytest.raises(ConfigError, match="`roseinfer serve --replicas` starts several"):
        LLM("tiny", data_parallel_size=2)


def test_options_without_effect_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    ignored = {"trust_remote_code": True, "swap_space": 4, "disable_log_stats": True, "served_model_name": "x"}
    with caplog.at_level(logging.WARNING), LLM("tiny", threads=1, num_kv_blocks=16, **ignored) as llm:
        llm.generate("x", SamplingParams(max_tokens=1))
    (line,) = [record.message for record in caplog.records if record.name.startswith("roseinfer.llm")]
    assert all(f"{name} is ignored: " in line for name in ignored)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_seqs": 4}, "unknown option 'max_seqs'"),
        ({"gpu_memory_utilization": "0.9"}, "gpu_memory_utilization must be a number, got '0.9'"),
        ({"max_model_len": 12.5}, "max_model_len must be an integer, got 12.5"),
        ({"enforce_eager": "yes"}, "enforce_eager must be True or False, got 'yes'"),
        ({"max_num_seqs": True}, "max_num_seqs must be an integer, got True"),
        ({"max_batch_size": 1.0}, "max_batch_size must be an integer, got 1.0"),
        ({"slack_fairness": "high"}, "slack_fairness must be a number, got 'high'"),
        ({"dtype": "float8"}, "dtype must be one of auto, float32, bfloat16, float16"),
        ({"num_kv_blocks": 8, "num_gpu_blocks_override": 9}, "are the same option"),
        ({"chat_template": "missing.jinja"}, "chat_template: cannot read 'missing.jinja'"),
    ],
)
def test_wrong_options_get_a_sentence(options: dict[str, Any], message: str) -> None:
    small = {"threads": 1, "num_kv_blocks": 16} | options
    with pytest.raises(ConfigError, match=message):
        LLM("tiny", **small)


def test_methods_that_vllm_has_are_named() -> None:
    with LLM("tiny", threads=1, num_kv_blocks=16) as llm:
        with pytest.raises(AttributeError, match=r"LLM\.encode is not supported; see docs/reference/python\.md"):
            llm.encode  # type: ignore[attr-defined]  # noqa: B018
        with pytest.raises(AttributeError, match=r"LLM\.tokeniser does not exist"):
            llm.tokeniser  # type: ignore[attr-defined]  # noqa: B018


def test_an_llm_that_is_dropped_closes_its_engine() -> None:
    llm = LLM("tiny", threads=1, num_kv_blocks=16)
    core, engine = llm.engine.core, weakref.ref(llm.engine)
    closed: list[str] = []
    core.runner.close = lambda: closed.append("runner")  # type: ignore[attr-defined]
    llm.generate("x", SamplingParams(max_tokens=1))
    del llm
    gc.collect()
    assert engine() is None and closed == ["runner"]


def test_a_closed_llm_says_so() -> None:
    with LLM("tiny", threads=1, num_kv_blocks=16) as llm:
        pass
    llm.close()
    with pytest.raises(EngineClosedError, match="closed"):
        llm.generate("x")


def test_a_program_that_closes_nothing_ends_quietly() -> None:
    """Threads of the engine and of grammars must not keep the interpreter, or complain at its end."""
    code = """
from roseinfer import LLM, SamplingParams, StructuredOutputsParams
llm = LLM("tiny", threads=1, num_kv_blocks=16, device="cpu", overlap=True)
params = SamplingParams(max_tokens=4, structured_outputs=StructuredOutputsParams(choice=["yes", "no"]))
print(llm.generate("Answer: ", params)[0].outputs[0].text)
import threading
stream = llm.stream("x", SamplingParams(max_tokens=50))
next(stream)
"""
    assert run_python(f"import sys\n{code}\nprint(file=sys.stderr)").strip() in ("yes", "no")


def test_a_system_that_is_not_supported_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roseinfer.llm.llm.sys.platform", "darwin")
    with pytest.raises(ConfigError, match="models run on Linux only, not on macOS"):
        LLM("tiny")
