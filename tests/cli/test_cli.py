"""Command line end to end, and its errors."""

import os
import subprocess
import sys
from importlib import resources
from types import SimpleNamespace

import pytest

from roseinfer import __version__
from roseinfer.cli import commands
from roseinfer.cli import main as cli
from roseinfer.cli.commands.serve import with_keys
from roseinfer.config.options import OptionSet
from roseinfer.config.parser import OptionParser
from roseinfer.core.config.engine import EngineConfig, ModelConfig, SchedulerConfig
from roseinfer.core.config.models import ServedModelConfig
from roseinfer.core.config.replicas import ReplicasConfig
from roseinfer.core.config.server import ServerConfig
from roseinfer.core.errors import (
    ConfigError,
    EngineDeadError,
    InvalidRequestError,
    ModelNotFoundError,
    UnsupportedModelError,
)

HELPS = [
    ["--help"],
    ["serve", "--help"],
    ["serve", "--help=all"],
    ["generate", "--help"],
    ["bench", "latency", "--help"],
    ["bench", "streaming", "--help"],
    ["bench", "serve", "--help"],
    ["--version"],
]


def test_help_needs_nothing_heavy():
    """The heavy packages cannot be imported in this interpreter."""
    code = (
        "import sys\n"
        "for name in ('torch', 'numpy', 'tokenizers', 'huggingface_hub', 'fastapi', 'uvloop', 'jinja2', 'yaml',\n"
        "             'rich', 'prometheus_client'):\n"
        "    sys.modules[name] = None\n"
        "from roseinfer.cli.main import main\n"
        f"for argv in {HELPS!r}:\n"
        "    try:\n"
        "        main(argv)\n"
        "    except SystemExit as end:\n"
        "        assert not end.code, argv\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("usage: roseinfer") == len(HELPS) - 1 and __version__ in done.stdout


def test_help_lists_the_commands(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    out = capsys.readouterr().out
    for command in commands.COMMANDS:
        assert command.NAME.split()[0] in out.split()
    with pytest.raises(SystemExit):
        cli.main(["bench", "--help"])
    out = capsys.readouterr().out
    for command in (commands.bench_latency, commands.bench_throughput):
        assert command.NAME.split()[1] in out and command.HELP in out


def help_of(capsys, *argv):
    with pytest.raises(SystemExit) as exit:
        cli.main([*argv])
    assert exit.value.code == 0
    return capsys.readouterr().out


def flags_in(text):
    return {word.rstrip(",") for word in text.split()}


WITH_COMMON = [command for command in commands.COMMANDS if hasattr(command, "COMMON")]


@pytest.mark.parametrize("command", WITH_COMMON, ids=lambda command: command.NAME)
def test_help_shows_common_options_and_examples(command, capsys):
    argv = command.NAME.split()
    short, full = help_of(capsys, *argv, "--help"), help_of(capsys, *argv, "--help=all")
    options = {name: option.flag for name, option in command.OPTIONS.options.items()}
    for name in command.COMMON:
        assert options.get(name, "--quick" if name == "quick" else "--config") in flags_in(short)
    assert len(short.splitlines()) < len(full.splitlines()) / 3
    assert all(flag in full for flag in options.values())
    for text in (short, full):
        assert all(example in text for example in command.EXAMPLES)


def test_help_finds_options_by_a_word(capsys):
    found = help_of(capsys, "serve", "--help=ssl")
    assert "--ssl-certfile" in found and "server:" in found and "--port" not in found
    assert "--max-num-seqs" in help_of(capsys, "serve", "--help=--max-num-seqs")
    scheduler = help_of(capsys, "serve", "--help=scheduler")
    assert "--max-num-seqs" in scheduler and "--no-overlap" in scheduler and "--swap-space" not in scheduler
    assert help_of(capsys, "serve", "--help=xylophone") == "no option contains 'xylophone'\n"


def test_examples_of_all_commands(capsys):
    assert "roseinfer serve Qwen/Qwen3-0.6B" in help_of(capsys, "--help")


@pytest.mark.parametrize(
    "argv", [[], ["fly"], ["bench"], ["bench", "fly"], ["serve", "--max-num-seqs", "many"], ["generate"]]
)
def test_usage_errors(argv, capsys):
    with pytest.raises(SystemExit) as exit:
        cli.main(argv)
    assert exit.value.code == 2 and "usage: roseinfer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "train-predictor"),
        (["bench"], "throughput"),
        (["serve", "--prot", "9000"], "roseinfer serve: error: unrecognized arguments: --prot; did you mean --port?"),
        (["serve", "--zzz"], "roseinfer serve: error: unrecognized arguments: --zzz\n"),
        (["bench", "serve", "--requst_rate=3"], "did you mean --request-rate?"),
    ],
)
def test_who_is_close_is_told_what_there_is(argv, said, capsys):
    with pytest.raises(SystemExit):
        cli.main(argv)
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["serve", "--max_num_seqs", "0"], "--max-num-seqs must be positive"),
        (["serve", "--port", "70000"], "--port must be within"),
        (["serve", "a", "--model", "b"], "'a' and 'b'"),
        (["serve", "--config", "no.toml"], "cannot read no.toml"),
        (["serve", "--generation-config", "/no/x.json"], "--generation-config: no file '/no/x.json'"),
        (["engine", "--bind=:1", "--tls-dir=x", "--generation-config=/no"], "--generation-config: no file '/no'"),
        (["chat", "-q", "x", "--generation-config", "/no"], "--generation-config: no file '/no'"),
        (["generate", "--prompt", "x", "--generation-config", "/no"], "--generation-config: no file '/no'"),
        (["generate", "--prompt", "x", "--top-p", "2"], "--top-p must be within"),
        (["generate", "--prompt", "x", "--system", "y"], "--system needs --chat"),
        (["generate", "--prompt", "x", "--block-size", "3"], "--block-size must be a power of two"),
        (["bench", "latency", "--json", "/no/x.json"], "--json: cannot write '/no/x.json': No such file or directory"),
        (["bench", "throughput", "--json", "/"], "--json: cannot write '/': Is a directory"),
        (["bench", "streaming", "--plot", "/no/x.png"], "--plot: cannot write '/no/x.png'"),
        (["bench", "serve", "--json", "/no/x.json"], "--json: cannot write '/no/x.json'"),
        (["bench", "serve", "--save-result", "--result-dir", "/dev/null/x"], "--result-dir: cannot make '/dev/null/x'"),
        (["bench", "serve", "--append-result", "--result-filename", "no/x"], "--result-filename: cannot write 'no/x'"),
        (["calibrate", "--json", "/no/x.json"], "--json: cannot write '/no/x.json'"),
        (
            ["calibrate", "--decode-rows", "a"],
            "--decode-rows must be positive numbers with commas between them, got 'a'",
        ),
        (["simulate", "--step-ms", "1e308"], "--step-ms must be within [0, 1e+12], got 1e+308"),
        (["simulate", "--noise", "1e308"], "--noise must be within [0, 1e+12], got 1e+308"),
        (["simulate", "--workload", "gamma", "--cv", "1e-300"], "--cv must be within [0.001, 1000], got 1e-300"),
        (["simulate", "--slowdown", "1e-308"], "--slowdown must be within [1e-06, 1e+06], got 1e-308"),
        (["simulate", "--policies", "fifo"], "--rates is required: requests per second, such as 5,10,20"),
        (["simulate", "--json", "/no/x.json"], "--json: cannot write '/no/x.json'"),
        (["simulate", "--rates", "1", "--plot", "/no/x.png"], "--plot: cannot write '/no/x.png'"),
        (["train-predictor", "--data", "x", "--out", "/no/x"], "--out: cannot write '/no/x'"),
        (["serve", "--uds", "x", "--port", "9000"], "--uds cannot be combined with --port: "),
        (["serve", "--router", "least"], "--router needs several engines; set --replicas or --devices"),
        (["serve", "--replicas", "3", "--devices", "0,1"], "--replicas is 3, but --devices names 2"),
        (["serve", "--replicas", "2", "--engines", "a:1"], "--replicas cannot be combined with --engines"),
        (["serve", "a", "b", "--engines", "a:1"], "error: --engines needs --tls-dir"),
        (["serve", "--tls-dir", "x"], "name them with --engines"),
        (["serve", "--pooling", "last", "--runner", "generate"], "--pooling=last cannot be combined with --runner="),
        (["serve", "--noise", "1"], "--noise needs --device=priced, got auto"),
        (["serve", "-tp", "2", "--device", "priced"], "--tensor-parallel-size must be 1 with --device=priced"),
        (["serve", "--record", "x", "--speculation", "auto"], "--record cannot be combined with --speculation=auto"),
        (["bench", "serve", "--url", "http://x", "--port", "1"], "give either --url, or --host and --port"),
        (["bench", "serve", "--ramp-up-strategy", "linear", "--rate", "1"], "cannot be combined with --rate or"),
        (["simulate", "--workload", "trace"], "--workload trace requires --trace, and --trace requires --workload"),
        (["simulate", "--kill", "0@1"], "--kill needs --replicas"),
        (["simulate", "--replicas", "2", "--start-s", "1"], "--start-s needs --kill or --autoscale"),
        (["simulate", "--replicas", "2", "--replay", "x"], "--replicas cannot be combined with --replay"),
        (["simulate", "--capacity", "--rates", "1"], "give --setup or --slo-classes"),
    ],
)
def test_wrong_options_are_told_in_one_line_before_any_model_is_loaded(argv, message, capsys, no_model):
    assert cli.main(argv) == 2
    usage, error = capsys.readouterr().err.strip().splitlines()
    assert usage.startswith(f"usage: roseinfer {argv[0]}")
    assert error.startswith("roseinfer: error: ") and message in error


