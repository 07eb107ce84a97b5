"""Tokenizers from GGUF files, compared with their originals and with sentencepiece's own rule."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

from roseinfer.core.errors import ConfigError, UnsupportedModelError
from roseinfer.text.chat import ChatTemplate
from roseinfer.text.tokenizer import DecoderKind, Tokenizer
from tests.helpers.gguf_files import vocabulary, write

CORPUS = [
    "The quick brown fox jumps over the lazy dog; it'll do so 1234567 times, DON'T ask why.",
    "def f(x):\n    return x + 1  # caf\u00e9, na\u00efve, \u4e2d\u6587, \U0001f389\n\n\n\tprint('it''s')\r\n",
] * 20
TEXTS = st.text(st.sampled_from("the fox'LlDN 0123456789\n\r\t.,!?()_\u00e9e\u0301\u4e2d\u2581\U0001f389")) | st.text()
SPLITS = {
    "llama-bpe": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    "qwen2": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    "qwen35": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    "gpt-4o": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}


def trained(name: str) -> tokenizers.Tokenizer:
    """Return a byte-level tokenizer with the rules of the models that use this name."""
    backend = tokenizers.Tokenizer(models.BPE(ignore_merges=name in ("llama-bpe", "gpt-4o")))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=name not in SPLITS)
    before: list[Any] = []
    if name in SPLITS:
        before = [pre_tokenizers.Split(Regex(SPLITS[name]), behavior="isolated")]
    if name == "smollm":
        before = [pre_tokenizers.Digits(individual_digits=True)]
    backend.pre_tokenizer = pre_tokenizers.Sequence([*before, byte_level])
    backend.decoder = decoders.ByteLevel()
    if name in ("qwen2", "qwen35"):
        backend.normalizer = normalizers.NFC()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=sorted(alphabet)))
    backend.add_special_tokens([AddedToken("<|end|>", normalized=False), AddedToken("<s>", normalized=False)])
    backend.add_tokens([AddedToken("<think>", normalized=False)])
    if name == "llama-bpe":
        ids = [("<s>", backend.token_to_id("<s>"))]
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=ids)
    return backend


def metadata_of(backend: tokenizers.Tokenizer, name: str) -> dict[str, Any]:
    model = json.loads(backend.to_str())["model"]
    vocab = backend.get_vocab(with_added_tokens=True)
    tokens = sorted(vocab, key=lambda text: vocab[text])
    kinds = {"<|end|>": 3, "<s>": 3, "<think>": 4}
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": name,
        "tokenizer.ggml.tokens": [*tokens, "[PAD1]"],
        "tokenizer.ggml.token_type": [kinds.get(token, 1) for token in tokens] + [5],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "tokenizer.ggml.bos_token_id": vocab["<s>"],
        "tokenizer.ggml.eos_token_id": vocab["<|end|>"],
    }


def save(path: Path, metadata: dict[str, Any]) -> Path:
    kept = {key: value for key, value in metadata.items() if value is not None}
    return write(path, kept, {"t": (np.ones(1, np.float32), "F32")})


@pytest.mark.parametrize("name", ["gpt-2", "smollm", "llama-bpe", "qwen2", "qwen35", "gpt-4o"])
def test_byte_level_texts_get_the_same_ids(name: str, tmp_path: Path) -> None:
    original = trained(name)
    ours = Tokenizer.from_folder(save(tmp_path / "m.gguf", metadata_of(original, name)))
    assert ours.kind is DecoderKind.BYTE_LEVEL
    assert ours.special_tokens == {"bos_token": "<s>", "eos_token": "<|end|>"}
    assert ours.special_ids == {original.token_to_id("<s>"), original.token_to_id("<|end|>")}
    assert ours.backend.token_to_id("[PAD1]") is None

    @settings(max_examples=100, deadline=None)
    @given(text=TEXTS)
    @example(text="I'LL see 12345 of them<|end|>\n\n   x<think>ok</think>  e\u0301 don't\r\n")
    @example(text=CORPUS[0] + CORPUS[1])
    def same(text: str) -> None:
        expected = original.encode(text).ids
        assert ours.encode(text) == expected
        assert ours.decode(expected) == original.decode(expected)

    same()


def test_bos_and_eos_follow_the_file(tmp_path: Path) -> None:
    metadata = metadata_of(trained("gpt-2"), "gpt-2")
    bos, eos = metadata["tokenizer.ggml.bos_token_id"], metadata["tokenizer.ggml.eos_token_id"]
    for add, expected in ((None, ()), (True, (bos,)), (False, ())):
        changed = {**metadata, "tokenizer.ggml.add_bos_token": add}
        tokenizer = Tokenizer.from_folder(save(tmp_path / "m.gguf", changed))
        plain = tokenizer.encode("fox", add_special_tokens=False)
        assert tokenizer.encode("fox") == [*expected, *plain]
    changed = {**metadata, "tokenizer.ggml.add_eos_token": True}
    assert Tokenizer.from_folder(save(tmp_path / "m.gguf", changed)).encode("fox") == [*plain, eos]


# --- sentencepiece ------------------------------------------------------------------------------------------------
PIECES = [
    "\u2581",
    "t",
    "h",
    "e",
    "f",
    "o",
    "x",
    "\u2581t",
    "th",
    "he",
    "\u2581th",
    "\u2581the",
    "ox",
    "fo",
    "fox",
    "ee",
]
SCORES = {
    "\u2581t": -1.0,
    "he": -2.0,
    "th": -3.0,
    "\u2581the": -4.0,
    "\u2581th": -5.0,
    "ox": -6.0,
    "fox": -7.0,
    "fo": -8.0,
}


def pieces(**changes: Any) -> dict[str, Any]:
    special, bytes_ = ["<unk>", "<s>", "</s>"], [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = [*special, *bytes_, *PIECES]
    metadata = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * len(PIECES)],
        "tokenizer.ggml.scores": [float(SCORES.get(token, -100.0)) for token in tokens],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    return metadata | changes


def joined_by_score(text: str, prefix: bool) -> list[str]:
    """Apply sentencepiece's rule: join the neighbours that make the piece with the best score, left ones first."""
    known = set(PIECES)
    left = list(("\u2581" if prefix and text else "") + text.replace(" ", "\u2581"))
    while True:
        found = [(-SCORES.get(a + b, -100.0), i) for i, (a, b) in enumerate(pairwise(left)) if a + b in known]
        if not found:
            break
        _, at = min(found)
        left[at : at + 2] = [left[at] + left[at + 1]]
    return [piece for part in left for piece in ([part] if part in known else [f"<0x{b:02X}>" for b in part.encode()])]


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_joins_the_best_first(prefix: bool, tmp_path: Path) -> None:
    path = save(tmp_path / "m.gguf", pieces(**{"tokenizer.ggml.add_space_prefix": prefix}))
    ours = Tokenizer.from_folder(path)
    assert ours.kind is DecoderKind.BYTE_FALLBACK and ours.encode("x")[0] == 1

    @settings(max_examples=100, deadline=None)
    @given(text=st.text(st.sampled_from("thefox \u00e9\U0001f389\n")))
    @example(text="the fox  then")
    def same(text: str) -> None:
        ids = ours.encode(text, add_special_tokens=False)
        assert [ours.backend.id_to_token(id) for id in ids] == joined_by_score(text, prefix)
        assert ours.decode(ids) == text

    same()


