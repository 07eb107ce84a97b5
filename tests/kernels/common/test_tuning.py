"""Tuning tables: a strict reader, and the same choices as those that were measured."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from itertools import product
from pathlib import Path

import pytest
import torch

from roseinfer.kernels.attention.decode_config import choose_decode_config
from roseinfer.kernels.common.tuning import TuningError, TuningTable
from roseinfer.kernels.experts.tile_configs import choose_experts_config
from roseinfer.kernels.linear.fp8_tile_configs import choose_tile_config
from roseinfer.kernels.linear.skinny_configs import choose_config
from roseinfer.kernels.linear.skinny_fp8_configs import choose_fp8_config

BUCKETS = (1, 2, 4, 8, 16)
# Weights of GPT-2, Qwen3-0.6B, Qwen3-8B and Qwen3-30B-A3B, and two that no entry has.
WEIGHTS = [
    *[(2304, 768), (768, 768), (3072, 768), (768, 3072), (50304, 768), (4096, 1024), (1024, 2048), (6144, 1024)],
    *[(1024, 3072), (151936, 1024), (6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288), (151936, 4096)],
    *[(5120, 2048), (2048, 4096), (896, 896), (128, 1664)],
]
ROWS = (1, 8, 16, 17, 32, 50, 64, 100, 128, 160, 192, 256, 300, 384, 500, 576, 700, 832, 1000, 1088, 1089)
BOTH = (False, True)


def skinny() -> Iterator[object]:
    for bucket, weight, gated in product(BUCKETS, WEIGHTS, BOTH):
        yield choose_config(bucket, *weight, gated)


def skinny_fp8() -> Iterator[object]:
    for bucket, weight, gated, blocks in product(BUCKETS, WEIGHTS, BOTH, BOTH):
        yield choose_fp8_config(bucket, *weight, gated, blocks=blocks)


def fp8_tiles() -> Iterator[object]:
    for rows, weight, blocks in product(ROWS, WEIGHTS, BOTH):
        yield choose_tile_config(rows, *weight, blocks=blocks)


def experts() -> Iterator[object]:
    for tokens, width, codes in product((1, 8, 47, 48, 49, 160, 161, 384, 896, 4096, 4097, 8192), (768, 1536), BOTH):
        yield choose_experts_config(tokens, 8, 128, width, codes=codes)


def decode() -> Iterator[object]:
    for group, dim, dtype in product((1, 4), (16, 64, 80, 96, 128, 192, 256), (torch.bfloat16, torch.float32)):
        for fp8 in BOTH if dtype is torch.bfloat16 else (False,):
            yield choose_decode_config(group, dim, dtype, fp8=fp8)


# Digests of what the tables at commit a429295b chose, where they were Python code. Measuring a table again changes its
# digest, as does another rule for other weights: 2026-11-28, FP8 for one row, and tiles by blocks.
@pytest.mark.parametrize(
    ("choices", "digest"),
    [
        (skinny, "6d24bb501eafb4ea"),
        (skinny_fp8, "a8758b9c0de2c85c"),
        (fp8_tiles, "1925d7cc661aa1c3"),
        (experts, "133ccab85587bb21"),
        (decode, "bfe766e7ad7973ad"),
    ],
)
def test_choices_are_those_that_were_measured(choices, digest):
    lines = [repr(None if config is None else astuple(config)) for config in choices()]
    assert len(set(lines)) > 5
    assert hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16] == digest


@dataclass(frozen=True)
class Inner:
    width: int


@dataclass(frozen=True)
class Config:
    size: int
    flag: bool
    inner: Inner = Inner(1)


SHAPE = {"rows": 4, "gated": False}
ENTRY = {"shape": SHAPE, "kernel": "ours", "config": {"size": 1, "flag": True, "inner": {"width": 3}}, "us": 1.5}


def table(folder: Path, *entries: object, **document: object) -> "TuningTable[Config]":
    path = folder / "table.json"
    path.write_text(json.dumps({"measured": "a GPU", "entries": entries} | document))
    return TuningTable(path, {"rows": int, "gated": bool}, {"ours": Config})


def test_an_entry_goes_before_the_rule(tmp_path):
    library = {"shape": {"rows": 8, "gated": False}, "kernel": "library"}
    found = table(tmp_path, ENTRY, library)
    assert found.choose((4, False), lambda rows, gated: pytest.fail("measured")) == Config(1, True, Inner(3))
    assert found.choose((8, False), lambda rows, gated: pytest.fail("measured")) is None
    assert found.choose((16, True), lambda rows, gated: Config(rows, gated)) == Config(16, True)
    assert list(found.entries) == [(4, False), (8, False)]


def test_the_file_is_read_when_it_is_needed(tmp_path):
    absent = TuningTable(tmp_path / "absent.json", {"rows": int}, {"ours": Config})
    with pytest.raises(FileNotFoundError):
        absent.choose((1,), lambda rows: None)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ([], "is not an object"),
        (ENTRY | {"speed": 1}, "unknown names: speed"),
        (ENTRY | {"shape": {"rows": 4}}, "missing names: gated"),
        (ENTRY | {"shape": SHAPE | {"columns": 4}}, "unknown names: columns"),
        (ENTRY | {"shape": SHAPE | {"rows": "4"}}, "rows: '4' has another type than int"),
        (ENTRY | {"shape": SHAPE | {"rows": True}}, "rows: True has another type than int"),
        (ENTRY | {"kernel": "theirs"}, r"unknown kernel 'theirs' \(known: ours, library\)"),
        (ENTRY | {"kernel": "library"}, "has a config and the kernel 'library'"),
        ({"shape": SHAPE, "kernel": "ours"}, "or neither"),
        (ENTRY | {"config": {"size": 1}}, "missing names: flag"),
        (ENTRY | {"config": {"size": 1, "flag": 1}}, "flag: 1 has another type than bool"),
        (ENTRY | {"config": {"size": 1, "flag": True, "inner": {"width": 1.5}}}, "width: 1.5 has another type"),
        (ENTRY | {"config": {"size": 1, "flag": True, "inner": {}}}, "missing names: width"),
    ],
)
def test_an_entry_that_does_not_fit_is_an_error(tmp_path, entry, message):
    with pytest.raises(TuningError, match=f"table.json.*{message}"):
        table(tmp_path, entry).choose((1, False), lambda rows, gated: None)


def test_a_file_that_does_not_fit_is_an_error(tmp_path):
    for document in ({"model": "x"}, {"entries": None}, {"entries": [ENTRY, ENTRY]}):
        with pytest.raises(TuningError, match="invalid tuning table"):
            assert table(tmp_path, **document).entries
    for text in ("{", "[]", '{"measured": "", "entries": [], "entries": []}'):
        found = table(tmp_path)
        (tmp_path / "table.json").write_text(text)
        with pytest.raises(TuningError, match="invalid tuning table"):
            assert found.entries