@pytest.fixture
def no_model(monkeypatch):
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("no model is needed to see that the options are wrong")

    monkeypatch.setattr("roseinfer.engine.local.model_folder", refuse)


def failing(error: BaseException) -> SimpleNamespace:
    def run(args: object) -> int:
        raise error

    return SimpleNamespace(NAME="fail", HELP="fails", OPTIONS=OptionSet(), configure=lambda parser: None, run=run)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ConfigError("a\nb"), 2),
        (InvalidRequestError("a b", "prompt"), 2),
        (ModelNotFoundError("a b"), 1),
        (UnsupportedModelError("a b"), 1),
        (EngineDeadError("a b"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_errors_end_in_one_line_without_traceback(monkeypatch, capsys, error, status):
    monkeypatch.setattr(cli, "COMMANDS", (failing(error),))
    assert cli.main(["fail"]) == status
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("usage")]
    assert lines == ([] if status == 130 else ["roseinfer: error: a b"])


def test_our_own_bugs_show_a_traceback(monkeypatch):
    monkeypatch.setattr(cli, "COMMANDS", (failing(ZeroDivisionError()),))
    with pytest.raises(ZeroDivisionError):
        cli.main(["fail"])


def test_serve_hands_over_what_was_asked_for(monkeypatch):
    calls = []

    async def stand_in(models):
        calls.extend(models)

    monkeypatch.setattr("roseinfer.server.run.serve_models", stand_in)
    with resources.as_file(resources.files("roseinfer") / "assets" / "tiny") as folder:
        template = folder / "config.json"
        argv = ["serve", str(folder), "--max-num-seqs", "8", "--api-key", "a", "--api-key", "b"]
        assert cli.main([*argv, "--chat-template", str(template)]) == 0
    engine = EngineConfig(model=ModelConfig(model=str(folder)), scheduler=SchedulerConfig(max_num_seqs=8))
    server = ServerConfig(api_key=("a", "b"), chat_template=str(template))
    assert calls == [ServedModelConfig(engine=engine, replicas=ReplicasConfig(), server=server, tokenizer=str(folder))]


@pytest.mark.parametrize(
    ("options", "text", "variable", "told"),
    [
        (["--api-key", ""], None, None, "--api-key: a key must not be empty"),
        (["--api-key", "real", "--api-key", " "], None, None, "--api-key: a key must not be empty"),
        (["--config", "FILE"], '{"api_key": ["real", ""]}', None, "--api-key: a key must not be empty"),
        (["--api-key-file", "FILE"], "\n \n", None, "has no key"),
        (["--api-key-file", "FILE"], "a key\n", None, "visible ASCII characters"),
        (["--api-key-file", "/no/such/file"], None, None, "--api-key-file: cannot read /no/such/file: No such file"),
        ([], None, "", "ROSEINFER_API_KEY: a key must not be empty"),
        (["--served-model-name", ""], None, None, "--served-model-name: a name must not be empty"),
        (["--served-model-name", "x\udcff"], None, None, r"--served-model-name: invalid name 'x\udcff' (expected"),
        (
            ["--model", "/no\udcff", "--port", "0"],
            None,
            None,
            r"--served-model-name: invalid name '/no\udcff' (expected",
        ),
    ],
)
def test_empty_keys_and_names_end_the_command(monkeypatch, capsys, tmp_path, options, text, variable, told):
    file = tmp_path / "file.json"
    file.write_text(text or "")
    if variable is not None:
        monkeypatch.setenv("ROSEINFER_API_KEY", variable)
    assert cli.main(["serve", *[option.replace("FILE", str(file)) for option in options]]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert told in said and "real" not in said


def test_keys_may_come_from_a_file_and_the_environment(tmp_path):
    file = tmp_path / "keys"
    file.write_text("one\n\n  two \nopen\n")
    given = ServerConfig(api_key=("open",), api_key_file=str(file))
    assert with_keys(given, {"ROSEINFER_API_KEY": "three", "PATH": "x"}).api_key == ("open", "one", "two", "three")
    assert with_keys(ServerConfig(), {}) == ServerConfig()


def test_commands_follow_the_protocol():
    for command in commands.COMMANDS:
        parser = OptionParser(prog="x")
        commands.add_arguments(command, parser)


# Generating with the embedded model.

GREEDY = ["--temperature", "0", "--threads", "1"]


def generate(capsys, *argv: str) -> str:
    assert cli.main(["generate", *GREEDY, *argv]) == 0
    return capsys.readouterr().out


def test_generate(capsys):
    streamed = generate(capsys, "--prompt", "import os\n", "--max-tokens", "12")
    assert len(streamed) > 12 and streamed.endswith("\n")
    assert generate(capsys, "--prompt", "import os\n", "--max-tokens", "12", "--no-stream") == streamed
    longer = generate(capsys, "--prompt", "import os\n", "--max-tokens", "20", "--ignore-eos")
    assert longer.startswith(streamed.removesuffix("\n")) and len(longer) > len(streamed)


def test_generate_takes_both_numbers_for_no_top_k(capsys):
    sampled = ["--prompt", "import os\n", "--max-tokens", "12", "--temperature", "1", "--seed", "3"]
    assert generate(capsys, *sampled, "--top-k", "-1") == generate(capsys, *sampled, "--top-k", "0")


def test_generate_stops_at_a_text(capsys):
    free = generate(capsys, "--prompt", "def add(a, b):\n", "--max-tokens", "24")
    stop = free.strip()[4:9]
    stopped = generate(capsys, "--prompt", "def add(a, b):\n", "--max-tokens", "24", "--stop", stop)
    assert stopped == free[: free.index(stop)] + "\n"


def test_generate_chat_and_standard_input(capsys, monkeypatch, tmp_path):
    (tmp_path / "prompt").write_text("Write a Python function that adds two numbers.")
    text = "Write a Python function that adds two numbers."
    plain = generate(capsys, "--prompt", text, "--max-tokens", "16")
    chat = generate(capsys, "--chat", "--prompt", text, "--max-tokens", "16")
    assert chat != plain
    with (tmp_path / "prompt").open() as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        assert generate(capsys, "--chat", "--prompt", "-", "--max-tokens", "16") == chat
    system = generate(capsys, "--chat", "--system", "Be brief.", "--prompt", text, "--max-tokens", "16")
    assert isinstance(system, str) and system


def test_generate_refuses_a_prompt_beyond_the_context(capsys):
    assert cli.main(["generate", *GREEDY, "--max-model-len", "32", "--prompt", "x = 1\n" * 50]) == 2
    assert "context" in capsys.readouterr().err.splitlines()[-1]


def test_the_default_length_fits_the_context(capsys):
    """A prompt of more than 4 tokens leaves less than the default length."""
    assert generate(capsys, "--max-model-len", "64", "--ignore-eos", "--prompt", "import os\nimport sys\n")


def test_an_interrupt_while_modules_are_imported_leaves_no_traceback():
    program = """if True:
        import sys
        from roseinfer.cli.__main__ import run

        class Interrupt:
            def find_spec(self, name, path, target=None):
                if name == "roseinfer.cli.commands":
                    raise KeyboardInterrupt

        sys.meta_path.insert(0, Interrupt())
        sys.exit(run())
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (130, "")


def test_a_reader_that_goes_away_is_no_crash():
    argv = ["generate", *GREEDY, "--ignore-eos", "--max-tokens", "40", "--prompt", "import"]
    command = [sys.executable, "-m", "roseinfer.cli", *argv]
    reader, writer = os.pipe()
    process = subprocess.Popen(command, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    os.close(reader)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 1 and "Traceback" not in errors


@pytest.mark.parametrize("command", ["serve", "engine", "bench latency"])
def test_commands_that_run_a_model_are_rejected_on_macos(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert cli.main(command.split()) == 1
    assert capsys.readouterr().err.startswith("roseinfer: error: models run on Linux only, not on macOS: use")


@pytest.mark.parametrize(("options", "noted"), [((), True), (("--api-key", "k"), False)])
def test_vllms_key_variable_is_mentioned_if_there_is_no_key(monkeypatch, capsys, options, noted):
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    assert cli.main(["serve", "--ssl-certfile", "/none", *options]) == 2
    err = capsys.readouterr().err
    assert ("VLLM_API_KEY is not read" in err) is noted and "secret" not in err
