"""Both ways of copying leave the same in the cache."""

import json

import pytest
import torch

from benchmarks.kv_cow import Batched, Cache, KvCowConfig, OneByOne, WrongContentsError, main, measure
from roseinfer.attention.kv_store import KVStore


def config(**options: object) -> KvCowConfig:
    small = {"batch_size": 3, "iters": 2, "layers": 2, "heads": 2, "head_dim": 4, "block_size": 4, "threads": 1}
    return KvCowConfig(**{**small, "device": "cpu", **options})


@pytest.mark.parametrize("old_len", [1, 3, 6])
def test_contents(old_len):
    caches = [Cache(config(old_len=old_len), torch.device("cpu"), torch.float32) for _ in range(2)]
    ways = [Batched(caches[0]), OneByOne(caches[1])]
    for _ in range(2):
        copies = [way.step() for way in ways]
        batched, naive = (cache.contents() for cache in caches)
        assert batched.shape == (3, old_len + 1, 2, 2, 2, 4)
        assert torch.equal(batched, naive) and torch.equal(batched, caches[0].expected())
        assert torch.equal(batched[:, -1], caches[0].appended)
        assert len({copy.dst for copy in copies[0]}) == 3 and {copy.tokens for copy in copies[0]} == {old_len % 4}
        for cache, made in zip(caches, copies, strict=True):
            cache.free(made)
            cache.kv.check_integrity()
    assert caches[0].kv.num_free == 3


@pytest.mark.parametrize("options", [{}, {"old_len": 6, "dtype": "bfloat16"}, {"batch_size": 1, "iters": 25}])
def test_measure(options):
    result = measure(config(**options))
    assert result.bookkeeping_us > 0 and result.batched_us > 0 and result.naive_us > 0


def test_wrong_contents_are_noticed(monkeypatch):
    monkeypatch.setattr(KVStore, "copy_blocks", lambda *args: None)
    with pytest.raises(WrongContentsError):
        measure(config())


def test_command(capsys, tmp_path):
    file = tmp_path / "out.json"
    argv = ["--old-len", "1", "--batch-size", "3", "--iters", "7", "--layers", "2", "--threads", "1"]
    assert main([*argv, "--device", "cpu", "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    assert all(word in printed for word in ("hardware:", "batched", "naive", "bookkeeping", "us"))
    result = json.loads(file.read_text())
    assert list(result) == ["batched_us", "naive_us", "bookkeeping_us", "speedup", "versions", "hardware", "args"]
    assert result["speedup"] == pytest.approx(result["naive_us"] / result["batched_us"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--old-len 16", "--old-len"),
        ("--old-len 0", "--old-len"),
        ("--block-size 12", "--block-size"),
        ("--threads 0", "--threads"),
        ("--iters 0", "--iters"),
    ],
)
def test_refused(options, message, capsys):
    assert main(options.split()) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
