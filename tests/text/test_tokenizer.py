import json
import threading

import pytest
import tokenizers
from tokenizers import decoders, models

from roseinfer.core.errors import ConfigError, InvalidRequestError, UnsupportedModelError
from roseinfer.text.tokenizer import DecoderKind, Tokenizer, byte_alphabet, byte_level_bytes
from tests.text import tokenizers as build


@pytest.fixture(scope="module")
def byte_level() -> Tokenizer:
    return build.byte_level()


@pytest.fixture(scope="module")
def byte_fallback() -> Tokenizer:
    return build.byte_fallback()


def test_round_trip(byte_level, byte_fallback):
    text = "hello 日本 😀\n é  "
    for tokenizer in (byte_level, byte_fallback):
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_bos_only_when_asked(byte_level):
    assert byte_level.encode("hello")[0] == byte_level.bos_token_id
    assert byte_level.encode("hello", add_special_tokens=False) == byte_level.encode("hello")[1:]


def test_the_end_of_a_long_text_keeps_what_the_post_processor_adds(byte_level):
    whole = byte_level.encode("hello the world of words")
    assert byte_level.encode("hello the world of words", keep_last=len(whole)) == whole
    assert byte_level.encode("hello the world of words", keep_last=4) == [whole[0], *whole[-3:]]
    assert byte_level.encode("hello the world of words", keep_last=1) == whole[-1:]
    alone = byte_level.encode("hello the world of words", add_special_tokens=False, keep_last=3)
    assert alone == whole[-3:]


def test_spellings_of_a_word(byte_level, byte_fallback):
    """Check a word alone and after a space, without spellings that end in another one."""
    for tokenizer in (byte_level, byte_fallback):
        for word in ("world", "hello", "é", "of words"):
            spellings = tokenizer.spellings(word)
            assert {tokenizer.decode(ids).strip() for ids in spellings} == {word}
            assert tuple(tokenizer.encode(word, add_special_tokens=False)) in spellings
            for ids in spellings:
                assert not [other for other in spellings if other != ids and ids[-len(other) :] == other]
    assert {byte_level.decode(ids) for ids in byte_level.spellings("world")} == {"world", " world"}
    assert {byte_level.decode(ids) for ids in byte_level.spellings(" world")} == {" world"}
    assert {byte_level.decode(ids) for ids in byte_level.spellings("\n")} == {"\n"}, "after a space it is the same"
    assert byte_level.spellings("") == []


def test_special_ids_and_named_tokens(byte_level, byte_fallback):
    assert byte_level.special_ids == frozenset(range(5))
    assert byte_level.decode([1, 2]) == "" and byte_level.decode([1], skip_special_tokens=False) == "<|end|>"
    assert (byte_fallback.bos_token_id, byte_fallback.eos_token_id) == (1, 2)
    assert byte_fallback.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def test_a_token_named_by_the_config_is_special():
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0, "end": 1}, unk_token="a"))
    tokenizer = Tokenizer(backend, {"eos_token": "end", "pad_token": "not in the vocabulary"}, None)
    assert tokenizer.special_ids == {1} and tokenizer.decode([0, 1]) == "a"
    assert tokenizer.vocab_size == 2


def test_vocab_size_counts_up_to_the_largest_id():
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 9}, unk_token="a"))
    assert Tokenizer(backend, {}, None).vocab_size == 10


