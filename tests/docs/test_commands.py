"""Commands and programs of the pages: options exist, and what needs neither network nor GPU runs against one server."""

import contextlib
import io
import json
import re
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from roseinfer.cli import main as cli
from roseinfer.cli.commands import COMMANDS
from tests.docs.blocks import ROOT, Block, blocks, commands
from tests.server.real_server import RealServer

ALL = list(blocks())
ADDRESS = re.compile(r"http://(?:127\.0\.0\.1|localhost):8000")
# Objectives of the pages are those of a machine that does nothing else. Tests give a thousand times as much, except to
# one millisecond, which no machine can keep.
OBJECTIVE = re.compile(r'((?:ttft|tpot|e2e)_m?s(?:": |=))([\d.]+)')
# A page's programs run in order, as one: later ones use names of earlier ones.
PROGRAMS = {
    page: [block for block in ALL if block.page == page and block.language == "python" and block.mark != "not run"]
    for page in dict.fromkeys(block.page for block in ALL)
}
PROGRAMS = {page: programs for page, programs in PROGRAMS.items() if programs}
REQUESTS = [
    pytest.param(block, words, id=f"{block.place}-{number}")
    for block in ALL
    if block.language == "sh" and block.mark != "not run"
    for number, words in enumerate(commands(block))
    if words[0] == "curl"
]
# Files that readers make themselves, and simulations of several loads, which take long.
NOT_RUN = {"my.toml", "load.toml", "cost.json", "run.jsonl", "classes.toml", "FILE", "--rates", "--capacity"}
# The other simulations of the pages take some seconds. Fewer requests show that their options work together.
FEW_REQUESTS = ["--requests", "8", "--seeds", "1"]
RUNNABLE = {
    " ".join(words): words[1:]
    for block in ALL
    if block.mark != "not run"
    for words in commands(block)
    if words[:2] in (["roseinfer", "--version"], ["roseinfer", "certificates"], ["roseinfer", "simulate"])
    or words[:3] == ["roseinfer", "top", "--once"]
}
RUNNABLE = {line: words for line, words in RUNNABLE.items() if not NOT_RUN & {*words}}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    adapters = ROOT / "roseinfer" / "assets"
    options = ("--lora", f"terse={adapters / 'terse'}", "--lora-dir", str(adapters))
    with RealServer("--max-model-len", "416", *options) as server:  # the model ends few answers by itself
        yield server.url


@pytest.mark.parametrize(
    "block", [pytest.param(block, id=block.place) for block in ALL if any(True for _ in commands(block))]
)
def test_options_of_commands_exist(block: Block, monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    """Commands are parsed, not run."""
    ran: list[Namespace] = []
    for command in COMMANDS:
        monkeypatch.setattr(command, "run", lambda args: ran.append(args) or 0)
    for words in commands(block):
        if words[0] != "roseinfer" or "..." in words:
            continue
        for option in ("--config", "--config-file"):
            if option in words:  # the file is the reader's
                at = words.index(option)
                words = words[:at] + words[at + 2 :]
        output = io.StringIO()
        with contextlib.redirect_stderr(output), contextlib.redirect_stdout(output):
            try:
                status = cli.main(words[1:])
            except SystemExit as exit:
                status = exit.code
        assert status in (0, None), f"{' '.join(words)}: {output.getvalue()[-300:]}"


@pytest.mark.parametrize("line", RUNNABLE)
def test_commands_run(
    line: str, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Run what is done within seconds in an empty folder with the examples, `top` on the tests' server."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    words = RUNNABLE[line]
    more = {"simulate": FEW_REQUESTS, "top": [url]}.get(words[0], [])
    try:
        status = cli.main([*words, *more])
    except SystemExit as exit:  # --version
        status = exit.code
    assert status in (0, None), capsys.readouterr().err
    assert capsys.readouterr().out


@pytest.mark.parametrize(("block", "words"), REQUESTS)
def test_requests_are_answered(block: Block, words: list[str], url: str) -> None:
    answer = send(words[1:], url)
    assert answer.status_code == (int(block.value) if block.mark == "expect" else 200), answer.text


@pytest.mark.parametrize("page", PROGRAMS)
def test_programs_run(page: str, url: str) -> None:
    names: dict[str, object] = {"__name__": "__main__"}
    with contextlib.redirect_stdout(io.StringIO()):
        for block in PROGRAMS[page]:
            exec(compile(ADDRESS.sub(url, patient(block.text)), block.place, "exec"), names)
    for value in names.values():
        if type(value).__name__ == "LLM":
            value.close()


def patient(text: str) -> str:
    return OBJECTIVE.sub(lambda found: found[0] if found[2] == "1" else f"{found[1]}{float(found[2]) * 1000:g}", text)


def send(arguments: list[str], url: str) -> httpx.Response:
    """Send the request that curl would send with these arguments."""
    headers, body, method, address = {}, None, None, ""
    rest = iter(arguments)
    for argument in rest:
        if argument in ("-H", "--header"):
            name, _, value = next(rest).partition(":")
            headers[name] = value.strip()
        elif argument in ("-d", "--data"):
            body = patient(next(rest))
        elif argument in ("-X", "--request"):
            method = next(rest)
        elif not argument.startswith("-"):
            address = ADDRESS.sub(url, patient(argument if "://" in argument else f"http://{argument}"))
    assert address.startswith(url), address
    if body is not None:
        json.loads(body)
    return httpx.request(method or ("POST" if body else "GET"), address, headers=headers, content=body, timeout=60)
