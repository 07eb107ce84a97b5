"""Models read from GGUF files, compared with the models that the files were written from."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from roseinfer.core.errors import UnsupportedModelError
from roseinfer.models import gguf_weights
from roseinfer.models.config import read_model_spec
from roseinfer.models.generation import read_generation_config
from roseinfer.models.gguf_weights import GgufWeights, widen
from roseinfer.parallel.group import Share
from roseinfer.quant.base import WeightPiece
from roseinfer.quant.int4_format import Int4Format
from roseinfer.quant.int4_scheme import Int4Groups, Int4Scheme
from tests.helpers.batches import HandRow, HandRunner
from tests.helpers.checkpoints import make_reference, reference_logits, save_reference
from tests.helpers.gathering import Gathering
from tests.helpers.gguf_files import (
    as_floats,
    floats_of,
    metadata_of,
    quantised,
    tensors_of,
    write,
    write_model,
)
from tests.helpers.loaded import load
from tests.helpers.mxfp4_files import make_packable, packed, round_experts
from tests.helpers.weights import BUILD

CPU = torch.device("cpu")
TOKENS = [5, 17, 3, 88, 42, 9, 1, 60]
FAMILIES = ("gpt2", "gpt2-untied", "llama", "llama-tied", "llama-bias", "llama-linear", "qwen2", "qwen3")
EXPERTS = ("qwen3-moe", "mixtral")
LONGER = 3 * TOKENS  # than the windows of the tiny models, and than their original contexts
# With what a file cannot say otherwise: every fourth layer of a SmolLM3 does not rotate.
SMOLLM3 = {"num_hidden_layers": 4, "no_rope_layer_interval": 4}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64}
OTHER_SHAPES = (
    ("llama", {"rope_parameters": YARN}),
    ("phi3", {}),
    ("phi3-long", {}),
    ("phi4-mini", {}),
    ("smollm3", SMOLLM3),
    ("granite", {}),
    ("granite4", {}),
    ("olmo2", {}),
    ("olmo3", {}),
    ("seed-oss", {}),
    ("exaone4", {}),
    ("exaone4-full", {}),
    ("glm4", {}),
    ("starcoder2", {"sliding_window": None}),
    ("cohere2", {"attention_bias": False}),
    ("ernie", {}),
    ("hunyuan", {}),
    ("ministral3", {}),
    # The file has no scale of scores, which follows from the heads.
    ("gemma3", {"query_pre_attn_scalar": 12}),
    ("qwen3.5", {"layer_types": ["linear_attention", "full_attention"] * 2, "attention_bias": True}),
    ("qwen3.5-moe", {}),
)
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


def logits(path: Path, tokens: list[int] = TOKENS, **options: Any) -> torch.Tensor:
    spec = read_model_spec(path)
    options = {"dtype": "float32", **options}
    model = load(path, spec, **options)
    runner = HandRunner(model)
    count = len(tokens)
    return runner.run([HandRow(tokens=tokens, table=runner.blocks.table(count), start=0, count=count)])[0]


@pytest.mark.parametrize("family", [*FAMILIES, *EXPERTS])
def test_logits_are_those_of_the_model(family: str, tmp_path: Path) -> None:
    reference = make_reference(family)
    path = write_model(tmp_path / "m.gguf", reference)
    torch.testing.assert_close(logits(path), reference_logits(reference, TOKENS), rtol=0, atol=1e-4)


@pytest.mark.parametrize(("family", "changes"), OTHER_SHAPES, ids=lambda value: value if type(value) is str else "")
def test_logits_of_other_shapes(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    reference = make_reference(family, **changes)
    path = write_model(tmp_path / "m.gguf", reference)
    torch.testing.assert_close(logits(path, LONGER), reference_logits(reference, LONGER), rtol=0, atol=1e-4)


def test_what_files_of_gemma_3_leave_out(tmp_path: Path) -> None:
    """Check a file without the pattern of windows and the theta of their layers. The largest model scales otherwise."""
    changes = {"sliding_window_pattern": 6, "num_hidden_layers": 7, "query_pre_attn_scalar": 12}
    reference = make_reference("gemma3", **changes)
    absent = {"gemma3.attention.sliding_window_pattern": None, "gemma3.rope.freq_base_swa": None}
    path = write_model(tmp_path / "m.gguf", reference, **absent)
    torch.testing.assert_close(logits(path, LONGER), reference_logits(reference, LONGER), rtol=0, atol=1e-4)
    deep = make_reference("gemma3", num_hidden_layers=62, hidden_size=20)
    spec = read_model_spec(write_model(tmp_path / "deep.gguf", deep))
    assert {layer.scale for layer in spec.attention} == {5**-0.5}
    absent["gemma3.attention.sliding_window"] = None
    whole = read_model_spec(write_model(tmp_path / "whole.gguf", reference, **absent))
    assert whole.windows == () and len({layer.rope for layer in whole.layers}) == 1


def test_blocks_of_a_draft_head_are_left_out(tmp_path: Path) -> None:
    reference = make_reference("qwen3.5-moe")
    keys = metadata_of(reference, 99) | {"qwen35moe.block_count": 4, "qwen35moe.nextn_predict_layers": 1}
    tensors = tensors_of(reference, as_floats)
    path = write(tmp_path / "m.gguf", keys, tensors | {"blk.3.nextn.enorm.weight": (np.ones(32, np.float32), "F32")})
    assert read_model_spec(path).left_out == ("multi-token prediction head",)
    torch.testing.assert_close(logits(path), reference_logits(reference, TOKENS), rtol=0, atol=1e-4)
    write(path, keys, tensors | {"blk.2.nextn.enorm.weight": (np.ones(32, np.float32), "F32")})
    with pytest.raises(UnsupportedModelError, match=r"unexpected tensor blk\.2\.nextn"):
        logits(path)


def test_a_decay_that_would_grow_is_refused(tmp_path: Path) -> None:
    reference = make_reference("qwen3.5-moe")
    tensors = tensors_of(reference, as_floats) | {"blk.0.ssm_a": (np.ones(6, np.float32), "F32")}
    path = write(tmp_path / "m.gguf", metadata_of(reference, 99), tensors)
    with pytest.raises(UnsupportedModelError, match=r"blk\.0\.ssm_a holds a number that is not negative"):
        logits(path)


def test_norms_keep_their_precision(tmp_path: Path) -> None:
    """Check that 1, which files of Gemma 3 add to norms, is taken away exactly."""
    reference = make_reference("gemma3")
    path = write_model(tmp_path / "m.gguf", reference)
    with GgufWeights(path, read_model_spec(path), BUILD) as weights:
        for name in ("model.norm", "model.layers.1.self_attn.q_norm", "model.layers.0.post_feedforward_layernorm"):
            held = reference.state_dict()[f"{name}.weight"] + 1
            found = torch.empty_like(held)
            weights.read(f"{name}.weight", found)
            assert torch.equal(found + 1, held)


def test_mistral3_without_scaled_queries_is_mistral(tmp_path: Path) -> None:
    """Read Mistral Small 3.1, whose files have the architecture of Ministral 3."""
    reference = make_reference("mistral")
    keys = {key.replace("llama.", "mistral3.", 1): value for key, value in metadata_of(reference, 99).items()}
    tensors = tensors_of(reference, as_floats)
    path = write(tmp_path / "m.gguf", {**keys, "general.architecture": "mistral3"}, tensors)
    torch.testing.assert_close(logits(path), reference_logits(reference, TOKENS), rtol=0, atol=1e-4)


def test_rope_divisors_are_read_as_the_rule_they_came_from(tmp_path: Path) -> None:
    """Check Llama 3.1's rotary scaling, whose file holds a tensor of divisors instead of the parameters."""
    rope = {"rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    published = {"rope_type": "llama3", "original_max_position_embeddings": 8192, **rope}
    reference = make_reference("llama", rope_parameters=published, max_position_embeddings=32768)
    plain = 500000.0 ** -(torch.arange(0, 8, 2) / 8)
    divisors = (plain / reference.model.rotary_emb.inv_freq).numpy().astype(np.float32)
    assert divisors.max() == pytest.approx(8.0) and divisors.min() == 1.0
    tensors = tensors_of(reference, as_floats)
    path = tmp_path / "m.gguf"
    write(path, metadata_of(reference, 99), {**tensors, "rope_freqs.weight": (divisors, "F32")})
    torch.testing.assert_close(logits(path), reference_logits(reference, TOKENS), rtol=0, atol=1e-4)
    divisors[1] *= 1.01
    write(path, metadata_of(reference, 99), {**tensors, "rope_freqs.weight": (divisors, "F32")})
    with pytest.raises(UnsupportedModelError, match=r"rope_freqs\.weight follows no known rule"):
        read_model_spec(path)


def test_experts_of_quantised_files_and_of_ranks(tmp_path: Path) -> None:
    """Check experts' matrices, which are slices of a shared tensor."""
    reference = make_reference("qwen3-moe", hidden_size=64, moe_intermediate_size=64)
    name = "blk.1.ffn_up_exps.weight"
    data = quantised("Q8_0", (6 * 64, 64))
    expected = floats_of(data, "Q8_0").view(6, 64, 64)
    tensors = tensors_of(reference, as_floats) | {name: (data.reshape(6, 64, -1), "Q8_0")}
    path = write(tmp_path / "m.gguf", metadata_of(reference, 99), tensors)
    with GgufWeights(path, read_model_spec(path), BUILD) as weights:
        part = torch.empty(16, 40)
        weights.read("model.layers.1.mlp.experts.4.up_proj.weight", part, shard=(Share(32, 16, 64), Share(8, 40, 64)))
        assert torch.equal(part, expected[4, 32:48, 8:48])
        held = weights.stored("model.layers.1.mlp.experts.4.up_proj.weight")
        assert held is not None and (held.dtype, held.shape) == ("Q8_0", (64, 64))


def test_experts_in_mxfp4(tmp_path: Path) -> None:
    """Compare with the same numbers in a checkpoint of safetensors, whose codes are in another order."""
    reference = round_experts(make_packable())

    def encode(name: str, values: np.ndarray) -> tuple[np.ndarray, str]:
        if "_exps.weight" not in name:
            return values, "F32"
        blocks, scales = packed(values)
        codes = np.stack((blocks & 15, blocks >> 4), -1).reshape(*blocks.shape[:-1], 32)
        halves = codes[..., :16] | codes[..., 16:] << 4
        return np.concatenate((scales[..., None], halves), -1).reshape(*values.shape[:2], -1), "MXFP4"

    path = write(tmp_path / "m.gguf", metadata_of(reference, 99), tensors_of(reference, encode))
    torch.testing.assert_close(logits(path, LONGER), reference_logits(reference, LONGER), rtol=0, atol=1e-4)


def test_a_scale_of_mxfp4_that_stands_for_nan_is_refused() -> None:
    raw = np.zeros((2, 34), np.uint8)
    assert widen("MXFP4", raw) is not None
    raw[1, 17] = 255
    assert widen("MXFP4", raw) is None


def test_experts_of_another_number_are_named(tmp_path: Path) -> None:
    reference = make_reference("mixtral")
    for count in (3, 5):
        path = write_model(tmp_path / "m.gguf", reference, **{"llama.expert_count": count})
        with pytest.raises(UnsupportedModelError, match=rf"gate_inp\.weight is .* the metadata say \[{count}, 32\]"):
            logits(path)
    tensors = tensors_of(reference, as_floats)
    name = "blk.0.ffn_down_exps.weight"
    path = write(tmp_path / "m.gguf", metadata_of(reference, 99), {**tensors, name: (tensors[name][0][:3], "F32")})
    with pytest.raises(UnsupportedModelError, match=rf"{name} is \[3, 32, 48\], the metadata say \[4, 32, 48\]"):
        logits(path)


ENCODINGS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")


def one_layer(tmp_path: Path, data: np.ndarray, encoding: str) -> GgufWeights:
    """Write a Llama whose first q_proj [512, 512] is `data`, with interleaved heads as the file stores it."""
    sizes = {"hidden_size": 512, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 128}
    reference = make_reference("llama", **sizes)
    tensors = tensors_of(reference, as_floats) | {"blk.0.attn_q.weight": (data, encoding)}
    path = write(tmp_path / "m.gguf", metadata_of(reference, 99), tensors)
    return GgufWeights(path, read_model_spec(path), BUILD)


def uninterleaved(values: torch.Tensor, heads: int) -> torch.Tensor:
    return values.view(heads, -1, 2, values.shape[1]).transpose(1, 2).reshape(values.shape)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_encodings_are_decoded_as_by_the_gguf_package(encoding: str, tmp_path: Path) -> None:
    if encoding in ("F32", "F16", "BF16"):
        drawn = np.random.default_rng(0).normal(size=(512, 512))
        dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[encoding]
        stored = torch.from_numpy(drawn).to(dtype)
        data = stored.view(torch.uint8).numpy() if encoding == "BF16" else stored.numpy()
        expected = stored.float()
    else:
        data = quantised(encoding, (512, 512))
        expected = floats_of(data, encoding).view(512, 512)
    assert 0.05 < float(expected.std()) < 50 and expected.unique().numel() > 1000
    expected = uninterleaved(expected, heads=4)
    with one_layer(tmp_path, data, encoding) as weights:
        whole, part = torch.empty(512, 512), torch.empty(130, 200)
        weights.read(Q_PROJ, whole)
        assert torch.equal(whole, expected)
        weights.read(Q_PROJ, part, shard=(Share(120, 130, 512), Share(31, 200, 512)))
        assert torch.equal(part, expected[120:250, 31:231])
        half = torch.empty(512, 512, dtype=torch.bfloat16)
        weights.read(Q_PROJ, half)
        assert torch.equal(half, expected.to(torch.bfloat16))


def test_memory_is_that_of_a_few_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Count the rows that are converted at once, which must not grow with the tensor."""
    widened: list[int] = []
    original = gguf_weights.widen

    def counted(encoding: str, raw: np.ndarray) -> torch.Tensor | None:
        values = original(encoding, raw)
        assert values is not None
        widened.append(values.numel())
        return values

    monkeypatch.setattr(gguf_weights, "widen", counted)
    monkeypatch.setattr("roseinfer.models.gguf_weights.CHUNK_VALUE_COUNT", 4096)
    with one_layer(tmp_path, quantised("Q4_K", (512, 512)), "Q4_K") as weights:
        weights.read(Q_PROJ, torch.empty(512, 512))
    assert max(widened) == 4096 and sum(widened) == 512 * 512


def test_weights_may_be_rounded_while_they_are_read(tmp_path: Path) -> None:
    """Compare FP8 of a file's weights with FP8 of the same weights in a folder."""
    reference = make_reference("llama")
    path = write_model(tmp_path / "m.gguf", reference)
    (tmp_path / "folder").mkdir()
    folder = save_reference(reference, tmp_path / "folder")
    assert torch.equal(logits(path, quantization="fp8"), logits(folder, quantization="fp8"))
    assert not torch.equal(logits(path, quantization="fp8"), logits(path))


def test_damaged_tensors_are_named(tmp_path: Path) -> None:
    reference = make_reference("llama")
    metadata, tensors = metadata_of(reference, 99), tensors_of(reference, as_floats)

    def refuse(changed: dict[str, Any], match: str, **options: Any) -> None:
        path = write(tmp_path / "m.gguf", metadata, changed)
        with pytest.raises(UnsupportedModelError, match=match):
            logits(path, **options)

    name = "blk.1.ffn_up.weight"
    broken = tensors[name][0].copy()
    broken[3, 5] = np.inf
    refuse({key: tensor for key, tensor in tensors.items() if key != name}, rf"tensor {name} is missing")
    refuse({**tensors, name: (broken, "F32")}, rf"tensor {name} holds NaN or infinity")
    refuse({**tensors, name: (broken[:, :16], "F32")}, rf"tensor {name} is \[48, 16\], the metadata say \[48, 32\]")
    large = tensors[name][0].copy()
    large[3, 5] = 1e5
    refuse({**tensors, name: (large, "F32")}, rf"tensor {name} holds .* beyond float16", dtype="float16")
    extra = np.ones(4, np.float32)
    refuse({**tensors, "blk.0.attn_q.scale": (extra, "F32")}, r"unexpected tensor blk\.0\.attn_q\.scale")


@pytest.mark.parametrize("encoding", ["Q4_0", "Q4_K"])
def test_matrices_in_four_bits_are_exact(encoding: str, tmp_path: Path) -> None:
    """Compare widened codes, scales and offsets with the floats of the `gguf` package, bit for bit."""
    data = quantised(encoding, (512, 512))
    expected = uninterleaved(torch.from_numpy(gguf.dequantize(data, gguf.GGMLQuantizationType[encoding])), heads=4)
    with one_layer(tmp_path, data, encoding) as weights:
        for outs, ins in ((Share(0, 512, 512), Share(0, 512, 512)), (Share(120, 130, 512), Share(96, 224, 512))):
            piece = WeightPiece(Q_PROJ.removesuffix(".weight"), outs, ins)
            assert weights.keeps_int4([piece])
            part = weights.read_int4(piece)
            assert part.inputs is None and part.weight.group == 32 and part.weight.codes.dtype is torch.uint8
            rows, columns = slice(outs.start, outs.start + outs.width), slice(ins.start, ins.start + ins.width)
            assert torch.equal(part.weight.widen(torch.float32), expected[rows, columns])
        cut = WeightPiece(piece.name, Share(0, 512, 512), Share(16, 64, 512))
        assert not weights.keeps_int4([cut]), "groups of 32 inputs cannot be cut"
        k_proj = replace(piece, name=piece.name.replace("q_proj", "k_proj"))
        assert not weights.keeps_int4([piece, k_proj]), "k is stored in 32 bits"
        assert weights.order_of(piece.name) is None


def test_damaged_scales_in_four_bits_are_named(tmp_path: Path) -> None:
    data = quantised("Q4_K", (512, 512))
    data[3, 2:4] = (0, 0x7C)  # infinity in float16
    with one_layer(tmp_path, data, "Q4_K") as weights:
        piece = WeightPiece(Q_PROJ.removesuffix(".weight"), Share(0, 512, 512), Share(0, 512, 512))
        with pytest.raises(UnsupportedModelError, match=r"blk\.0\.attn_q\.weight holds NaN or infinity"):
            weights.read_int4(piece)


@pytest.mark.parametrize("encoding", ["Q4_0", "Q4_K"])
def test_models_in_four_bits(encoding: str, tmp_path: Path) -> None:
    """Compare products by weights in four bits with a model of floats. v and down are stored in more bits."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
    reference = make_reference("llama", **sizes)

    def encode(name: str, values: np.ndarray) -> tuple[np.ndarray, str]:
        kind = "Q8_0" if ("attn_v" in name and "blk.1" in name) or "ffn_down" in name else encoding
        return (
            (quantised(kind, values.shape), kind) if name.startswith("blk.") and values.ndim == 2 else (values, "F32")
        )

    path = write(tmp_path / "m.gguf", metadata_of(reference, 99), tensors_of(reference, encode))
    scheme = read_model_spec(path).quantization
    assert isinstance(scheme, Int4Scheme) and scheme.groups == Int4Groups(32, symmetric=encoding == "Q4_0")
    products = Gathering()
    found = logits(path, weight_format=Int4Format(scheme, products))
    assert products.made == 5, "the first layer's q, k, v, and o, gate and up of both"
    torch.testing.assert_close(found, logits(path), rtol=1e-4, atol=1e-4)


def test_quantised_tensors_cannot_be_read_as_codes(tmp_path: Path) -> None:
    with one_layer(tmp_path, quantised("Q8_0", (512, 512)), "Q8_0") as weights:
        held = weights.stored(Q_PROJ)
        assert held is not None and (held.dtype, held.shape) == ("Q8_0", (512, 512))
        assert weights.stored("lm_head.scales") is None and "lm_head.weight" in weights
        with pytest.raises(UnsupportedModelError, match="has type Q8_0"):
            weights.read(Q_PROJ, torch.empty(512, 512, dtype=torch.int8))


def test_spec_and_generation_defaults_of_a_file(tmp_path: Path) -> None:
    reference = make_reference("qwen3")
    path = write_model(tmp_path / "m.gguf", reference, **{"general.sampling.temp": 0.5, "general.sampling.top_k": 7})
    folder = save_reference(reference, tmp_path)
    ours, theirs = read_model_spec(path), read_model_spec(folder)
    norm = replace(theirs.norm, eps=ours.norm.eps)
    assert ours == replace(theirs, norm=norm) and abs(ours.norm.eps - theirs.norm.eps) < 1e-12
    found = read_generation_config(path)
    assert (found.eos_token_ids, found.temperature, found.top_k) == ((98,), 0.5, 7)
