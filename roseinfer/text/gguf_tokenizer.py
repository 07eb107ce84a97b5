"""Tokenizer of a GGUF file, rebuilt from its vocabulary.

A file contains tokens and merges, and the name of the rule that splits text before they apply. Only names whose rules
are known exactly are accepted, since an inexact tokenizer gives inexact answers. `--tokenizer` selects another one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from roseinfer.core.errors import UnsupportedModelError
from roseinfer.gguf.reader import GgufFile
from roseinfer.gguf.tokens import GgufVocabulary, TokenKind, read_vocabulary
from roseinfer.text.tokenizer_files import library_errors

_SPACE = "\u2581"  # sentencepiece's replacement of a space
# Limit for tokens of a sentencepiece vocabulary, which are split at every place to find merges. Real ones have at most
# 16 characters.
_MAX_PIECE_CHARS = 256
# Tokens of Phi-3 after which a space counts, as it does not after others.
_KEEPS_SPACE = ("<unk>", "<s>", "<|endoftext|>")

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
# Words whose capitals come first, with what precedes them.
_CASED_WORDS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
)
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = "|".join([*_CASED_WORDS, r"\p{N}", _SIGNS])
_O200K = "|".join([*(f"{word}(?i:'s|'t|'re|'ve|'m|'ll|'d)?" for word in _CASED_WORDS), r"\p{N}{1,3}", _SIGNS])


@dataclass(frozen=True, slots=True)
class _Rule:
    """Treatment of text by a byte-level vocabulary.

    split: pattern of the pieces; None for GPT-2's own. digits: split digits first. whole: take a piece that is a token
    without merges. bos: texts begin with BOS if the file does not say.
    """

    split: str | None = None
    digits: bool = False
    nfc: bool = False
    whole: bool = False
    bos: bool = False


# Rules from the tokenizer.json of the model with this name.
_RULES = {
    "gpt-2": _Rule(),
    "smollm": _Rule(digits=True),
    "llama-bpe": _Rule(_LLAMA3, whole=True, bos=True),
    "llama3": _Rule(_LLAMA3, whole=True, bos=True),
    "llama-v3": _Rule(_LLAMA3, whole=True, bos=True),
    "tekken": _Rule(_TEKKEN, whole=True, bos=True),
    "gpt-4o": _Rule(_O200K, whole=True),
    "qwen2": _Rule(_QWEN2, nfc=True),
    "qwen35": _Rule(_QWEN35, nfc=True),
    "deepseek-r1-qwen": _Rule(_QWEN2, nfc=True),
}


def read_tokenizer(file: GgufFile) -> tuple[tokenizers.Tokenizer, dict[str, Any], str | None]:
    """Return the tokenizer, its tokenizer_config.json, and the chat template.

    Raise `UnsupportedModelError` for a damaged vocabulary, or one whose rules are unknown.
    """
    vocabulary = read_vocabulary(file)
    if vocabulary.model not in _BUILDERS:
        raise _unknown(file, "model", vocabulary.model, list(_BUILDERS))
    with library_errors(f"{file.path}: the tokenizer is damaged: "):
        backend = _BUILDERS[vocabulary.model](file, vocabulary)
        _add_tokens(backend, vocabulary, stripping=_drops_spaces(file, vocabulary))
    template = file.metadata.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise UnsupportedModelError(f"{file.path}: tokenizer.chat_template is not a string")
    config: dict[str, Any] = {name: vocabulary.texts[id] for name, id in vocabulary.named.items()}
    return backend, config, template


def _unknown(file: GgufFile, key: str, value: str | None, known: list[str]) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{file.path}: tokenizer.ggml.{key} = {value!r} is not supported; known: {', '.join(known)}; "
        "select another tokenizer with --tokenizer"
    )


def _ids(vocabulary: GgufVocabulary) -> dict[str, int]:
    """Return the tokens that text can encode to, without unused entries."""
    texts = enumerate(vocabulary.texts)
    return {text: id for id, text in texts if vocabulary.kinds[id] != TokenKind.UNUSED}


def _drops_spaces(file: GgufFile, vocabulary: GgufVocabulary) -> bool:
    """Return True for Phi-3, whose tokenizer.json drops the space after added tokens. Files do not mention it."""
    return file.metadata.get("general.architecture") == "phi3" and vocabulary.model == "llama"


def _add_tokens(backend: tokenizers.Tokenizer, vocabulary: GgufVocabulary, *, stripping: bool) -> None:
    """Add control and user-defined tokens, which are found in a text before it is split.

    stripping: those of chats drop the space after them.
    """
    kinds = list(zip(vocabulary.texts, vocabulary.kinds, strict=True))
    for wanted, special in ((TokenKind.CONTROL, True), (TokenKind.USER_DEFINED, False)):
        tokens = [
            AddedToken(text, normalized=False, special=special, rstrip=stripping and text not in _KEEPS_SPACE)
            for text, kind in kinds
            if kind == wanted
        ]
        (backend.add_special_tokens if special else backend.add_tokens)(tokens)


# --- byte-level BPE -----------------------------------------------------------------------------------------------
def _byte_level(file: GgufFile, vocabulary: GgufVocabulary) -> tokenizers.Tokenizer:
    rule = _RULES.get(vocabulary.pre_tokenizer or "")
    if rule is None:
        raise _unknown(file, "pre", vocabulary.pre_tokenizer, list(_RULES))
    model = models.BPE(_ids(vocabulary), _merges(file, vocabulary), ignore_merges=rule.whole)
    backend = tokenizers.Tokenizer(model)
    if rule.nfc:
        backend.normalizer = normalizers.NFC()
    steps: list[pre_tokenizers.PreTokenizer] = []
    if rule.digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if rule.split is not None:
        steps.append(pre_tokenizers.Split(Regex(rule.split), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=rule.split is None))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    _add_ends(backend, vocabulary, bos=rule.bos)
    return backend


def _merges(file: GgufFile, vocabulary: GgufVocabulary) -> list[tuple[str, str]]:
    """Return the merges as pairs. A token may begin with a space, but contains no other."""
    pairs = []
    for merge in vocabulary.merges:
        left, found, right = merge.partition(" ") if merge[:1] != " " else merge[1:].partition(" ")
        if not found or not right:
            raise UnsupportedModelError(f"{file.path}: tokenizer.ggml.merges holds {merge[:100]!r} (not a pair)")
        pairs.append((left, right))
    return pairs


# --- sentencepiece ------------------------------------------------------------------------------------------------
def _sentencepiece(file: GgufFile, vocabulary: GgufVocabulary) -> tokenizers.Tokenizer:
    """Build a sentencepiece tokenizer. A text, and text after a control token, begins with a space by default."""
    if len(vocabulary.scores) != len(vocabulary.texts):
        raise UnsupportedModelError(f"{file.path}: tokenizer.ggml.scores is missing")
    unknown = vocabulary.named.get("unk_token")
    unk_token = None if unknown is None else vocabulary.texts[unknown]
    merges = _merges(file, vocabulary) or _merges_by_score(file, vocabulary)
    ids = _ids(vocabulary)
    backend = tokenizers.Tokenizer(models.BPE(ids, merges, unk_token=unk_token, fuse_unk=True, byte_fallback=True))
    escape = normalizers.Replace(" ", _SPACE)
    undo = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if vocabulary.add_space_prefix is False:
        backend.normalizer = escape
    else:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), escape])
        undo.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(undo)
    _add_ends(backend, vocabulary, bos=True)
    return backend


def _merges_by_score(file: GgufFile, vocabulary: GgufVocabulary) -> list[tuple[str, str]]:
    """Return every split of every token into two tokens, best token first: sentencepiece joins the pair with the best
    score.
    """
    plain = (TokenKind.NORMAL, TokenKind.USER_DEFINED)
    ids = {text: id for text, id in _ids(vocabulary).items() if vocabulary.kinds[id] in plain}
    ranked = []
    for text, id in ids.items():
        if len(text) > _MAX_PIECE_CHARS:
            raise UnsupportedModelError(f"{file.path}: a token has {len(text)} characters; at most {_MAX_PIECE_CHARS}")
        cuts = [(text[:at], text[at:]) for at in range(1, len(text))]
        found = [(ids[left], ids[right], left, right) for left, right in cuts if left in ids and right in ids]
        ranked += [(-vocabulary.scores[id], id, *cut) for cut in sorted(found)]
    return [(left, right) for *_, left, right in sorted(ranked)]


# --- what is put around a text ------------------------------------------------------------------------------------
def _add_ends(backend: tokenizers.Tokenizer, vocabulary: GgufVocabulary, *, bos: bool) -> None:
    """Add BOS and EOS around texts. `bos`: default of BOS where the file does not say."""
    wanted = {
        "bos_token": bos if vocabulary.add_bos is None else vocabulary.add_bos,
        "eos_token": vocabulary.add_eos or False,
    }
    ids = {name: vocabulary.named.get(name) for name, wants in wanted.items() if wants}
    texts = {name: vocabulary.texts[id] for name, id in ids.items() if id is not None}
    if texts:
        template = [*_piece(texts, "bos_token"), "$A", *_piece(texts, "eos_token")]
        special = [(text, vocabulary.texts.index(text)) for text in texts.values()]
        backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)


def _piece(texts: dict[str, str], name: str) -> list[str]:
    return [texts[name]] if name in texts else []


_BUILDERS: dict[str, Callable[[GgufFile, GgufVocabulary], tokenizers.Tokenizer]] = {
    "gpt2": _byte_level,
    "llama": _sentencepiece,
}
