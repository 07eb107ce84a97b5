import sys

from benchmarks import kv_host


def test_it_checks_and_times_copies(monkeypatch, capsys):
    shape = ["--layers", "2", "--kv-heads", "1", "--head-dim", "8", "--host-gib", "0.001", "--blocks", "1,4"]
    monkeypatch.setattr(sys, "argv", ["kv_host", *shape])
    kv_host.main()
    out = capsys.readouterr().out
    assert "right: 20 rounds" in out and len([line for line in out.splitlines() if "us a block" in line]) == 2
