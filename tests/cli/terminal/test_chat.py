"""Conversations with a server around a scripted engine, and one at a real terminal."""

import io
import json
import sys
from pathlib import Path

import pytest

from roseinfer.cli import main as cli
from roseinfer.cli.terminal.chat import Chat
from roseinfer.cli.terminal.conversation import Conversation
from roseinfer.cli.terminal.own_server import OwnServerError
from roseinfer.cli.terminal.remote import Remote
from roseinfer.cli.terminal.sampling import model_of
from roseinfer.cli.terminal.screen import Screen, printable
from roseinfer.cli.terminal.slash import Leave, run_command
from roseinfer.core.config.server import ServerConfig
from roseinfer.core.errors import ConfigError
from roseinfer.core.slo import Cause
from roseinfer.engine.api import GenerateRequest
from roseinfer.text.tokenizer import Tokenizer
from tests.cli.terminal.pseudo_terminal import PseudoTerminal
from tests.cli.terminal.saying import saying
from tests.helpers.process_table import alive, children
from tests.server.fake_engine import Step, Wait, rejected
from tests.server.live import LiveServer
from tests.server.real_server import priced, until

REPLY = "hello world, def words"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Talking:
    """Chat whose terminal records what is shown. `said` returns and clears it."""

    def __init__(self, url: str, **options: object) -> None:
        self.out = Terminal()
        conversation = Conversation("fake", params={"max_tokens": 8}, **options)  # type: ignore[arg-type]
        self.chat = Chat(Remote(url), conversation, Screen(self.out, self.out), stats=False)

    @property
    def messages(self) -> list[dict[str, str]]:
        return self.chat.conversation.messages

    def ask(self, question: str) -> str:
        self.chat.ask(question)
        return self.said()

    def command(self, line: str) -> str:
        assert run_command(self.chat, line) is None
        return self.said()

    def said(self) -> str:
        said = self.out.getvalue()
        self.out.seek(0)
        self.out.truncate()
        return said


@pytest.fixture
def talking(server: LiveServer) -> Talking:
    return Talking(server.url)


def test_turns_and_the_system_message_go_to_the_server(server: LiveServer, talking: Talking) -> None:
    talking.command("/system be brief")
    assert talking.ask("one") == f"{REPLY}\n"
    talking.ask("two")
    assert talking.chat.conversation.body()["messages"] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": REPLY},
        {"role": "user", "content": "two"},
        {"role": "assistant", "content": REPLY},
    ]
    first, second = server.engine.requests
    assert len(second.prompt.ids) > len(first.prompt.ids)
    assert "empty" in talking.command("/clear")
    assert talking.messages == []


def test_a_refusal_says_why_and_what_could_be_kept(server: LiveServer, talking: Talking) -> None:
    server.engine.script = lambda request: [rejected(predicted_s=0.9, cause=Cause.QUEUE)]
    talking.command("/slo ttft=200ms")
    said = talking.ask("hi")
    assert "TTFT objective cannot be met" in said and "the prompts ahead of it" in said
    assert "/slo ttft=950ms" in said
    assert talking.messages == [], "what was refused is not part of the conversation"
    server.call(server.engine.reset)
    talking.command("/slo ttft=10s")
    question = run_command(talking.chat, "/retry")
    assert question == "hi"
    talking.ask(question)
    assert [message["content"] for message in talking.messages] == ["hi", REPLY]
    assert server.engine.requests[0].prompt.meta.slo.ttft_s == 10.0
    assert "TTFT" in talking.command("/stats") and "promise kept" in (talking.chat.last or "")


def test_retry_asks_the_last_question_anew(talking: Talking) -> None:
    with pytest.raises(ConfigError, match="no question"):
        run_command(talking.chat, "/retry")
    talking.ask("one")
    assert run_command(talking.chat, "/retry") == "one"
    assert talking.messages == []


def test_an_answer_that_is_cut_stays_as_far_as_it_came() -> None:
    chunk = {"choices": [{"delta": {"content": "as far as"}}]}
    with saying(f"HTTP/1.1 200 OK\r\n\r\ndata: {json.dumps(chunk)}\n\n".encode()) as url:
        talking = Talking(url)
        said = talking.ask("hi")
    assert said.startswith("as far as\n") and "closed the connection before the end" in said
    assert talking.messages[-1] == {"role": "assistant", "content": "as far as"}