def test_byte_alphabet_is_the_librarys():
    assert set(byte_alphabet()) == set(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    assert sorted(byte_alphabet().values()) == list(range(256))


def test_bytes_of_byte_level_tokens_are_what_the_library_decodes(byte_level):
    for id in range(byte_level.vocab_size):
        decoded = byte_level.backend.decode([id], skip_special_tokens=False)
        assert byte_level.token_bytes(id).decode(errors="replace") == decoded
    assert byte_level_bytes("Ġé") == b" \xe9" and byte_level_bytes("日é") == "日é".encode()


def test_lone_tokens_for_logprobs(byte_level, byte_fallback):
    euro = "€".encode()
    parts = [id for byte in euro for id in range(byte_level.vocab_size) if byte_level.token_bytes(id) == bytes([byte])]
    assert [byte_level.token_str(id) for id in parts[:3]] == [r"bytes:\xe2", r"bytes:\x82", r"bytes:\xac"]
    assert byte_level.token_str(1) == "<|end|>"
    assert byte_level.token_str(10**6) == "" and byte_level.token_bytes(10**6) == b""
    newline, bad = (byte_fallback.backend.token_to_id(f"<0x{byte}>") for byte in ("0A", "C3"))
    assert byte_fallback.token_str(newline) == "\n" and byte_fallback.token_str(bad) == r"bytes:\xc3"


def test_lone_token_keeps_its_leading_space(byte_fallback):
    hello = byte_fallback.backend.token_to_id("▁h")
    assert byte_fallback.decode([hello]) == "h"
    assert byte_fallback.token_str(hello) == " h" and byte_fallback.token_bytes(hello) == b" h"
    assert build.word_piece().token_str(4) == "s"


def test_truncation_and_padding_of_the_file_are_off(tmp_path):
    tokenizer = build.byte_level()
    tokenizer.backend.enable_truncation(3)
    tokenizer.backend.enable_padding(length=64)
    loaded = Tokenizer.from_folder(build.write_folder(tmp_path, tokenizer, {}))
    assert loaded.decode(loaded.encode("hello world")) == "hello world"
    assert len(loaded.encode("")) == 1


def test_wrong_input_is_a_users_error(byte_level):
    with pytest.raises(InvalidRequestError):
        byte_level.encode("\ud800")
    for ids in ([-1], [2**32], ["a"], [None]):
        with pytest.raises(InvalidRequestError):
            byte_level.decode(ids)


def test_encoding_lets_other_threads_run(byte_level):
    """Check that the event loop runs while a large prompt is encoded."""
    text, ended, turns = "hello world é " * 100_000, threading.Event(), 0
    worker = threading.Thread(target=lambda: (byte_level.encode(text), ended.set()))
    worker.start()
    while not ended.wait(0.001):
        turns += 1
    worker.join()
    assert turns > 10  # with the GIL held throughout: once or twice


def test_from_folder(tmp_path):
    config = {"bos_token": {"content": "<|endoftext|>"}, "eos_token": "<|end|>", "chat_template": "from the config"}
    folder = build.write_folder(tmp_path, build.byte_level(), config)
    loaded = Tokenizer.from_folder(folder)
    assert (loaded.bos_token_id, loaded.eos_token_id, loaded.chat_template) == (0, 1, "from the config")
    (folder / "chat_template.jinja").write_text("from the file")
    assert Tokenizer.from_folder(folder).chat_template == "from the file"
    given = tmp_path / "mine.jinja"
    given.write_text("given")
    assert Tokenizer.from_folder(folder, given).chat_template == "given"
    assert Tokenizer.from_folder(folder, str(given)).chat_template == "given"
    assert Tokenizer.from_folder(folder, "{{ messages }}").chat_template == "{{ messages }}"
    assert Tokenizer.from_folder(folder, "a\nb").chat_template == "a\nb"


def test_named_templates(tmp_path):
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    folder = build.write_folder(tmp_path, build.byte_level(), {"chat_template": named})
    assert Tokenizer.from_folder(folder).chat_template == "d"


def test_without_config(tmp_path):
    folder = build.write_folder(tmp_path, build.byte_level(), {})
    (folder / "tokenizer_config.json").unlink()
    loaded = Tokenizer.from_folder(folder)
    assert (loaded.bos_token_id, loaded.eos_token_id, loaded.chat_template) == (None, None, None)


def test_bad_folders(tmp_path):
    with pytest.raises(UnsupportedModelError, match=r"no tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UnsupportedModelError, match=r"tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)
    build.write_folder(tmp_path, build.byte_level(), {})
    for text in ("{", "[]"):
        (tmp_path / "tokenizer_config.json").write_text(text)
        with pytest.raises(UnsupportedModelError, match=r"tokenizer_config\.json"):
            Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({}))
    with pytest.raises(ConfigError, match="chat_template"):
        Tokenizer.from_folder(tmp_path, tmp_path / "missing.jinja")


def test_kinds_and_the_decoder_that_is_refused(byte_level, byte_fallback):
    assert [byte_level.kind, byte_fallback.kind] == [DecoderKind.BYTE_LEVEL, DecoderKind.BYTE_FALLBACK]
    assert build.word_piece().kind is build.undecorated().kind is DecoderKind.TEXT
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    with pytest.raises(UnsupportedModelError, match="ByteLevel together with"):
        Tokenizer(backend, {}, None)
