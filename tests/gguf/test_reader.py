"""Reader of GGUF files on sound, split, damaged and hostile files."""

import os
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roseinfer.core.errors import ModelNotFoundError, UnsupportedModelError
from roseinfer.gguf import files
from roseinfer.gguf.config import config_of
from roseinfer.gguf.files import open_gguf, part_names
from roseinfer.gguf.reader import read_file
from roseinfer.text.gguf_tokenizer import read_tokenizer
from tests.helpers.checkpoints import make_reference
from tests.helpers.gguf_files import as_floats, metadata_of, tensors_of, write, write_model

# Limit for a damaged file of some 100 kB: a table of tensors, texts and the library's copies of them.
MEMORY_BYTES = 16 << 20


def refuse(path: Path, match: str) -> None:
    with pytest.raises(UnsupportedModelError, match=match) as caught:
        open_gguf(path)
    assert "\n" not in str(caught.value)


def header(*, magic: bytes = b"GGUF", version: int = 3, tensors: int = 0, keys: int = 0) -> bytes:
    return magic + struct.pack("<IQQ", version, tensors, keys)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def test_metadata_and_tensor_positions(tmp_path: Path) -> None:
    values = {
        "a.text": "words",
        "a.int": 7,
        "a.float": 0.5,
        "a.flag": True,
        "a.list": ["x", "y z"],
        "a.numbers": [1, 2],
    }
    matrix, vector = np.arange(6, dtype=np.float32).reshape(2, 3), np.ones(5, np.float32)
    tensors = {"matrix": (matrix, "F32"), "vector": (vector, "F32")}
    path = write(tmp_path / "m.gguf", {"general.architecture": "llama", **values}, tensors)
    file = read_file(path)
    assert {key: file.metadata[key] for key in list(values)[:4]} == dict(list(values.items())[:4])
    assert file.strings("a.list") == ["x", "y z"] and file.numbers("a.numbers") == [1, 2]
    assert file.strings("absent") == [] and file.numbers("absent") == []
    for name, (data, _) in tensors.items():
        info = file.tensors[name]
        assert info.shape == data.shape and info.encoding.name == "F32"
        assert path.read_bytes()[info.start : info.start + info.nbytes] == data.tobytes()
    for wrong in (lambda: file.strings("a.numbers"), lambda: file.numbers("a.list"), lambda: file.strings("a.text")):
        with pytest.raises(UnsupportedModelError, match="not a list"):
            wrong()


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"", "this is not a GGUF file: it is empty"),
        (b"PK\x03\x04" + bytes(40), "not a GGUF file"),
        (header(version=1), "version 1 of GGUF"),
        (header(version=3 << 24), "big-endian"),
        (header()[:-3], "truncated or damaged"),
        (header(tensors=2**63), r"9\.22337e\+18 tensors"),
        (header(keys=2**63), "metadata keys"),
        (header(keys=1) + struct.pack("<Q", 2**62), "bytes in one string"),
        (header(keys=1) + struct.pack("<Q", 1000), "1000 bytes expected"),
        (header(keys=1) + text("k") + struct.pack("<IIQ", 9, 8, 2**60), "values in one list"),
        (header(keys=1) + text("k") + struct.pack("<IIQ", 9, 8, 2**20), "truncated or damaged"),
        (header(keys=1) + text("k") + struct.pack("<IIQ", 9, 5, 2**20), r"4\.1943e\+06 bytes expected"),
        (header(keys=1) + text("k") + struct.pack("<IIQ", 9, 9, 1), "a list of lists"),
        (header(keys=1) + text("k") + struct.pack("<I", 77), "of kind 77"),
        (header(keys=1) + struct.pack("<Q", 2) + b"\xff\xfe", "not UTF-8"),
        (header(keys=2) + 2 * (text("k") + struct.pack("<IB", 0, 1)), "contains k twice"),
        (header(keys=1) + text("general.alignment") + struct.pack("<II", 4, 24), "not a power of two"),
        (header(tensors=1) + text("t") + struct.pack("<I", 9), "has 9 dimensions"),
        (header(tensors=1) + text("t") + struct.pack("<IQIQ", 1, 64, 16, 0), "type IQ2_XXS, which is not supported"),
        (header(tensors=1) + text("t") + struct.pack("<IQIQ", 1, 64, 999, 0), "type number 999"),
        (header(tensors=1) + text("t") + struct.pack("<IQIQ", 1, 33, 8, 0), r"\[33\], but Q8_0 has blocks of 32"),
        (header(tensors=1) + text("t") + struct.pack("<IQIQ", 1, 0, 0, 0), r"is \[0\]"),
        (header(tensors=1) + text("t") + struct.pack("<IQIQ", 1, 4, 0, 5), "not a multiple of 32"),
        (
            header(tensors=1) + text("t") + struct.pack("<IQIQ", 1, 9, 0, 0),
            "tensor t ends after the 57 bytes that are there",
        ),
        (header(tensors=1) + text("t") + struct.pack("<IQIQ", 1, 2**62, 0, 0), "the file is truncated"),
        (header(tensors=1) + text("t") + struct.pack("<IQQIQ", 2, 2**60, 2**60, 0, 0), "the file is truncated"),
        (header(tensors=1) + text("t") + struct.pack("<IQIQ", 1, 4, 0, 2**63), "the file is truncated"),
        (header(tensors=2) + 2 * (text("t") + struct.pack("<IQIQ", 1, 1, 0, 0)) + bytes(64), "tensor t twice"),
    ],
)
def test_a_damaged_file_is_refused_with_a_reason(tmp_path: Path, content: bytes, match: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    refuse(path, match)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    refuse(tmp_path / "absent.gguf", "cannot be read: No such file")


# --- a model in several files ---------------------------------------------------------------------------------------
def parts(folder: Path, **changes: Any) -> Path:
    """Write three files as llama.cpp's gguf-split does."""
    reference = make_reference("llama")
    tensors = list(tensors_of(reference, as_floats).items())
    metadata = metadata_of(reference, 99)
    for number, name in enumerate(part_names("m-00001-of-00003.gguf")):
        own = {"split.no": number, "split.count": 3, "split.tensors.count": len(tensors)} | changes
        first = {key: value for key, value in metadata.items() if number == 0 or key == "general.architecture"}
        write(folder / name, {**first, **own}, dict(tensors[number::3]))
    return folder / "m-00001-of-00003.gguf"


def test_split_files_are_one_model(tmp_path: Path) -> None:
    whole = open_gguf(write_model(tmp_path / "m.gguf", make_reference("llama")))
    split = open_gguf(parts(tmp_path))
    assert split.tensors.keys() == whole.tensors.keys()
    assert len({info.path for info in split.tensors.values()}) == 3
    for name, info in split.tensors.items():
        content = info.path.read_bytes()[info.start : info.start + info.nbytes]
        other = whole.tensors[name]
        assert content == whole.path.read_bytes()[other.start : other.start + other.nbytes]


def test_parts_that_do_not_match_are_refused(tmp_path: Path) -> None:
    first = parts(tmp_path)
    refuse(tmp_path / "m-00002-of-00003.gguf", r"use the first part, m-00001-of-00003\.gguf")
    first.rename(tmp_path / "renamed.gguf")
    refuse(tmp_path / "renamed.gguf", "split.count is 3, but the file's name says 1")
    (tmp_path / "renamed.gguf").rename(first)
    (tmp_path / "m-00002-of-00003.gguf").write_bytes((tmp_path / "m-00003-of-00003.gguf").read_bytes())
    refuse(first, "split.no is 2, but its name says 1")
    (tmp_path / "m-00002-of-00003.gguf").unlink()
    with pytest.raises(ModelNotFoundError, match=r"m-00002-of-00003\.gguf is missing in its folder"):
        open_gguf(first)
    refuse(parts(tmp_path, **{"split.tensors.count": 5}), r"split\.tensors\.count is 5")
    with pytest.raises(UnsupportedModelError, match="99999 parts"):
        part_names("m-00001-of-99999.gguf")


# --- damage of any kind ---------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Return a whole model with a vocabulary; metadata and table of tensors are about half of the file."""
    sizes = {"hidden_size": 8, "intermediate_size": 8, "head_dim": 2}
    path = tmp_path_factory.mktemp("sound") / "m.gguf"
    return write_model(path, make_reference("llama", **sizes)).read_bytes()


def read_all(path: Path) -> None:
    """Read everything but the weights. Only `UnsupportedModelError` may be raised."""
    tracemalloc.start()
    try:
        file = open_gguf(path)
        config_of(file)
        read_tokenizer(file)
    except UnsupportedModelError as error:
        assert len(str(error)) < 2000 and str(error).isprintable()
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < MEMORY_BYTES


HOSTILE = st.sampled_from([b"\xff" * 8, b"\x00" * 8, b"\x80", b"\xff\xff\xff\x7f", b"\x00\x00\x00\x80\x00\x00\x00\x00"])


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_damage_costs_only_a_message(
    data: st.DataObject, sound: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Change, remove and insert bytes, or truncate the file."""
    content = bytearray(sound)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, max(0, len(content) - 1)))
        kind = data.draw(st.sampled_from(["replace", "insert", "remove", "cut"]))
        bytes_ = data.draw(HOSTILE | st.binary(min_size=1, max_size=8))
        if kind == "replace":
            content[at : at + len(bytes_)] = bytes_
        elif kind == "insert":
            content[at:at] = bytes_
        elif kind == "remove":
            del content[at : at + len(bytes_)]
        else:
            del content[max(1, at) :]
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    path.write_bytes(content)
    read_all(path)


@settings(max_examples=50, deadline=None)
@given(content=st.binary(max_size=300), keys=st.integers(0, 2**64 - 1), tensors=st.integers(0, 2**64 - 1))
def test_random_bytes_after_a_header(
    content: bytes, keys: int, tensors: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "random.gguf"
    path.write_bytes(header(tensors=tensors, keys=keys) + content)
    read_all(path)


def test_a_file_is_read_once_until_it_changes(sound: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Path] = []
    monkeypatch.setattr(files, "read_file", lambda path: read.append(path) or read_file(path))
    path = tmp_path / "m.gguf"
    path.write_bytes(sound)
    assert open_gguf(path) == open_gguf(path) and len(read) == 1
    path.write_bytes(sound + b"more")
    open_gguf(path)
    os.utime(path, ns=(1, 1))
    open_gguf(path)
    assert len(read) == 3
    path.unlink()
    refuse(path, "cannot be read")


def test_a_sound_file_is_read(sound: bytes, tmp_path: Path) -> None:
    """Check that the property's file is valid before it is changed."""
    path = tmp_path / "m.gguf"
    path.write_bytes(sound)
    file = open_gguf(path)
    assert config_of(file)["vocab_size"] == 99
    assert read_tokenizer(file)[0].get_vocab_size() == 99
