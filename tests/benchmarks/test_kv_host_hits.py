"""benchmarks/kv_host_hits.py, on a CPU, with a model so small that it must be told to load."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks import kv_host_hits
from roseinfer.sched.cost.online_fit import CostModel
from roseinfer.sched.cost.params import CostParams
from roseinfer.sched.offload import Offloading

SMALL = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 16,
    "hidden_size": 32,
    "intermediate_size": 48,
    "max_position_embeddings": 512,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "vocab_size": 300,
}
SIZES = "--lengths 48,128 --repeats 2 --new 9 --beside 2 --kv-blocks 60 --max-model-len 400 --max-num-batched-tokens 64"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    return tmp_path


def loads_all(options: object, known: object, load_s: float, store_s: float) -> Offloading:
    return Offloading(CostModel(CostParams(token_s=1.0), fit=False), False, load_s, store_s)


def test_prefixes_are_computed_by_one_engine_and_loaded_by_the_other(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Offloading, "beside", loads_all)
    out = tmp_path / "out.json"
    more = ["--model", str(folder), "--device", "cpu", "--threads", "1", "--host-gib", "0.01", "--json", str(out)]
    monkeypatch.setattr(sys, "argv", ["kv_host_hits", *SIZES.split(), *more])
    kv_host_hits.main()
    said, found = capsys.readouterr().out, json.loads(out.read_text())
    assert "hardware:" in said and "seed=0" in said and said.count("one with a prefix of 128") == 2
    for engine, share in (("computed", 0), ("loaded", 1)):
        turns = found[engine]["turns"]
        assert [(each["length"], each["beside"]) for each in turns] == [(48, 0), (128, 0), (48, 2), (128, 2)]
        for each in turns:
            assert each["loaded"] == [share * each["length"]] * 2
            assert len(each["ttft_ms"]) == len(each["again_ms"]) == 2
            assert bool(each["gaps_ms"]) == bool(each["beside"])
        assert len(found[engine]["quiet_ms"]) == 2 * kv_host_hits.QUIET_STEPS
    assert not found["computed"]["rates"] and len(found["loaded"]["rates"]) == 3


def test_a_kv_cache_that_loses_nothing_is_told(folder):
    core, info = kv_host_hits.build_engine(
        kv_host_hits.make_engine_config(
            model=str(folder), load_format="dummy", device="cpu", threads=1, num_kv_blocks=400, max_model_len=400
        ),
        folder,
    )
    sizes = kv_host_hits.Sizes((48,), 1, 9, 0, 0, 0)
    with pytest.raises(SystemExit, match="the KV cache still had 48 tokens"):
        kv_host_hits.measure(kv_host_hits.Driver(core, info, 0), sizes)
    core.close()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [("--max-model-len 100", "--max-model-len: prefix"), ("--kv-blocks 30 --max-model-len 300", "--kv-blocks: 41")],
)
def test_what_does_not_fit_is_told(arguments, told, folder, monkeypatch):
    more = ["--model", str(folder), "--device", "cpu", "--threads", "1", "--host-gib", "0.001"]
    monkeypatch.setattr(sys, "argv", ["kv_host_hits", *SIZES.split(), *more, *arguments.split()])
    with pytest.raises(SystemExit, match=told):
        kv_host_hits.main()