def test_a_broken_promise_says_why() -> None:
    slo = {"ttft_ms": 900.0, "tpot_ms": 5.0, "met": False, "why": {"summary": "Late: all seats were taken."}}
    events = [
        {"choices": [{"delta": {"content": "yes"}}]},
        {"choices": [], "usage": {"completion_tokens": 2, "slo": slo}},
    ]
    lines = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
    with saying(f"HTTP/1.1 200 OK\r\n\r\n{lines}data: [DONE]\n\n".encode()) as url:
        talking = Talking(url, slo={"ttft_ms": 200.0})
        said = talking.ask("hi")
    assert "Late: all seats were taken." in said
    assert talking.chat.last == "2 tokens · 200.0 tokens/s · TTFT 900 ms (promised 200) · promise broken"


def test_thoughts_are_dim_and_not_part_of_the_answer() -> None:
    deltas = [{"role": "assistant", "content": ""}, {"reasoning_content": "hm"}, {"content": "yes"}, {}]
    events = "".join(f"data: {json.dumps({'choices': [{'delta': delta}]})}\n\n" for delta in deltas)
    with saying(f"HTTP/1.1 200 OK\r\n\r\n{events}data: [DONE]\n\n".encode()) as url:
        talking = Talking(url)
        assert talking.ask("hi") == "\x1b[2mhm\x1b[0m\n\nyes\n"
        assert talking.messages[-1]["content"] == "yes"
        assert talking.chat.last is not None and talking.chat.last.startswith("2 tokens")
        plain = io.StringIO()
        Chat(Remote(url), Conversation("fake"), Screen(plain, io.StringIO()), stats=False).ask("hi")
    assert plain.getvalue() == "yes\n"


def test_a_model_cannot_command_the_terminal() -> None:
    assert printable("a\x1b[2Jb\r\x9bc\td\n") == "a[2Jbc\td\n"


def test_save_writes_a_request_and_spares_files(talking: Talking, tmp_path: Path) -> None:
    talking.ask("one")
    path = tmp_path / "talk.json"
    assert str(path) in talking.command(f"/save {path}")
    assert json.loads(path.read_text())["messages"] == talking.messages
    with pytest.raises(ConfigError, match="File exists"):
        run_command(talking.chat, f"/save {path}")


