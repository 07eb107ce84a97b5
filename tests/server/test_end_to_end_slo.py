"""Objectives from end to end: `roseinfer serve` with the embedded model, the default policy and the openai client."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from roseinfer.cli import main as cli
from tests.server.real_server import RealServer, priced

KEY = "sk-of-the-night"
CLASSES = f"""
[classes.patient]
ttft_ms = 50000
tpot_ms = 5000

[classes.batch]
timeout_s = 50

[models]
tiny = "patient"

[keys]
"sha256:{hashlib.sha256(KEY.encode()).hexdigest()}" = "batch"
"""
LOOSE = {"slo": {"ttft_ms": 50000, "tpot_ms": 5000, "report": True}}
IMPOSSIBLE = {"ttft_ms": 0.01}
# After so many steps the scheduler believes its cost model.
STEPS = 60


@pytest.fixture(scope="module")
def real() -> Iterator[RealServer]:
    with RealServer() as server:
        yield server


@pytest.fixture(scope="module")
def client(real: RealServer) -> Iterator[openai.OpenAI]:
    with real.client() as made:
        made.completions.create(model="tiny", prompt="x", max_tokens=STEPS, extra_body=LOOSE | {"ignore_eos": True})
        yield made


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_out_of_reach_is_refused(real: RealServer, client: openai.OpenAI, stream: bool, n: int) -> None:
    labels = {"slo_class": "custom", "reason": "ttft", "cause": "idle"}
    before = real.metrics("roseinfer:slo_rejections_total", **labels)[0]
    with pytest.raises(openai.RateLimitError) as refused:
        client.completions.create(
            model="tiny", prompt="def f(", n=n, max_tokens=20, stream=stream, extra_body={"slo": IMPOSSIBLE}
        )
    assert refused.value.code == "slo_unattainable"
    body: Any = refused.value.body
    assert body["predicted_ttft_ms"] > 0.01 and (body["reason"], body["cause"]) == ("ttft", "idle")
    assert refused.value.response.headers["x-should-retry"] == "false", "an idle machine could not do it either"
    assert real.metrics("roseinfer:slo_rejections_total", **labels)[0] == before + 1
    real.until_idle()


def test_so_is_a_pace_that_no_step_can_keep(client: openai.OpenAI) -> None:
    slo = {"slo": {"ttft_ms": 50000, "tpot_ms": 0.001}}
    with pytest.raises(openai.RateLimitError, match="TPOT objective") as refused:
        client.completions.create(model="tiny", prompt="def f(", max_tokens=20, extra_body=slo)
    body: Any = refused.value.body
    assert (body["reason"], body["cause"]) == ("tpot", "idle")


@pytest.mark.parametrize("stream", [False, True])
def test_of_several_prompts_none_is_answered_if_one_is_refused(
    real: RealServer, client: openai.OpenAI, stream: bool
) -> None:
    options: Any = {"max_tokens": 20, "stream": stream, "extra_body": {"slo": IMPOSSIBLE}}
    with pytest.raises(openai.RateLimitError):
        client.completions.create(model="tiny", prompt=["def f(", "x", "import "], **options)
    real.until_idle()


def test_what_can_be_kept_is(client: openai.OpenAI) -> None:
    options: Any = {"model": "tiny", "prompt": "def f(", "max_tokens": 20, "extra_body": LOOSE}
    done = client.completions.create(**options)
    *_, last = client.completions.create(**options, stream=True)
    for usage in (done.usage, last.usage):
        slo = usage.slo  # type: ignore[union-attr]
        assert slo["met"] is True and slo["ttft_ms"] > 0 and slo["tpot_ms"] > 0
    several = client.completions.create(**options | {"prompt": ["a", "b"], "n": 2})
    assert len(several.choices) == 4 and several.usage.slo["met"] is True  # type: ignore[union-attr]


def test_an_answer_that_runs_out_of_time_is_shown_as_far_as_it_got(client: openai.OpenAI) -> None:
    options: Any = {"model": "tiny", "prompt": "import os\n", "max_tokens": 1200}
    limit = {"timeout_s": 0.5, "ignore_eos": True, "slo": {"report": True}}
    done = client.completions.create(**options, extra_body=limit)
    choice, usage = done.choices[0], done.usage
    assert choice.finish_reason == "timeout" and choice.text
    assert usage is not None and 0 < usage.completion_tokens < 1200
    with_ids = limit | {"return_token_ids": True}
    *tokens, end, last = client.completions.create(**options, extra_body=with_ids, stream=True)
    assert end.choices[0].finish_reason == "timeout"
    assert last.usage.completion_tokens == sum(len(chunk.choices[0].token_ids) for chunk in tokens) > 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_is_late_before_it_begins(real: RealServer, client: openai.OpenAI, stream: bool) -> None:
    with pytest.raises(openai.InternalServerError) as late:
        client.completions.create(model="tiny", prompt="x", stream=stream, n=2, extra_body={"deadline_ms": 1e-3})
    assert (late.value.status_code, late.value.code) == (504, "deadline_exceeded")
    real.until_idle()


def test_several_processes_know_the_classes_and_add_up(tmp_path: Path) -> None:
    file = tmp_path / "classes.toml"
    file.write_text(CLASSES)
    options = ("--api-workers", "2", "--slo-classes", str(file), "--api-key", KEY, "--api-key", "another")
    with RealServer(*options, *priced(tmp_path)) as server:
        for key, count in ((KEY, 3), ("another", 5)):
            for _ in range(count):  # a connection each, so that both workers are asked
                with server.client(api_key=key) as own:
                    slo: Any = {"slo": {"report": True}}
                    done = own.completions.create(model="tiny", prompt="x", max_tokens=3, extra_body=slo)
                    met = done.usage.slo["met"]  # type: ignore[union-attr]
                    assert met is (None if key == KEY else True)
        for _ in range(4):
            text = server.fresh("/metrics").text
            for name, count in (("batch", 3), ("patient", 5)):
                labels = f'{{engine="0",model_name="tiny",outcome="met",slo_class="{name}"}}'
                assert f"roseinfer:slo_requests_total{labels} {count}.0" in text


def test_a_wrong_file_ends_the_command_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "classes.toml"
    file.write_text(CLASSES.replace("ttft_ms", "ttfb_ms"))
    assert cli.main(["serve", "--slo-classes", str(file), "--port", "0"]) != 0
    printed = capsys.readouterr().err
    assert "--slo-classes: classes.patient.ttfb_ms: is unknown" in printed
    assert "Traceback" not in printed and KEY not in printed
