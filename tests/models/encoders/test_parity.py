"""Hidden states and scores of encoders compared with those of transformers, on small random checkpoints."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from roseinfer.models.encoders import attention
from roseinfer.models.encoders.attention import RowAttention
from roseinfer.models.encoders.base import EncoderModel, PackedRows
from roseinfer.models.encoders.xlm_roberta import XLMRoberta
from tests.helpers.cases import each_value
from tests.helpers.encoders import (
    ENCODERS,
    LENGTHS,
    RERANKERS,
    draw_rows,
    hidden_states,
    load,
    make_encoder,
    pack,
    reference_states,
)

TOLERANCE = 2e-5
# Even the smallest mistake, another form of GELU, is twice as far off.
MIN_ERROR = 4e-4


DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


@pytest.fixture(scope="module", params=[f"{name} {device}" for name in ENCODERS for device in DEVICES])
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[PreTrainedModel, EncoderModel]:
    name, device = request.param.split()
    return make_pair(name, tmp_path_factory.mktemp(name), device)


def make_pair(name: str, folder: Path, device: str = "cpu") -> tuple[PreTrainedModel, EncoderModel]:
    reference = make_encoder(ENCODERS[name])
    reference.save_pretrained(folder)
    return reference, load(folder, device=device)


def worst_error(reference: PreTrainedModel, model: EncoderModel, rows: list[list[int]]) -> float:
    found = hidden_states(model, pack(rows, device=model.device))
    assert all(states.dtype is torch.float32 for states in found)
    errors = [(ours - reference_states(reference, row)).abs().max() for ours, row in zip(found, rows, strict=True)]
    return float(torch.stack(errors).max())


def test_packed_rows_of_many_lengths(pair: tuple[PreTrainedModel, EncoderModel]) -> None:
    assert worst_error(*pair, draw_rows()) < TOLERANCE


def test_one_token(pair: tuple[PreTrainedModel, EncoderModel]) -> None:
    assert worst_error(*pair, draw_rows([1])) < TOLERANCE


def test_rows_keep_their_order(pair: tuple[PreTrainedModel, EncoderModel]) -> None:
    rows = draw_rows()
    assert worst_error(*pair, rows[::-1]) < TOLERANCE


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["modernbert", "gemma3"])
def test_the_longest_row(name: str, device: str, tmp_path: Path) -> None:
    """Cross the local window many times, and several slices of queries."""
    reference, model = make_pair(name, tmp_path, device)
    rows = draw_rows([model.spec.max_length, 3, 300])
    assert worst_error(reference, model, rows) < TOLERANCE


@pytest.mark.parametrize("name", ["bert", "xlm-r"])
def test_the_last_position(name: str, tmp_path: Path) -> None:
    reference, model = make_pair(name, tmp_path)
    assert model.spec.max_length == {"bert": 64, "xlm-r": 62}[name]
    assert worst_error(reference, model, draw_rows([model.spec.max_length])) < TOLERANCE


def test_padding_within_a_text(tmp_path: Path) -> None:
    """Check that XLM-R's positions skip padding, wherever it stands."""
    reference, model = make_pair("xlm-r", tmp_path)
    rows = draw_rows([9, 6, 4])
    rows[0][4] = rows[1][0] = rows[1][5] = rows[2][1] = 1
    assert worst_error(reference, model, rows) < TOLERANCE