def test_whoever_owns_the_server_is_asked_whether_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = iter(["/stats off", "hi"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    checks = []

    def check(lost: bool) -> None:
        checks.append(lost)
        if lost:
            raise OwnServerError("it has ended")

    with pytest.raises(OwnServerError):
        Talking("http://127.0.0.1:1").chat.converse(check)
    assert checks == [False, False, True]


@pytest.mark.parametrize(
    "line", ["/fly", "/stats maybe", "/save", "/slo soon", "/params x=1", "/params top_p=2", "/params seed=a"]
)
def test_wrong_commands_are_told(talking: Talking, line: str) -> None:
    with pytest.raises(ConfigError):
        run_command(talking.chat, line)


def test_commands_that_show_something(talking: Talking) -> None:
    listed = talking.command("/help")
    assert "/retry" in listed
    assert max(len(printable(line)) for line in listed.splitlines()) <= 80 + len("[2m[0m"), "a line of a small terminal"
    assert "no answer yet" in talking.command("/stats on") and talking.chat.stats
    assert "no system message" in talking.command("/system off")
    assert "no objectives" in talking.command("/slo off")
    with pytest.raises(Leave):
        run_command(talking.chat, "/exit")


def test_sampling_can_be_changed_within_a_conversation(server: LiveServer, talking: Talking) -> None:
    assert "max_tokens=8 temperature=0.5 top_k=3" in talking.command("/params temperature=0.5, top_k=3")
    talking.ask("one")
    params = server.engine.requests[0].prompt.params
    assert (params.temperature, params.top_k, params.max_tokens) == (0.5, 3, 8)
    assert "as the server decides" in talking.command("/params off")
    assert talking.chat.conversation.body().keys() == {"model", "messages"}


@pytest.mark.parametrize(
    ("model", "flags", "temperature", "top_p"),
    [
        ({}, [], 0.7, 0.95),
        ({}, ["--temperature", "0"], 0.0, 0.95),
        ({"temperature": 0.6}, [], 0.6, 1.0),
        ({"temperature": 0.6}, ["--top-p", "0.5"], 0.6, 0.5),
    ],
)
@pytest.mark.parametrize("command", ["chat", "complete"])
def test_sampling_is_the_users_then_the_models_then_ours(
    server: LiveServer, command: str, model: dict[str, float], flags: list[str], temperature: float, top_p: float
) -> None:
    defaults = server.service.backend.info.facts.default_sampling
    defaults.update(model)
    try:
        assert cli.main([command, server.url, "-q", "hi", "--max-tokens", "8", *flags]) == 0
    finally:
        defaults.clear()
    params = server.engine.requests[0].prompt.params
    assert (params.temperature, params.top_p) == (temperature, top_p)


def test_a_wrong_key_says_what_to_do(tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]) -> None:
    with LiveServer(tokenizer, ServerConfig(api_key=("right",))) as server:
        assert cli.main(["chat", server.url, "-q", "hi"]) == 1
    assert "rejected (401): Missing or wrong API key; give the server's key with --api-key" in capsys.readouterr().err


def test_other_servers_decide_on_sampling_themselves() -> None:
    listed = b'HTTP/1.1 200 OK\r\n\r\n{"data": [{"id": "other"}]}'
    with saying(listed) as url:
        assert model_of(Remote(url), None) == ("other", {})
    assert model_of(Remote("http://127.0.0.1:1"), "named") == ("named", {})


def test_a_conversation_is_with_a_model_that_generates_text() -> None:
    cards = [{"id": "embeds", "task": "embed"}, {"id": "talks", "task": "generate"}]
    with saying(b"HTTP/1.1 200 OK\r\n\r\n" + json.dumps({"data": cards}).encode()) as url:
        assert model_of(Remote(url), None) == ("talks", {})


def test_quick(server: LiveServer, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--max-tokens", "8", "--stats", "--slo", "ttft=10s"]
    assert cli.main(["chat", server.url, "-q", "hi", *options]) == 0
    said = capsys.readouterr()
    assert said.out == f"{REPLY}\n"
    assert said.err.startswith("6 tokens") and "(promised 10000)" in said.err
    server.engine.script = lambda request: [rejected()]
    assert cli.main(["chat", "--url", f"{server.url}/v1", "-q", "hi", "--slo", "ttft=1ms"]) == 1
    said = capsys.readouterr()
    assert said.out == "" and "rejected (429)" in said.err


def test_complete(server: LiveServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["complete", server.url, "-q", "def"]) == 0
    assert capsys.readouterr().out == f"{REPLY}\n"
    (request,) = server.engine.requests
    assert request.prompt.params.max_tokens > 16, "the API's default is short for a reader"
    assert server.tokenizer.decode(request.prompt.ids).endswith("def")


def test_a_question_by_standard_input(
    server: LiveServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("a question\n"))
    assert cli.main(["chat", server.url, "--max-tokens", "8"]) == 0
    assert capsys.readouterr().out == f"{REPLY}\n"
    assert cli.main(["chat", server.url, "--max-tokens", "8", "-q", "a question"]) == 0
    piped, typed = server.engine.requests
    assert piped.prompt.ids == typed.prompt.ids, "the end of its line is no part of it"
    monkeypatch.setattr(sys, "stdin", io.StringIO(" \n"))
    assert cli.main(["chat", server.url]) == 2


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])  # as the locale encodes it
@pytest.mark.parametrize("command", ["chat", "complete"])
def test_what_is_no_text_is_not_asked(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: str, errors: str
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9\n"), "utf-8", errors))
    assert cli.main([command, "http://127.0.0.1:1"]) == 2
    assert "standard input is not UTF-8 text" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["complete", "-q", "caf\udce9"], ["chat", "-q", "x", "--system-prompt", "caf\udce9"]])
