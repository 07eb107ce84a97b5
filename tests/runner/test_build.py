"""Construction of runners, and real models on them."""

import json
from pathlib import Path

import pytest
import torch

from roseinfer.attention.kv_scales import KVScales
from roseinfer.core.config.engine import CacheConfig, EngineConfig, ModelConfig
from roseinfer.core.config.speculation import SpeculationConfig
from roseinfer.core.errors import ConfigError, ModelNotFoundError, UnsupportedModelError
from roseinfer.core.plan import Admission, HostCopy, Row, StepPlan
from roseinfer.core.runner import ContextReads, ExpertChoice, WindowPool
from roseinfer.core.sampling import SequenceParams
from roseinfer.models import block
from roseinfer.parallel.group import SingleRank
from roseinfer.runner.build import BuiltRunner, build_runner, found_threads
from roseinfer.runner.device import resolve_device
from roseinfer.sched.registry import scheduler_config
from tests.runner.tiny import run

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 61,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "torch_dtype": "float32",
    "eos_token_id": 2,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    generation = {"eos_token_id": [3, 2], "do_sample": True, "temperature": 0.6, "top_k": 20}
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    return tmp_path


def build(folder: Path, *, model: dict | None = None, cache: dict | None = None, **scheduler: int) -> BuiltRunner:
    config = EngineConfig(
        model=ModelConfig(**{"load_format": "dummy", "device": "cpu", **(model or {})}),
        cache=CacheConfig(**{"block_size": 4, **(cache or {})}),
        scheduler=scheduler_config(**{"max_num_seqs": 4, **scheduler}),
    )
    return build_runner(config, folder)


def generate(built: BuiltRunner, prompt: list[int], steps: int, chunk: int) -> list[int]:
    """Return the greedy text of one request in seat 1, in blocks 5, 6, ..."""
    params = SequenceParams(max_tokens=steps, temperature=0.0)
    blocks = tuple(range(5, 5 + 16))
    admitted = [Admission("r", 1, prompt, len(prompt), params, 0, (), blocks)]
    out: list[int] = []
    at = 0
    while len(out) < steps:
        count = min(chunk, len(prompt) + len(out) - at)
        sample = at + count == len(prompt) + len(out)
        row = Row("r", 1, at, count, int(sample), sample, at, 0, ())
        out += run(built.runner, StepPlan(at, [row], admitted)).rows[0].token_ids
        admitted, at = [], at + count
    return out


def test_facts(folder):
    facts = build(folder).facts
    assert facts.model_type == "LlamaForCausalLM"
    assert facts.max_model_len == 64
    assert facts.num_blocks == 4 * 64 // 4  # full contexts in all seats
    assert facts.vocab_size == 61
    assert set(facts.eos_token_ids) == {2, 3}
    assert facts.default_sampling == {"temperature": 0.6, "top_k": 20}
    assert (facts.dtype, facts.device) == ("float32", "cpu")
    assert facts.startup_s.keys() == {"load", "cache", "warm-up"}
    plain = build(folder, model={"generation_config": "none"}).facts
    assert plain.default_sampling == {} and set(plain.eos_token_ids) == {2, 3}
    changed = build(folder, model={"override_generation_config": '{"top_k": null, "top_p": 0.9}'}).facts
    assert changed.default_sampling == {"temperature": 0.6, "top_p": 0.9}


def test_a_small_cache_shortens_the_default_context(folder):
    facts = build(folder, cache={"num_kv_blocks": 6}).facts
    assert (facts.num_blocks, facts.max_model_len) == (6, 24)


def test_cache_memory_in_bytes(folder):
    per_block = 2 * 2 * 4 * 2 * 4 * 4  # layers, K and V, tokens, heads, head_dim, float32
    assert build(folder, cache={"kv_cache_memory_bytes": 10 * per_block + 1}).facts.num_blocks == 10


WINDOWED = {
    **LLAMA,
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "use_sliding_window": True,
    "sliding_window": 9,
    "layer_types": ["full_attention", "sliding_attention"],
}


