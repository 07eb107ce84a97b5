"""examples/slo_client.py, run as by a user."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import httpx
import openai
import pytest

from tests.server.real_server import RealServer, priced

FILE = Path(__file__).parents[2] / "examples" / "slo_client.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("slo_client", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with RealServer(*priced(tmp_path_factory.mktemp("engine"))) as server:
        yield f"{server.url}/v1"


def test_objectives_that_can_be_kept(example: ModuleType, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert example.main(["--base-url", url, "--ttft-ms", "60000", "--tpot-ms", "10000", "def add(a, b):"]) == 0
    printed = capsys.readouterr().out
    assert "objectives kept" in printed and "TTFT" in printed and "rejected" not in printed


def test_objectives_that_cannot(example: ModuleType, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert example.main(["--base-url", url, "--ttft-ms", "0.001", "--tpot-ms", "10000", "def add(a, b):"]) == 1
    printed = capsys.readouterr().out
    assert printed.count("rejected: The request's TTFT objective cannot be met even on an idle server") == 1, (
        "not even an idle server could do it"
    )
    assert "could be met now" in printed and "gave up" in printed


def refusal(code: str, **headers: str) -> openai.RateLimitError:
    response = httpx.Response(429, headers=headers, request=httpx.Request("POST", "http://localhost"))
    body = {"message": "250 ms could be met now", "type": "overloaded_error", "code": code, "predicted_ttft_ms": 250}
    return openai.RateLimitError("no", response=response, body=body)


class Server:
    """Fake of the client: it refuses a few times, then answers."""

    def __init__(self, *refusals: openai.RateLimitError) -> None:
        self.refusals = list(refusals)

    def ask(self) -> str:
        if self.refusals:
            raise self.refusals.pop(0)
        return "answer"


def ask(example: ModuleType, server: Server, attempts: int = 3) -> tuple[str, list[float], str]:
    said: list[str] = []
    slept: list[float] = []
    answer = example.with_patience(server.ask, attempts, said.append, slept.append)
    return answer, slept, "".join(said)


def test_it_comes_back_when_it_was_told_to(example: ModuleType) -> None:
    server = Server(refusal("slo_unattainable", **{"retry-after": "2"}), refusal("slo_unattainable"))
    answer, slept, said = ask(example, server)
    assert (answer, slept) == ("answer", [2.0, 1.0]) and "250 ms" in said


@pytest.mark.parametrize(
    ("refused", "left"),
    [
        (refusal("rate_limit_exceeded", **{"retry-after": "2"}), 2),
        (refusal("slo_unattainable", **{"x-should-retry": "false"}), 2),
        (refusal("slo_unattainable"), 0),
    ],
)
def test_when_it_gives_up(example: ModuleType, refused: openai.RateLimitError, left: int) -> None:
    server = Server(refused, refused, refused)
    with pytest.raises(openai.RateLimitError):
        ask(example, server)
    assert len(server.refusals) == left
