"""Whole folders of encoders, with tokenizers of their kinds: texts in, vectors and scores as transformers' out."""

from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import torch.nn.functional as F
from tokenizers import models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from roseinfer import LLM
from tests.helpers.encoders import ENCODERS, RERANKERS, make_encoder
from tests.helpers.sentence_folders import add_modules

OPTIONS = {"threads": 1, "max_num_seqs": 4, "device": "cpu", "dtype": "float32"}
TEXTS = ["A rose is red", "tulips", "the red rose is a rose is a rose", "Roses, unknown words: tulip!", ""]
QUERY = "a red rose"
WORDS = "a rose is red tulip the ##s , ! : unknown words".split()  # noqa: SIM905


def word_pieces() -> tokenizers.Tokenizer:
    """Return a tokenizer as BERT's: lower case, word pieces, the second text numbered 1."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    made = tokenizers.Tokenizer(
        models.WordPiece({word: i for i, word in enumerate(special + WORDS)}, unk_token="[UNK]")
    )
    made.normalizer, made.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    made.add_special_tokens(special)
    template = {"single": "[CLS] $A [SEP]", "pair": "[CLS] $A [SEP] $B:1 [SEP]:1"}
    made.post_processor = processors.TemplateProcessing(**template, special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    return made


def unigrams() -> tokenizers.Tokenizer:
    """Return a tokenizer as XLM-RoBERTa's: SentencePiece's unigrams."""
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    pieces = ["▁", *(f"▁{word}" for word in WORDS), *"abcdefghijklmnopqrstuvwxyz"]
    vocabulary = [(piece, 0.0 if piece in special else -1.0 - i / 10) for i, piece in enumerate(special + pieces)]
    made = tokenizers.Tokenizer(models.Unigram(vocabulary, unk_id=3))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.add_special_tokens(special)
    template = {"single": "<s> $A </s>", "pair": "<s> $A </s> </s> $B </s>"}
    made.post_processor = processors.TemplateProcessing(**template, special_tokens=[("<s>", 0), ("</s>", 2)])
    return made


TOKENIZERS = {"bert": word_pieces, "xlm-r": unigrams, "modernbert": word_pieces}


def save(name: str, kinds: dict[str, Any], folder: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    reference = make_encoder(kinds[name])
    reference.save_pretrained(folder)
    tokenizer = TOKENIZERS[name]()
    tokenizer.save(str(folder / "tokenizer.json"))
    return reference, PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@torch.inference_mode()
@pytest.mark.parametrize("mode", ["mean", "cls"])
@pytest.mark.parametrize("name", TOKENIZERS)
def test_embeddings_of_texts(name: str, mode: str, tmp_path: Path) -> None:
    reference, tokenizer = save(name, ENCODERS, tmp_path)
    add_modules(tmp_path, {"pooling_mode": mode})
    with LLM(tmp_path, **OPTIONS) as llm:
        found = llm.embed(TEXTS, use_tqdm=False)
    for text, result in zip(TEXTS, found, strict=True):
        states = reference(torch.tensor([tokenizer.encode(text)])).last_hidden_state[0]
        want = F.normalize(states.mean(0) if mode == "mean" else states[0], dim=0)
        assert F.cosine_similarity(torch.tensor(result.embedding), want, dim=0) >= 1 - 1e-6


@torch.inference_mode()
@pytest.mark.parametrize("name", TOKENIZERS)
def test_scores_of_pairs(name: str, tmp_path: Path) -> None:
    reference, tokenizer = save(name, RERANKERS, tmp_path)
    with LLM(tmp_path, **OPTIONS) as llm:
        found = llm.score(QUERY, TEXTS, use_tqdm=False)
    scores = torch.tensor([result.score for result in found])
    options = {"return_tensors": "pt", "return_token_type_ids": name == "bert"}
    encoded = [tokenizer([(QUERY, text)], **options) for text in TEXTS]
    want = torch.cat([reference(**inputs).logits[0] for inputs in encoded]).sigmoid()
    torch.testing.assert_close(scores, want, atol=1e-5, rtol=0)
    if name == "bert":
        one_text = torch.cat([reference(inputs["input_ids"]).logits[0] for inputs in encoded]).sigmoid()
        assert (scores - one_text).abs().max() > 1e-3, "the second text must be numbered 1"
