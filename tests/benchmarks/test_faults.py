"""Fault benchmark with tiny numbers."""

import random
import sys

import pytest

from benchmarks.faults.__main__ import main
from benchmarks.faults.bodies import mutated
from benchmarks.faults.client import end_of


def test_bodies_are_the_same_for_the_same_seed() -> None:
    def bodies(seed: int) -> list[tuple[str, bytes]]:
        rng = random.Random(seed)
        return [mutated(rng) for _ in range(1000)]

    first, other, again = bodies(1), bodies(2), bodies(1)
    assert first == again != other


@pytest.mark.parametrize(
    ("raw", "end"),
    [
        (b'data: {"choices":[{"finish_reason":"length"}]}\n\ndata: [DONE]\n\n', "length"),
        (b'data: {"choices":[{"finish_reason":null}]}\n\n', "cut"),
        (b'data: {"error":{"message":"x","code":"engine_dead"}}\n\n', "engine_dead"),
        (b"", "cut"),
    ],
)
def test_how_a_stream_ended(raw: bytes, end: str) -> None:
    assert end_of(raw) == end


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_it_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["--rounds", "1", "--streams", "4", "--bodies", "30", "--clients", "2", "--only", "engine", "bodies"]) == 0
    )
    lines = capsys.readouterr().out.splitlines()
    assert "seed 0" in lines and "cores" in lines[0]
    killed, bodies = lines[-2:]
    assert "4 x engine_dead" in killed and "processes 0, files 0" in killed and killed.endswith("| nothing |")
    assert "30 requests" in bodies and "KV +0%" in bodies and bodies.endswith("| nothing |")
