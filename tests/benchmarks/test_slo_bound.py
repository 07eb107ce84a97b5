"""benchmarks/slo_bound.py: its tables."""

import pytest

from benchmarks import slo_bound


def table(out: str) -> list[dict[str, str]]:
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in out.splitlines()]
    return [dict(zip(lines[0], cells, strict=True)) for cells in lines[2:]]


def test_a_setup_at_loads_over_its_capacity(capsys: pytest.CaptureFixture[str]) -> None:
    slo_bound.main(["--loads", "1,9", "--requests", "10"])
    one, high = table(capsys.readouterr().out)
    assert (one["load"], one["for ever"], one["bound"]) == ("1.00", "0.990", "1.000")
    shares = [float(high[name]) for name in ("for ever", "blind, no drops", "blind", "paced", "bound")]
    assert shares == sorted(shares) and shares[0] < 0.5


@pytest.mark.exhaustive
def test_rates_instead(capsys: pytest.CaptureFixture[str]) -> None:
    slo_bound.main(["--rates", "2", "--requests", "8", "--seeds", "2"])
    (row,) = table(capsys.readouterr().out)
    assert row["rate"] == "2.00" and row["bound"] == "1.000"


def test_random_loads(capsys: pytest.CaptureFixture[str]) -> None:
    slo_bound.main(["--random-loads", "2", "--seed", "1"])
    alone, traced = table(capsys.readouterr().out)
    assert 0.0 < float(alone["blind"]) <= float(alone["paced"]) <= float(alone["bound"]) <= 1.0
    assert traced["bound"] == "" and "trace" in traced["what it is"]
