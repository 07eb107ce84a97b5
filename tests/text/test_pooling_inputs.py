"""Pairs of texts as token ids, whole and cut."""

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from roseinfer.core.errors import InvalidRequestError
from roseinfer.core.pooling import PairFormat
from roseinfer.text.pooling_inputs import DEFAULT_INSTRUCTION, PairEncoder
from roseinfer.text.tokenizer import Tokenizer
from tests.helpers.tokenizers import byte_tokenizer

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *"abcdefghijklmnop"]
QUERY, DOCUMENT = "a b c", "d e f g h i"


def backend() -> tokenizers.Tokenizer:
    """A tokenizer of words that adds [CLS] and [SEP] as BERT's does."""
    made = tokenizers.Tokenizer(models.WordPiece({word: id for id, word in enumerate(WORDS)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0",
        pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    made.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]"])
    return made


@pytest.mark.parametrize("limit", [None, 12, 11, 8, 7])
def test_pairs_are_those_of_transformers(limit: int | None) -> None:
    reference = PreTrainedTokenizerFast(tokenizer_object=backend(), cls_token="[CLS]", sep_token="[SEP]")
    options = {} if limit is None else {"truncation": "only_second", "max_length": limit}
    want = reference(QUERY, DOCUMENT, return_token_type_ids=True, **options)
    got = PairEncoder(Tokenizer(backend(), {}, None), PairFormat.TOKENIZER).encode(QUERY, DOCUMENT, limit=limit)
    assert got.ids == want["input_ids"]
    assert got.second_text_from == want["token_type_ids"].index(1) == 5


def test_pairs_without_room_or_with_an_instruction_are_refused() -> None:
    encoder = PairEncoder(Tokenizer(backend(), {}, None), PairFormat.TOKENIZER)
    with pytest.raises(InvalidRequestError, match="no room for the document"):
        encoder.encode(QUERY, DOCUMENT, limit=6)
    with pytest.raises(InvalidRequestError, match="instruction is not supported") as caught:
        encoder.encode(QUERY, DOCUMENT, "find it")
    assert caught.value.param == "instruction"
    with pytest.raises(InvalidRequestError, match="surrogates"):
        encoder.encode(QUERY, "\ud800")


def conversation(query: str, document: str, instruction: str) -> str:
    return (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
        'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
        f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}<|im_end|>\n<|im_start|>assistant\n"
        "<think>\n\n</think>\n\n"
    )


def test_a_reranker_of_conversations_gets_its_prompt() -> None:
    encoder = PairEncoder(byte_tokenizer(), PairFormat.QWEN3_RERANKER)
    got = encoder.encode("who?", "me <eos>")
    assert bytes(got.ids).decode() == conversation("who?", "me <eos>", DEFAULT_INSTRUCTION)
    assert got.second_text_from == 0
    assert bytes(encoder.encode("a", "b", "task").ids).decode() == conversation("a", "b", "task")


def test_a_long_document_is_cut_within_the_conversation() -> None:
    encoder = PairEncoder(byte_tokenizer(), PairFormat.QWEN3_RERANKER)
    whole = len(conversation("q", "12345", "t"))
    assert bytes(encoder.encode("q", "12345", "t", whole - 2).ids).decode() == conversation("q", "123", "t")
    with pytest.raises(InvalidRequestError, match="no room for the document"):
        encoder.encode("q", "12345", "t", whole - 5)