def test_segments(tmp_path: Path) -> None:
    reference, model = make_pair("bert", tmp_path)
    rows = draw_rows([9, 4])
    types = [[0] * 5 + [1] * 4, [0, 1, 1, 1]]
    found = hidden_states(model, pack(rows, types))
    for row, kinds, ours in zip(rows, types, found, strict=True):
        expected = reference_states(reference, row, token_type_ids=torch.tensor([kinds]))
        torch.testing.assert_close(ours, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("device", DEVICES)
@each_value(name=["bert", "xlm-r", "modernbert", "gemma3"], dtype=["bfloat16", "float16"])
def test_half_precision(name: str, dtype: str, device: str, tmp_path: Path) -> None:
    """Include rows that one kernel attends without padding on a GPU, longer than local windows."""
    reference = make_encoder(ENCODERS[name])
    reference.save_pretrained(tmp_path)
    model = load(tmp_path, dtype, device)
    rows = draw_rows((*LENGTHS, min(300, model.spec.max_length)))
    for ours, row in zip(hidden_states(model, pack(rows, device=model.device)), rows, strict=True):
        assert ours.dtype is getattr(torch, dtype)
        expected = reference_states(reference, row)
        error = (ours.float() - expected).square().mean().sqrt() / expected.std()
        assert error < (0.05 if dtype == "bfloat16" else 0.01)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", RERANKERS)
def test_scores(name: str, device: str, tmp_path: Path) -> None:
    reference = make_encoder(RERANKERS[name])
    reference.save_pretrained(tmp_path)
    model = load(tmp_path, device=device)
    head = model.spec.head
    assert head is not None and head.labels == reference.config.num_labels
    assert head.activation == ("sigmoid" if head.labels == 1 else "identity")
    rows = draw_rows()
    states = hidden_states(model, pack(rows, device=model.device))
    pooled = torch.stack([found[0] if head.pooling == "cls" else found.mean(0) for found in states])
    with torch.inference_mode():
        expected = torch.cat([reference(torch.tensor([row])).logits for row in rows])
        scores = model.scores(pooled.to(device)).cpu()
    assert expected.std() > 0.1, "equal scores would make the tolerance meaningless"
    torch.testing.assert_close(scores, expected, rtol=0, atol=TOLERANCE)


# --- wrong readings must not pass ------------------------------------------------------------------------------------
def positions_from_zero(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(XLMRoberta, "positions", lambda self, rows: rows.positions)


def causal(patch: pytest.MonkeyPatch) -> None:
    attend = F.scaled_dot_product_attention
    patch.setattr(attention, "scaled_dot_product_attention", lambda *qkv, **more: attend(*qkv, is_causal=True, **more))


def without_window(patch: pytest.MonkeyPatch) -> None:
    call = RowAttention.__call__
    patch.setattr(RowAttention, "__call__", lambda self, qkv, heads, reach=None: call(self, qkv, heads))


def narrower_window(patch: pytest.MonkeyPatch) -> None:
    call = RowAttention.__call__
    narrower: Callable[..., torch.Tensor] = lambda self, qkv, heads, reach=None: call(  # noqa: E731
        self, qkv, heads, None if reach is None else reach - 1
    )
    patch.setattr(RowAttention, "__call__", narrower)


def rows_as_one(patch: pytest.MonkeyPatch) -> None:
    begin = RowAttention.__init__
    whole: Callable[..., None] = lambda self, rows: begin(  # noqa: E731
        self, PackedRows.of(rows.input_ids, [len(rows.input_ids)])
    )
    patch.setattr(RowAttention, "__init__", whole)


@pytest.mark.parametrize(
    ("name", "mistake"),
    [
        ("xlm-r", positions_from_zero),
        ("bert", causal),
        ("bert", rows_as_one),
        ("modernbert", without_window),
        ("modernbert", narrower_window),
        ("gemma3", causal),
        ("gemma3", narrower_window),
    ],
)
def test_mistakes_in_the_network_show(
    name: str, mistake: Callable[[pytest.MonkeyPatch], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference, model = make_pair(name, tmp_path)
    mistake(monkeypatch)
    assert worst_error(reference, model, draw_rows()) > MIN_ERROR


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("bert", {"hidden_act": "gelu_pytorch_tanh"}),
        ("modernbert", {"local_attention": 10}),
        ("gemma3", {"query_pre_attn_scalar": 24}),
        ("gemma3", {"hidden_activation": "gelu"}),
        ("modernbert", {"global_attn_every_n_layers": 2, "layer_types": None}),
        (
            "modernbert",
            {"rope_parameters": {kind: {"rope_theta": 10000.0} for kind in ("full_attention", "sliding_attention")}},
        ),
        ("modernbert", {"layer_types": ["full_attention"] * 4}),
    ],
)
def test_mistakes_in_the_config_show(name: str, changes: dict[str, object], tmp_path: Path) -> None:
    """Save one model under another one's config: the hidden states differ visibly."""
    reference = make_encoder(ENCODERS[name])
    make_encoder(ENCODERS[name], **changes).save_pretrained(tmp_path)
    assert worst_error(reference, load(tmp_path), draw_rows()) > MIN_ERROR
