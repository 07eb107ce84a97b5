"""Encoders in an engine: embeddings and scores equal transformers', under any schedule and without K/V."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from roseinfer.core.errors import ConfigError, InvalidRequestError, RequestTooLongError, UnsupportedModelError
from roseinfer.core.outputs import FinishReason
from roseinfer.core.pooling import PairFormat, PoolingParams, PoolingTask, floats
from roseinfer.core.request import RequestMeta
from roseinfer.engine.api import EngineInfo
from roseinfer.engine.core import EngineCore
from roseinfer.engine.messages import Add
from roseinfer.engine.pooling import pooling_prompt
from tests.equivalence.small_engines import build
from tests.helpers.encoders import ENCODERS, RERANKERS, draw_rows, make_encoder, reference_states
from tests.helpers.engines import run_dry
from tests.helpers.sentence_folders import add_modules

ROWS = draw_rows([7, 1, 23, 40, 5, 7, 1, 61, 12])
SETTINGS = {
    "plain": {},
    "small steps": {"max_num_batched_tokens": 30},
    "overlap, few seats": {"overlap": True, "max_num_seqs": 2},
    "chunks and prefixes are turned off": {"enable_chunked_prefill": True, "enable_prefix_caching": True},
}


def start(folder: Path, **options: object) -> tuple[EngineCore, EngineInfo]:
    return build(folder, device="cpu", **options)


def results(core: EngineCore, rows: list[list[int]], second: list[int] | None = None) -> list[torch.Tensor]:
    for number, row in enumerate(rows):
        pooling = PoolingParams(second_text_from=second[number] if second else 0)
        core.add(Add(str(number), pooling_prompt(row, RequestMeta(), pooling)))
    done = run_dry(core)
    assert all(found.reason is FinishReason.STOP for found in done.values())
    return [torch.tensor(floats(done[f"{number}:0"].end.vector)) for number in range(len(rows))]


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize(("name", "method"), [("bert", "mean"), ("xlm-r", "cls"), ("modernbert", "lasttoken")])
def test_embeddings_are_those_of_transformers(name: str, method: str, setting: str, tmp_path: Path) -> None:
    reference = make_encoder(ENCODERS[name])
    reference.save_pretrained(tmp_path)
    core, info = start(add_modules(tmp_path, {"pooling_mode": method}), **SETTINGS[setting])
    assert info.facts.pooling.width == 32 and not info.facts.prefix_caching and info.kv_cache == "none"
    pool = {"mean": lambda s: s.mean(0), "cls": lambda s: s[0], "lasttoken": lambda s: s[-1]}[method]
    for row, got in zip(ROWS, results(core, ROWS), strict=True):
        want = F.normalize(pool(reference_states(reference, row)), dim=0)
        assert F.cosine_similarity(got.double(), want.double(), dim=0) >= 1 - 1e-6
        torch.testing.assert_close(got, want, atol=2e-5, rtol=0)
    core.close()


@pytest.mark.parametrize("name", ["bert", "xlm-r", "modernbert"])
def test_scores_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    reference = make_encoder(RERANKERS[name])
    reference.save_pretrained(tmp_path)
    core, info = start(tmp_path)
    assert (info.facts.pooling.task, info.facts.pooling.pairs) == (PoolingTask.SCORE, PairFormat.TOKENIZER)
    second = [len(row) // 2 if name == "bert" else 0 for row in ROWS]
    for row, begin, got in zip(ROWS, second, results(core, ROWS, second), strict=True):
        types = {"token_type_ids": torch.tensor([[0] * begin + [1] * (len(row) - begin)])} if begin else {}
        with torch.inference_mode():
            want = torch.sigmoid(reference(torch.tensor([row]), **types).logits[0])
        torch.testing.assert_close(got, want, atol=2e-5, rtol=0)
    core.close()


def test_a_limit_of_the_folder_holds_unless_the_option_raises_it(tmp_path: Path) -> None:
    make_encoder(ENCODERS["bert"]).save_pretrained(tmp_path)
    add_modules(tmp_path, {"pooling_mode": "mean"}, max_seq_length=20)
    core, info = start(tmp_path)
    assert info.facts.max_model_len == 20
    with pytest.raises(RequestTooLongError):
        core.add(Add("a", pooling_prompt([5] * 21)))
    core.close()
    core, info = start(tmp_path, max_model_len=64)
    assert info.facts.max_model_len == 64
    core.close()
    with pytest.raises(ConfigError, match="max_model_len"):
        start(tmp_path, max_model_len=65)


def test_a_failed_request_fails_alone(tmp_path: Path) -> None:
    reference = make_encoder(ENCODERS["bert"])
    with torch.no_grad():
        reference.embeddings.word_embeddings.weight[11] = 3e38
    reference.save_pretrained(tmp_path)
    core, _ = start(tmp_path, pooling="cls")
    for name, row in (("bad", [11, 11]), ("good", [5, 6, 7])):
        core.add(Add(name, pooling_prompt(row)))
    with pytest.raises(InvalidRequestError, match="outside the vocabulary"):
        core.add(Add("unknown", pooling_prompt([97])))
    done = run_dry(core)
    assert (done["bad:0"].reason, done["good:0"].reason) == (FinishReason.ERROR, FinishReason.STOP)
    assert "not finite" in done["bad:0"].end.error
    core.close()


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"runner": "generate"}, "BertModel generates no text"),
        ({"pooling": "yes-no"}, "BertModel has no next token"),
        ({"kv_offloading_size": 1.0}, "enable_prefix_caching"),
    ],
)
def test_options_that_do_not_fit_an_encoder_are_refused(options: dict, error: str, tmp_path: Path) -> None:
    make_encoder(ENCODERS["bert"]).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=error):
        start(tmp_path, **options)


def test_a_classifier_of_several_labels_is_refused(tmp_path: Path) -> None:
    make_encoder(RERANKERS["bert-3"]).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="3 labels are not supported"):
        start(tmp_path)
