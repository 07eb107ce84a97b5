import json
import sys

from benchmarks import kv_host_sim


def test_the_same_requests_with_and_without(monkeypatch, capsys, tmp_path):
    """Two conversations in turn, of which the cache holds one."""
    trace, out = tmp_path / "trace.jsonl", tmp_path / "out.json"
    turns = [(number, number % 2) for number in range(12)]
    lines = [
        {
            "timestamp": 6000 * at,
            "input_length": 512 * (2 + at // 2),
            "output_length": 8,
            "hash_ids": [100 * of + block for block in range(2 + at // 2)],
        }
        for at, of in turns
    ]
    lines.append({"timestamp": 70_000, "input_length": 99_999, "output_length": 9, "hash_ids": []})
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    sizes = [
        "--kv-blocks",
        "260",
        "--host-blocks",
        "0,4000",
        "--policies",
        "slack",
        "--speeds",
        "1",
        "--context",
        "4096",
    ]
    sizes += ["--part", "1"]
    monkeypatch.setattr(sys, "argv", ["kv_host_sim", str(trace), *sizes, "--json", str(out)])
    kv_host_sim.main()
    assert len(capsys.readouterr().out.strip().splitlines()) >= 3
    without, beside = json.loads(out.read_text())["rows"]
    assert without["stored"] == 0 and without["from host"] == "0.0%"
    assert beside["stored"] > 0
