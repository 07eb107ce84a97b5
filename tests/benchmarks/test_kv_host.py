import sys

import pytest

from benchmarks import kv_host


def test_it_checks_and_times_copies(monkeypatch, capsys):
    shape = ["--layers", "2", "--kv-heads", "1", "--head-dim", "8", "--host-gib", "0.001", "--blocks", "1,4"]
    monkeypatch.setattr(sys, "argv", ["kv_host", *shape])
    kv_host.main()
    out = capsys.readouterr().out
    assert "right: 20 rounds" in out and len([line for line in out.splitlines() if "us a block" in line]) == 2


def test_too_little_host_memory_is_told(monkeypatch):
    shape = ["--layers", "2", "--kv-heads", "1", "--head-dim", "8", "--host-gib", "0.00002", "--blocks", "1,16"]
    monkeypatch.setattr(sys, "argv", ["kv_host", *shape])
    with pytest.raises(SystemExit, match="--host-gib: 32 blocks take"):
        kv_host.main()
