"""Vocabulary in a GGUF file."""

from dataclasses import dataclass
from enum import IntEnum
from math import isfinite

from roseinfer.core.errors import UnsupportedModelError
from roseinfer.gguf.metadata import MetadataFields
from roseinfer.gguf.reader import GgufFile

_KEY = "tokenizer.ggml"
# Tokens that end an answer. A file names only one, but chats of Llama 3, Phi-3 and Gemma end with another than texts.
# Only control tokens count, since users' text never encodes to them.
_ENDINGS = frozenset(
    {"<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>"}
)
# Tokens that end an answer of gpt-oss. In files with both, the third ends only a message of an answer.
_HARMONY_ENDINGS = frozenset({"<|return|>", "<|call|>"})
_MESSAGE_END = "<|end|>"
# Control tokens of Gemma's chats, which some files list as text.
_TURNS = frozenset({"<start_of_turn>", "<end_of_turn>"})
# Names in chat templates, and in keys of the metadata.
_NAMED = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


class TokenKind(IntEnum):
    """Kinds of tokens, numbered as in sentencepiece."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufVocabulary:
    """Texts, kinds and scores by id; merges as "left right" in their order. `scores` and `merges` may be empty.

    `model`: "gpt2" (byte-level BPE) or "llama" (sentencepiece). `named`: ids of bos_token and others. `add_bos`,
    `add_eos` and `add_space_prefix` are None where the file has no such key.
    """

    model: str
    pre_tokenizer: str | None
    texts: list[str]
    kinds: list[int]
    scores: list[float]
    merges: list[str]
    named: dict[str, int]
    endings: tuple[int, ...]
    add_bos: bool | None
    add_eos: bool | None
    add_space_prefix: bool | None


def read_vocabulary(file: GgufFile) -> GgufVocabulary:
    """Read the vocabulary. Raise `UnsupportedModelError` if it is missing or contradicts itself."""
    fields = MetadataFields(file)
    model = fields.needed_text(f"{_KEY}.model")
    texts = file.strings(f"{_KEY}.tokens")
    if not texts:
        raise UnsupportedModelError(f"{file.path}: {_KEY}.tokens is missing")
    if len(set(texts)) != len(texts):
        raise UnsupportedModelError(f"{file.path}: {_KEY}.tokens contains a token twice")
    kinds = _kinds(file) or [TokenKind.NORMAL.value] * len(texts)
    scores = [float(score) for score in file.numbers(f"{_KEY}.scores")]
    if not all(map(isfinite, scores)):
        raise UnsupportedModelError(f"{file.path}: {_KEY}.scores holds NaN or infinity")
    for name, values in (("token_type", kinds), ("scores", scores)):
        if values and len(values) != len(texts):
            raise UnsupportedModelError(f"{file.path}: {_KEY}.{name} has {len(values)} values for {len(texts)} tokens")
    kinds = [TokenKind.CONTROL.value if text in _TURNS else kind for text, kind in zip(texts, kinds, strict=True)]
    if fields.flag(f"{_KEY}.remove_extra_whitespaces"):
        fields.refuse(f"{_KEY}.remove_extra_whitespaces")
    return GgufVocabulary(
        model=model,
        pre_tokenizer=fields.text(f"{_KEY}.pre"),
        texts=texts,
        kinds=kinds,
        scores=scores,
        merges=file.strings(f"{_KEY}.merges"),
        named=_named(fields, len(texts)),
        endings=_endings(fields, texts, kinds),
        add_bos=fields.flag(f"{_KEY}.add_bos_token"),
        add_eos=fields.flag(f"{_KEY}.add_eos_token"),
        add_space_prefix=fields.flag(f"{_KEY}.add_space_prefix"),
    )


def _kinds(file: GgufFile) -> list[int]:
    found = file.numbers(f"{_KEY}.token_type")
    kinds = [kind for kind in found if isinstance(kind, int)]
    if len(kinds) < len(found):
        raise UnsupportedModelError(f"{file.path}: {_KEY}.token_type contains a value that is not an integer")
    return kinds


def _named(fields: MetadataFields, count: int) -> dict[str, int]:
    found = {name: _id(fields, f"{_KEY}.{called}_token_id", count) for name, called in _NAMED.items()}
    return {name: id for name, id in found.items() if id is not None}


def _endings(fields: MetadataFields, texts: list[str], kinds: list[int]) -> tuple[int, ...]:
    """Return the ids that end an answer: those that the file names, then the known ones."""
    named = [_id(fields, f"{_KEY}.{called}_token_id", len(texts)) for called in ("eos", "eot", "eom")]
    control = {text: id for id, text in enumerate(texts) if kinds[id] == TokenKind.CONTROL}
    endings = _ENDINGS
    if control.keys() >= _HARMONY_ENDINGS:
        endings = (endings | _HARMONY_ENDINGS) - {_MESSAGE_END}
        named = [id for id in named if id != control.get(_MESSAGE_END)]
    known = [id for text, id in control.items() if text in endings]
    return tuple(dict.fromkeys(id for id in (*named, *known) if id is not None))


def _id(fields: MetadataFields, key: str, count: int) -> int | None:
    id = fields.integer(key)
    if id is not None and not 0 <= id < count:
        fields.refuse(key, f"the file has {count} tokens")
    return id
