"""benchmarks/experts_read.py: it counts what routers choose, and finds the one that likes a few experts."""

import json
from collections.abc import Iterator

import pytest
import torch

from benchmarks import experts_read
from roseinfer.core.experts import ExpertChoice
from roseinfer.engine.api import EngineInfo
from roseinfer.engine.core import Core
from roseinfer.layers.experts import RoutedExperts

SMALL = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "head_dim": 16,
    "hidden_size": 64,
    "intermediate_size": 64,
    "max_position_embeddings": 256,
    "mlp_only_layers": [1],
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "torch_dtype": "float32",
    "vocab_size": 512,
}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Core, EngineInfo]]:
    folder = tmp_path_factory.mktemp("moe")
    (folder / "config.json").write_text(json.dumps(SMALL))
    core, info = experts_read.start(str(folder), 16, 6, device="cpu", threads=1)
    yield core, info
    core.close()


@pytest.mark.parametrize("rows", [1, 8, 16])
def test_dummy_routers_spread(engine: tuple[Core, EngineInfo], rows: int) -> None:
    found = experts_read.count_experts(*engine, rows, 6)
    assert len(found.layers) == 2, "one layer has no experts"
    assert found.steps == 6 and found.expected == ExpertChoice(16, 2).read(rows)
    assert found.sound and found.mean <= 1.25 * found.expected
    if rows == 1:
        assert found.layers == [2.0, 2.0]


def test_a_router_that_likes_a_few_is_found(engine: tuple[Core, EngineInfo], monkeypatch: pytest.MonkeyPatch) -> None:
    load = RoutedExperts.__call__

    def alike(self: RoutedExperts, x: torch.Tensor) -> torch.Tensor:
        return load(self, x[:1].expand_as(x).contiguous())

    monkeypatch.setattr(RoutedExperts, "__call__", alike)
    found = experts_read.count_experts(*engine, 8, 4)
    assert not found.sound and "TOO FEW" in found.as_row()[""]
    assert RoutedExperts.__call__ is alike, "as it was"


def test_a_model_without_experts_is_no_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["experts_read.py", "tiny", "--device", "cpu", "--rows", "1"])
    with pytest.raises(SystemExit, match="has no experts"):
        experts_read.main()


def test_shapes_of_the_table_are_packaged() -> None:
    from benchmarks.bounds import model_cost

    cost = model_cost("qwen3-30b-a3b")
    assert cost.experts == ExpertChoice(128, 8)
    for tokens, gigabytes in ((1, 6.08), (8, 25.8), (64, 59.5), (256, 60.4)):
        assert cost.counted(tokens, 1, 0, 0).weight_bytes / 1e9 == pytest.approx(gigabytes, rel=0.005)