def test_layers_with_a_window_have_a_pool_of_their_own(folder):
    (folder / "config.json").write_text(json.dumps(WINDOWED))
    cache = {"num_kv_blocks": 32}
    facts = build(folder, cache=cache, max_num_batched_tokens=8).facts
    assert (facts.num_blocks, facts.windows) == (32, (WindowPool(9, 26),)), "5 of 6 blocks of a typical context"
    whole = build(folder, cache={**cache, "enable_window_groups": False}).facts
    assert (whole.num_blocks, whole.windows) == (32, ())
    assert whole.reads == facts.reads == ContextReads(((9, 0.5),)), "layers read the window, wherever K/V is kept"
    assert whole.block_bytes == 2 * facts.block_bytes
    hosted = build(folder, cache={**cache, "kv_offloading_size": 1 / 1024}).facts
    assert hosted.windows == () and hosted.block_bytes == whole.block_bytes
    assert build(folder, model={"max_model_len": 9}).facts.windows == ()


@pytest.mark.parametrize(
    ("model", "cache"), [({"max_model_len": 65}, {}), ({"max_model_len": 32}, {"num_kv_blocks": 7})]
)
def test_a_context_that_does_not_fit_is_refused(folder, model, cache):
    with pytest.raises(ConfigError, match="max_model_len"):
        build(folder, model=model, cache=cache)


def test_too_long_a_context_is_refused_before_weights_are_read(folder):
    with pytest.raises(ConfigError, match="max_model_len"):
        build(folder, model={"max_model_len": 65, "load_format": "auto"})
    with pytest.raises(ModelNotFoundError):
        build(folder, model={"load_format": "auto"})


@pytest.mark.parametrize("cache", [{"num_kv_blocks": 1}, {"num_kv_blocks": 1, "block_size": 1}, {"block_size": 64}])
def test_the_smallest_caches_start(folder, cache):
    built = build(folder, cache=cache)
    assert built.facts.max_model_len == min(64, built.facts.num_blocks * cache.get("block_size", 4))


def test_keys_and_values_in_fp8_take_a_quarter_of_float32(folder):
    wide, narrow = (
        build(folder, cache={"kv_cache_memory_bytes": 2 * 2 * 2 * 4 * 4 * 4 * 8, "kv_cache_dtype": kept}).facts
        for kept in ("auto", "fp8")
    )
    assert (wide.num_blocks, narrow.num_blocks) == (8, 32)


def test_host_memory_holds_blocks_by_its_size_and_copies_are_timed(folder):
    built = build(folder, cache={"num_kv_blocks": 40, "kv_offloading_size": 1 / 1024})
    assert built.facts.num_host_blocks == 2**20 // (2 * 2 * 4 * 2 * 4 * 4)  # layers, K and V, slots, heads, dim, bytes
    assert built.facts.load_s > 0 and built.facts.store_s > 0
    text = generate(built, [7, 8, 9, 10, 11, 12], 6, 8)  # in blocks 5 and 6
    stores = [HostCopy(5, 2047), HostCopy(6, 0)]
    assert run(built.runner, StepPlan(90, [], released=[1], stores=stores)).stores_s > 0
    assert generate(built, [20] * 8, 6, 8) != text
    loads = [HostCopy(5, 2047), HostCopy(6, 0)]
    assert run(built.runner, StepPlan(91, [], released=[1], loads=loads)).loads_s > 0
    params = SequenceParams(max_tokens=9, temperature=0.0)
    tokens = [7, 8, 9, 10, 11, 12, *text[:3]]
    again = Admission("r", 1, tokens, 6, params, 0, (), (5, 6, 7))
    result = run(built.runner, StepPlan(92, [Row("r", 1, 8, 1, 1, True, 8, 0, ())], [again], num_tokens=1))
    assert result.rows[0].token_ids == (text[3],)
    assert build(folder).facts.num_host_blocks == 0


def test_too_much_host_memory_is_refused_before_weights_are_read(folder):
    with pytest.raises(ConfigError, match="kv_offloading_size asks for 1000000"):
        build(folder, model={"load_format": "auto"}, cache={"kv_offloading_size": 1e6})
    with pytest.raises(ConfigError, match="one KV block takes"):
        build(folder, cache={"kv_offloading_size": 1e-9})


def test_keys_with_a_bias_do_not_go_into_fp8_without_scales(folder, monkeypatch):
    told = "kv_cache_dtype is fp8, but the keys of LlamaForCausalLM have a bias"
    biased = {**LLAMA, "attention_bias": True}
    (folder / "config.json").write_text(json.dumps(biased))
    with pytest.raises(ConfigError, match=told):
        build(folder, cache={"kv_cache_dtype": "fp8"})
    # In FP8, a checkpoint may have scales.
    fp8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    (folder / "config.json").write_text(json.dumps({**biased, "quantization_config": fp8}))
    with pytest.raises(ConfigError, match=told):
        build(folder, cache={"kv_cache_dtype": "fp8"})
    scales = KVScales(torch.full((2,), 0.5), torch.full((2,), 2.0))
    monkeypatch.setattr(block, "read_kv_scales", lambda source, qkv, kv_heads: scales)
    built = build(folder, cache={"kv_cache_dtype": "fp8"})
    assert len(generate(built, [5, 9, 33, 2], steps=3, chunk=2)) == 3