def test_options_that_are_no_text_are_not_sent(capsys: pytest.CaptureFixture[str], argv: list[str]) -> None:
    assert cli.main([*argv, "--url", "http://127.0.0.1:1"]) == 2
    assert f"{argv[-2].replace('-q', '--quick')} is not UTF-8 text" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["http://x", "--dtype", "float32"], "--dtype cannot be combined with --url"),
        (["--url", "http://x", "--model", "b"], "--model-name NAME selects one of its models"),
        (["http://x", "--url", "http://y"], "--url is given twice"),
        (["--api-key", "x"], "--model-name and --api-key require --url"),
        (["--slo", "soon"], "--slo: unknown objective 'soon'"),
        (["--max-tokens", "0"], "--max-tokens must be positive"),
        (["ftp://x"], "no such folder"),
        (["localhost:8000"], "'localhost:8000' is no model; if it is a server, write http://localhost:8000"),
        (["http://127.0.0.1:1"], "Connection refused (start a server there, for example with `roseinfer serve`)"),
    ],
)
def test_wrong_options_start_nothing(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["chat", *argv, "-q", "x"]) in (1, 2)
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_a_conversation_at_a_terminal(tmp_path: Path) -> None:
    """Run an engine with steps of 20 ms whose answers fill the context. Ctrl+C stops an answer but not the server,
    which exits with the conversation, even if that is killed.
    """
    with PseudoTerminal("chat", *priced(tmp_path, step_s=0.02), "--mean-output-len", "1e9") as terminal:
        terminal.until("Ctrl+D quits")
        terminal.until("> ")
        (server,) = children(terminal.pid)
        terminal.type("/stats off\nhello\n")
        terminal.until("> hello\r\n")
        terminal.until(" ")
        terminal.type("QQQ")
        answer = "".join(terminal.until(" ") for _ in range(5))
        terminal.type("\x03")
        assert "QQQ" not in answer + terminal.until("stopped")
        terminal.type("/slo ttft=1ms\nagain\n")
        terminal.until("possible now: /slo ttft=")
    until(lambda: not alive(server))


def test_the_end_of_input_during_an_answer_ends_the_chat_after_it(server: LiveServer) -> None:
    def script(request: GenerateRequest) -> list[Step]:
        first, *rest = server.engine.default_script(request)
        return [first, Wait(), *rest]

    server.engine.script = script
    with PseudoTerminal("chat", server.url) as terminal:
        terminal.until("> ")
        terminal.type("hi\n")
        terminal.until("hello")
        terminal.type("\x04")
        terminal.until_it_waits()
        server.call(server.engine.release)
        assert terminal.exit_code() == 0
        assert "words" in terminal.shown
    assert len(server.engine.requests) == 1


@pytest.mark.parametrize("given", [[], ["--seed", "7"]])
def test_each_conversation_of_its_own_server_draws_a_seed(monkeypatch: pytest.MonkeyPatch, given: list[str]) -> None:
    started: list[list[str]] = []

    class Server:
        def __init__(self, flags: list[str], *_: object) -> None:
            started.append([flag for flag in flags if flag.startswith("--seed")])
            raise OwnServerError("not needed")

    monkeypatch.setattr("roseinfer.cli.terminal.own_server.OwnServer", Server)
    for command in ("chat", "complete", "chat"):
        assert cli.main([command, "-q", "x", *given]) == 1
    assert all(len(seeds) == 1 for seeds in started)
    assert len({seed for (seed,) in started}) == (1 if given else 3)


@pytest.mark.parametrize("ignores_interrupts", [False, True])
def test_leaving(server: LiveServer, ignores_interrupts: bool) -> None:
    with PseudoTerminal("chat", server.url, ignores_interrupts=ignores_interrupts) as terminal:
        terminal.until("temperature=0.7 top_p=0.95; /params sets these, /help lists all, Ctrl+D quits")
        terminal.until("> ")
        terminal.type("half a line")
        terminal.until("half a line")
        terminal.until_it_waits()
        terminal.type("\x03")
        terminal.until("Ctrl+D quits")
        terminal.until("> ")
        terminal.type('"""one\ntwo"""\n')
        terminal.until(REPLY)
        terminal.until("> ")
        terminal.type("\x04")
        assert terminal.exit_code() == 0
    (request,) = server.engine.requests
    assert "one\ntwo" in server.tokenizer.decode(request.prompt.ids)
