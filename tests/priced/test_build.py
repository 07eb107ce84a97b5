"""`device` priced: options to an engine, in real time and without torch, and what is refused."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from roseinfer import LLM, SamplingParams, StructuredOutputsParams
from roseinfer.calibration.recorded import recorded_samples
from roseinfer.config.hub import model_folder, tokenizer_folder
from roseinfer.core.config.engine import EngineConfig
from roseinfer.core.errors import ConfigError, InvalidRequestError
from roseinfer.core.runner import ContextReads, ExpertChoice
from roseinfer.engine.options import make_engine_config
from roseinfer.priced.build import build_priced, read_vocabulary
from roseinfer.sched.cost.file import cost_as_json
from roseinfer.sched.cost.params import CostParams
from roseinfer.sim.replay import read_recording, replay

STEP_S = 0.004


@pytest.fixture
def cost(tmp_path: Path) -> str:
    file = tmp_path / "cost.json"
    file.write_text(json.dumps(cost_as_json(CostParams(STEP_S, 1e-6, 0.0, 1e-6, 0.0))))
    return str(file)


@pytest.mark.parametrize("overlap", [False, True])
def test_steps_take_their_time_and_texts_are_the_same(cost: str, overlap: bool) -> None:
    """No upper bound: a busy machine may take any time more."""
    params = SamplingParams(max_tokens=12, ignore_eos=True, seed=3)
    texts = []
    for slow in (None, "2"):
        with LLM(device="priced", cost=cost, slow=slow, overlap=overlap) as llm:
            start = time.monotonic()
            (answer,) = llm.generate("def f():", params)
            assert time.monotonic() - start >= 12 * STEP_S * (2 if slow else 1)
            texts.append(answer.outputs[0].text)
        assert llm.engine.info.facts.device == "priced"
    assert texts[0] == texts[1] and len(texts[0].split()) == 12


def test_grammars_are_obeyed(cost: str) -> None:
    with LLM(device="priced", cost=cost, mean_output_len=4) as llm:
        numbers = StructuredOutputsParams(grammar='start: "[" /[0-9]{2,9}/ ("," /[0-9]+/)* "]"')
        params = SamplingParams(max_tokens=200, seed=1, structured_outputs=numbers)
        (output,) = llm.generate("numbers", params)[0].outputs
    assert output.finish_reason == "stop"
    assert re.fullmatch(r"\[[0-9]{2,9}(,[0-9]+)*\]", output.text)


def test_prefixes_are_found_where_a_state_was_kept(cost: str, tmp_path: Path) -> None:
    record = tmp_path / "run.jsonl"
    with LLM(device="priced", cost=cost, state_slots=8, record=str(record)) as llm:
        messages = [{"role": "user", "content": "Hello there. " * 20}]
        found = [llm.chat(messages, SamplingParams(max_tokens=70, ignore_eos=True))[0] for _ in range(2)]
        (first, second) = (answer.num_cached_tokens for answer in found)
        assert first == 0 and len(found[0].prompt_token_ids) - 17 <= second < len(found[0].prompt_token_ids)
        states = llm.engine.core.stats().states
        assert states is not None and states.slots_total == 8 and states.snapshots > 0
    recording = read_recording(str(record))
    again = replay(recording)
    assert [rows for rows in again.plans if rows] == [turn.rows for turn in recording.turns if turn.rows]


def test_states_and_speculation_go_together(cost: str) -> None:
    params = SamplingParams(max_tokens=90, ignore_eos=True, seed=1)
    with LLM(device="priced", cost=cost, state_slots=8, speculation="suffix") as llm:
        first, second = (llm.generate(["def f():"], params)[0].outputs[0].token_ids for _ in range(2))
        assert first == second and len(first) == 90
        assert sum(sum(counts.accepted) for counts in llm.engine.core.stats().drafts) > 20


def test_the_model_of_its_cost_file_is_known_to_its_policy_and_to_a_recording(tmp_path: Path) -> None:
    file, record = tmp_path / "cost.json", tmp_path / "run.jsonl"
    reads = ContextReads(((4, 0.5),), state_tokens=1000.0)
    costs = CostParams(1e-3, 1e-6, 0.0, 1e-6, 1e-8, 1e-8, expert_s=2e-5, experts=ExpertChoice(64, 4), reads=reads)
    file.write_text(json.dumps(cost_as_json(costs)))
    with LLM(device="priced", cost=str(file), record=str(record)) as llm:
        llm.generate(["def f():", "x = ", "import"], SamplingParams(max_tokens=8, ignore_eos=True))
        assert llm.engine.info.facts.experts == ExpertChoice(64, 4)
        known = llm.engine.core.scheduler.policy.state.cost.params
        assert (known.experts, known.reads) == (ExpertChoice(64, 4), reads)
    recording = read_recording(str(record))
    samples, experts, read = recorded_samples(str(record))
    assert recording.setup.experts == experts == ExpertChoice(64, 4)
    assert recording.setup.reads == read == reads
    assert all(sample.seconds >= costs.seconds(sample.work) for sample in samples) and len(samples) >= 8
    assert replay(recording).plans == recording.plans


def test_it_needs_no_torch(cost: str) -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from roseinfer import LLM, SamplingParams\n"
        f"with LLM(device='priced', cost={cost!r}) as llm:\n"
        "    print(llm.generate('x', SamplingParams(max_tokens=2))[0].outputs[0].text)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_the_context_and_the_cache_may_be_more_than_the_models(cost: str) -> None:
    facts = build(cost, max_model_len=100_000, num_kv_blocks=10_000)
    assert (facts.max_model_len, facts.num_blocks) == (100_000, 10_000)
    assert build(cost).max_model_len == 2048
    assert build(cost, num_kv_blocks=10).max_model_len == 160


def test_any_models_config_will_do(cost: str, tmp_path: Path) -> None:
    """Make a model of an unknown architecture with the tokenizer of another one."""
    folder = tmp_path / "other"
    folder.mkdir()
    config = {"architectures": ["SomethingNew"], "text_config": {"vocab_size": 5000, "max_position_embeddings": 300}}
    (folder / "config.json").write_text(json.dumps(config))
    facts = build(cost, model=str(folder), tokenizer="tiny")
    assert (facts.model_type, facts.vocab_size, facts.max_model_len) == ("SomethingNew", 5000, 300)
    assert build(cost, model="Qwen/Qwen3-8B").vocab_size == 151_936, "a packaged config needs no network"


def test_words_are_words() -> None:
    config = make_engine_config()
    vocabulary = read_vocabulary(tokenizer_folder(config.model), 4096, (0, 1))
    assert len(vocabulary.words) > 500 and vocabulary.closers and not {0, 1} & set(vocabulary.words)


def config_of(cost: str | None, **options: object) -> EngineConfig:
    return make_engine_config(device="priced", cost=cost, **options)


def build(cost: str | None, **options: object):
    config = config_of(cost, **options)
    return build_priced(config, model_folder(config.model), tokenizer_folder(config.model))[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cost": None}, "cost is required with device=priced"),
        ({"cost": "nowhere.json"}, "cannot read the cost model 'nowhere.json': No such file or directory$"),
        ({"slow": "1,2"}, "slow: got 2 factors for one engine"),
        ({"slow": "1,x"}, "slow must be positive numbers with commas between them"),
        ({"slow": "0"}, "slow must be positive"),
        ({"noise": -1.0}, "noise must be within"),
        ({"noise": 1e308}, "noise must be within"),
        ({"slow": "1,1e308"}, "slow must not exceed"),
        ({"mean_output_len": 0.5}, "mean_output_len must be 1 or more"),
        ({"max_model_len": 500, "num_kv_blocks": 10}, "the KV cache holds 160 tokens; raise num_kv_blocks"),
        ({"dtype": "bfloat16"}, "dtype is not supported with device=priced"),
        ({"quantization": "fp8"}, "quantization is not supported"),
        ({"load_format": "dummy"}, "load_format is not supported"),
        ({"enforce_eager": True}, "enforce_eager is not supported"),
        ({"generation_config": "none"}, "generation_config is not supported"),
        ({"override_generation_config": "{}"}, "override_generation_config is not supported"),
        ({"threads": 2}, "threads is not supported"),
        ({"kv_cache_memory_bytes": 10}, "kv_cache_memory_bytes is not supported"),
        ({"profile": "somewhere"}, "profile is not supported"),
    ],
)
def test_one_clear_line(cost: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(**{"cost": cost, **options})


@pytest.mark.parametrize("given", [{"cost": "x"}, {"slow": "1"}, {"noise": 0.5}, {"mean_output_len": 9.0}])
def test_other_devices_are_not_priced(given: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(given))} needs device=priced, got auto"):
        make_engine_config(**given)


def test_each_of_several_engines_has_its_factor(cost: str) -> None:
    config = config_of(cost, slow="1,1.5")
    assert [config.for_engine(engine, 2).priced.slow_list for engine in (0, 1)] == [(1.0,), (1.5,)]
    assert config_of(cost).for_engine(1, 2).priced == config_of(cost).priced
    with pytest.raises(ConfigError, match="slow must have one factor per engine, got 2 for 3"):
        config.for_engine(0, 3)


def test_log_probabilities_are_refused(cost: str) -> None:
    with LLM(device="priced", cost=cost) as llm, pytest.raises(InvalidRequestError, match="logprobs: not supported"):
        llm.generate("x", SamplingParams(logprobs=1))


def test_blocks_in_host_memory_are_counted_and_priced(cost: str, tmp_path: Path) -> None:
    facts = build(cost, kv_offloading_size=0.5, slow="2")
    assert facts.num_host_blocks == 2**29 // (6 * 2 * 16 * 2 * 64 * 2), "of the embedded model"
    assert (facts.load_s, facts.store_s) == (2 * CostParams().load_s, 2 * CostParams().store_s)
    qwen = build(cost, model="Qwen/Qwen3-8B", kv_offloading_size=0.5)
    assert qwen.num_host_blocks == 2**29 // (36 * 2 * 16 * 8 * 128 * 2)
    assert build(cost).num_host_blocks == 0 == build(cost).load_s
    with pytest.raises(ConfigError, match="less than a KV block of 49152 bytes"):
        build(cost, kv_offloading_size=1e-9)
    folder = tmp_path / "other"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": ["SomethingNew"], "vocab_size": 5000}))
    with pytest.raises(ConfigError, match="kv_offloading_size: the model's config lacks"):
        build(cost, model=str(folder), tokenizer="tiny", kv_offloading_size=0.5)