def test_warm_up_leaves_the_seats_empty(folder):
    built = build(folder)
    for seat in range(4):
        with pytest.raises(AssertionError, match="empty seat"):
            built.runner.submit(StepPlan(0, [], released=[seat]))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_refused():
    with pytest.raises(ConfigError, match="cuda"):
        resolve_device("cuda")
    assert resolve_device("auto").type == "cpu"


def test_chunks_change_nothing_with_a_real_model_and_backend(folder):
    prompt = [5, 9, 33, 60, 1, 7, 7, 12, 44, 20, 18]
    whole = generate(build(folder), prompt, 12, chunk=11)
    assert len(set(whole)) > 2
    for chunk in (1, 3, 4, 10):
        assert generate(build(folder), prompt, 12, chunk) == whole


def test_layers_that_no_backend_computes_are_refused_before_weights_are_read(folder, monkeypatch):
    monkeypatch.setattr(
        "roseinfer.attention.torch_backend.unsupported_reason", lambda specs: f"it lacks {specs[0].heads} heads"
    )
    with pytest.raises(
        UnsupportedModelError, match=r"no attention backend supports this model .*torch: it lacks 4 heads"
    ):
        build(folder, model={"load_format": "auto", "device": "cpu"})


def test_bfloat16_runs(folder):
    built = build(folder, model={"dtype": "bfloat16"})
    assert built.facts.dtype == "bfloat16"
    assert len(generate(built, [5, 9, 33], 4, chunk=2)) == 4


@pytest.mark.parametrize(
    ("options", "named"),
    [({"cache": {"num_kv_blocks": 10**12}}, "num_kv_blocks"), ({"max_num_seqs": 10**13}, "max_num_seqs")],
)
def test_out_of_memory_names_the_option(folder: Path, options: dict, named: str) -> None:
    with pytest.raises(ConfigError, match=rf"out of memory for .* lower {named}"):
        build(folder, **options)


def test_experts_are_a_fact_of_a_model_that_has_them(folder: Path) -> None:
    assert build(folder).facts.experts is None
    mixtral = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 4}
    (folder / "config.json").write_text(json.dumps({**LLAMA, **mixtral, "num_experts_per_tok": 2, "rope_theta": 1e6}))
    assert build(folder).facts.experts == ExpertChoice(4, 2)


def test_each_group_in_turn_gets_the_same_part_of_the_cores(folder: Path) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(8)
        found_threads.cache_clear()
        config = EngineConfig(model=ModelConfig(load_format="dummy", device="cpu", tensor_parallel_size=2))
        for _ in range(2):
            build_runner(config, folder, SingleRank(0, 2))
            assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(before)
        found_threads.cache_clear()


def test_states_of_a_pooling_engine_have_no_room_for_drafts(folder):
    linear = {f"linear_{key}": 4 for key in ("key_head_dim", "value_head_dim", "num_key_heads", "num_value_heads")}
    types = ["linear_attention", "full_attention"]
    config = {**LLAMA, **linear, "linear_conv_kernel_dim": 3, "layer_types": types, "hidden_act": "silu"}
    config |= {"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text"}
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    (folder / "config.json").write_text(json.dumps(config))

    def slot_bytes(speculation: str, kind: str) -> int:
        config = EngineConfig(
            model=ModelConfig(load_format="dummy", device="cpu", runner=kind),
            cache=CacheConfig(block_size=4, num_kv_blocks=32),
            scheduler=scheduler_config(max_num_seqs=4),
            speculation=SpeculationConfig(speculation=speculation),
        )
        states = build_runner(config, folder).facts.states
        assert states is not None
        return states.slot_bytes

    assert slot_bytes("ngram", "generate") > slot_bytes("off", "generate")
    assert slot_bytes("ngram", "pooling") == slot_bytes("off", "pooling") == slot_bytes("off", "generate")


def test_a_model_that_only_embeds_has_no_head_to_round(folder, caplog):
    model = {"runner": "pooling", "lm_head_dtype": "fp8"}
    assert build(folder, model=model, cache={"num_kv_blocks": 8}).facts.weights == "float32"
    assert "lm_head_dtype is ignored: the model has no output head" in caplog.text
