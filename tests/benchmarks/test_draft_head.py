"""Cost of a random head, measured on a model small enough for a CPU."""

import json
from pathlib import Path

import pytest

from benchmarks import draft_head
from benchmarks.draft_head import measure, write_head
from benchmarks.speculation import start

TARGET = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}


def test_steps_of_rows_with_and_without_a_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_head, "STEPS_COUNT", 2)
    monkeypatch.setattr(draft_head, "SAMPLES_COUNT", 1)
    (tmp_path / "config.json").write_text(json.dumps(TARGET))
    head = write_head(tmp_path, tmp_path / "head")
    options = {"max_num_seqs": 2, "num_kv_blocks": 16, "block_size": 16, "device": "cpu", "threads": 1}
    core, _, vocab = start(str(tmp_path), tmp_path, load_format="dummy", speculation=f"eagle3:{head}", **options)
    lines = list(measure(core, 20, [1, 2], 16, vocab))
    core.close()
    assert [line["rows"] for line in lines] == ["1", "2"]
    assert all(float(line["step ms"]) > 0 and len(line) == 8 for line in lines)