def test_a_piece_follows_a_control_token(tmp_path: Path) -> None:
    """Check control tokens of a chat template: text after one begins like a new text."""
    ours = Tokenizer.from_folder(save(tmp_path / "m.gguf", pieces()))
    assert [ours.backend.id_to_token(id) for id in ours.encode("the</s>fox")] == [
        "<s>",
        "\u2581the",
        "</s>",
        "\u2581",
        "fox",
    ]


def test_phi_3_has_no_space_after_its_control_tokens(tmp_path: Path) -> None:
    """Check chats of Phi-3, whose tokenizer drops the space after control tokens, except around whole texts."""
    names = ["<unk>", "<s>", "</s>", "<|endoftext|>", "<|user|>"]
    tokens = [*names, *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
    changes = {
        "general.architecture": "phi3",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [2, 3, 4, 3, 3, *[6] * 256, *[1] * len(PIECES)],
        "tokenizer.ggml.scores": [float(SCORES.get(token, -100.0)) for token in tokens],
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.eos_token_id": 3,
    }
    phi = Tokenizer.from_folder(save(tmp_path / "m.gguf", pieces(**changes)))

    def split(text: str) -> list[str | None]:
        return [phi.backend.id_to_token(id) for id in phi.encode(text)]

    assert split("<|user|>\n the") == ["<|user|>", "\u2581the"] and split("</s> the") == ["</s>", "\u2581the"]
    for name in ("<s>", "<|endoftext|>"):
        assert split(f"{name} the") == [name, "\u2581", "\u2581the"]
    llama = Tokenizer.from_folder(save(tmp_path / "m.gguf", pieces(**changes | {"general.architecture": "llama"})))
    assert llama.encode("<|user|> the") == [4, *phi.encode("<s> the")[1:]]


def test_chats_of_gemma_have_no_space_after_their_control_tokens(tmp_path: Path) -> None:
    """Check a vocabulary without a space before texts, whose runs of spaces and lines are tokens of their own."""
    names = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>", "  ", "   ", "\n", "\n\n"]
    tokens = [*names, *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
    changes = {
        "general.architecture": "gemma3",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, 3, 3, 3, 3, 4, 4, 4, 4, *[6] * 256, *[1] * len(PIECES)],
        "tokenizer.ggml.scores": [float(SCORES.get(token, -1000.0)) for token in tokens],
        "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 3,
    }
    gemma = Tokenizer.from_folder(save(tmp_path / "m.gguf", pieces(**changes)))
    text = "<start_of_turn>the fox\n\n\nthe    fox<end_of_turn>\n"
    ids = gemma.encode(text)
    found = [gemma.backend.id_to_token(id) for id in ids]
    first = ["<bos>", "<start_of_turn>", "t", "he", "\u2581", "fox", "\n\n", "\n"]
    assert found == [*first, "t", "he", "   ", "\u2581", "fox", "<end_of_turn>", "\n"]
    assert gemma.decode(ids, skip_special_tokens=False) == "<bos>" + text


# --- templates and refusals -----------------------------------------------------------------------------------------
def test_the_chat_template_is_read(tmp_path: Path) -> None:
    template = "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}<|end|>{% endfor %}{{ eos_token }}"
    metadata = {**metadata_of(trained("gpt-2"), "gpt-2"), "tokenizer.chat_template": template}
    path = save(tmp_path / "m.gguf", metadata)
    chat = ChatTemplate.from_tokenizer(Tokenizer.from_folder(path))
    assert chat is not None
    messages = [{"role": "user", "content": "the fox</s>"}]
    assert chat.render(messages) == "<s>user: the fox</s><|end|><|end|>"
    (tmp_path / "own.jinja").write_text("own")
    assert Tokenizer.from_folder(path, tmp_path / "own.jinja").chat_template == "own"
    with pytest.raises(ConfigError, match="chat_template"):
        Tokenizer.from_folder(path, tmp_path / "absent.jinja")


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"tokenizer.ggml.model": "bert"}, r"tokenizer\.ggml\.model = 'bert' is not supported; known: gpt2, llama"),
        (
            {"tokenizer.ggml.pre": "default"},
            r"tokenizer\.ggml\.pre = 'default' is not supported; known: gpt-2, .*another",
        ),
        ({"tokenizer.ggml.pre": None}, r"tokenizer\.ggml\.pre = None is not supported"),
        ({"tokenizer.ggml.merges": ["ab"]}, "merges holds 'ab' \\(not a pair\\)"),
        ({"tokenizer.ggml.merges": ["zz zz"]}, "the tokenizer is damaged"),
        ({"tokenizer.chat_template": 3}, r"tokenizer\.chat_template is not a string"),
        ({"tokenizer.ggml.remove_extra_whitespaces": True}, "remove_extra_whitespaces = True"),
        ({"tokenizer.ggml.model": "llama"}, r"tokenizer\.ggml\.scores is missing"),
    ],
)
def test_refused_by_name(tmp_path: Path, changes: dict[str, Any], match: str) -> None:
    path = save(tmp_path / "m.gguf", {"general.architecture": "gpt2", **vocabulary(50), **changes})
    with pytest.raises(UnsupportedModelError, match=match):
        Tokenizer.from_folder(path)


def test_pieces_that_are_too_long(tmp_path: Path) -> None:
    tokens = [*pieces()["tokenizer.ggml.tokens"][:-1], "x" * 300]
    path = save(tmp_path / "m.gguf", pieces(**{"tokenizer.ggml.tokens": tokens}))
    with pytest.raises(UnsupportedModelError, match="a token has 300 characters"):
        Tokenizer.from_folder(path)
