"""`bench compare` with saved results of ours and of other servers."""

import json

import pytest

from roseinfer.bench.compare import changes, read_figures
from roseinfer.cli import main as cli
from roseinfer.core.errors import ConfigError

SAVED = {
    "date": "20260101-000000",
    "backend": "vllm",
    "completed": 10,
    "failed": 0,
    "duration": 4.0,
    "request_throughput": 2.5,
    "request_goodput": None,
    "latencies": [1.0],
    "mean_ttft_ms": 20.0,
    "median_ttft_ms": 18.0,
    "p99_ttft_ms": 50.0,
    "std_ttft_ms": 1.0,
    "p99_itl_ms": 9.0,
}


def test_what_changed_is_printed_with_its_sign(tmp_path, capsys):
    before, after = tmp_path / "a.json", tmp_path / "b.json"
    before.write_text(json.dumps(SAVED))
    faster = {**SAVED, "request_throughput": 5.0, "p99_ttft_ms": 75.0, "failed": 1}
    after.write_text(json.dumps({"old": 1}) + "\n" + json.dumps(faster))
    assert cli.main(["bench", "compare", str(before), str(after)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()[3:]]
    assert lines == [
        ["completed", "10.00", "10.00", "+0.0%"],
        ["failed", "0.00", "1.00", "-", "worse"],
        ["duration", "4.00", "4.00", "+0.0%"],
        ["request_throughput", "2.50", "5.00", "+100.0%", "better"],
        ["mean_ttft_ms", "20.00", "20.00", "+0.0%"],
        ["median_ttft_ms", "18.00", "18.00", "+0.0%"],
        ["p99_ttft_ms", "50.00", "75.00", "+50.0%", "worse"],
        ["std_ttft_ms", "1.00", "1.00", "+0.0%"],
        ["p99_itl_ms", "9.00", "9.00", "+0.0%"],
    ]


def test_our_own_json_has_the_same_figures_by_other_names(tmp_path):
    summary = {"ok": 3, "failed": 1, "rejected": 2, "req_s": 2.0, "ttft_ms": {"p50": 9.0, "p99": None}}
    file = tmp_path / "own.json"
    file.write_text(json.dumps({"label": "", "summary": summary}))
    figures = read_figures(str(file))
    assert figures == {"completed": 3, "failed": 3, "request_throughput": 2.0, "median_ttft_ms": 9.0}
    assert [row["figure"] for row in changes(figures, {"median_ttft_ms": 1.0, "failed": 0.0})] == [
        "failed",
        "median_ttft_ms",
    ]


@pytest.mark.parametrize("text", ["", "[]", '{"a": 1}', "{"])
def test_a_file_that_is_no_result(tmp_path, text):
    file = tmp_path / "other.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"other\.json' is not"):
        read_figures(str(file))


def test_a_file_that_is_not_there(capsys):
    assert cli.main(["bench", "compare", "/nowhere/a", "/nowhere/b"]) == 2
    assert "cannot read '/nowhere/a'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"completed": 1' + "0" * 400 + "}",
        '{"completed": Infinity, "duration": NaN}',
        '{"p._ttft_ms": 1, "p9.9.9_ttft_ms": 2}',
        '{"summary": {"ok": "a", "failed": "b", "rejected": 1, "ttft_ms": [1], "tpot_ms": {"odd": 1}}}',
    ],
    ids=["deep", "huge", "infinite", "names", "summary"],
)
def test_odd_files_are_no_results(tmp_path, text):
    path = tmp_path / "odd.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"is not a result|is not a JSON object"):
        read_figures(str(path))


def test_results_without_a_figure_in_common(tmp_path, capsys):
    before, after = tmp_path / "a.json", tmp_path / "b.json"
    before.write_text('{"completed": 1}')
    after.write_text('{"failed": 1}')
    assert cli.main(["bench", "compare", str(before), str(after)]) == 2
    assert "no figure in common" in capsys.readouterr().err
