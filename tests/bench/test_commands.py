"""The two commands from end to end with the embedded model, and their refusals."""

import json

import pytest

from roseinfer.bench import streaming_compare
from roseinfer.bench.streaming_compare import ProgressBar
from roseinfer.cli import main as cli

SMALL = ["--threads", "1", "--num-kv-blocks", "64", "--max-num-seqs", "4"]
STREAMING = ["bench", "streaming", "tiny", *SMALL, "--num-requests", "4", "--max-new-tokens", "5", "--no-stop-on-eos"]
LATENCIES = [
    "add_request_ms",
    "tokenize_ms",
    "queue_wait_ms",
    "prefill_ms",
    "ttft_ms",
    "tpot_ms",
    "itl_ms",
    "latency_ms",
]
KEYS = [
    *("model", "device", "requests", "prompt_tokens", "completion_tokens", "submit_wall_s"),
    *(*LATENCIES, "throughput_tok_s", "versions", "hardware", "args"),
]
LINES = [
    *("Model:", "Device:", "Requests:", "Prompt tokens:", "Completion tokens:", "Submit wall:"),
    *("add_request latency:", "Tokenize:", "Queue wait:", "Prefill->first token:"),
    *("TTFT:", "TPOT:", "ITL:", "Latency:", "Throughput:"),
]


@pytest.fixture
def starts(monkeypatch):
    """Return a list of the configs of started engines."""
    started = []
    original = streaming_compare.start_engine

    async def start_engine(config, tokenizer, *, in_process):
        assert in_process
        started.append(config)
        return await original(config, tokenizer, in_process=True)

    monkeypatch.setattr(streaming_compare, "start_engine", start_engine)
    return started


def test_streaming(capsys, tmp_path, starts):
    file, plot = tmp_path / "out.json", tmp_path / "out.png"
    options = ["--json", str(file), "--plot", str(plot), "--prompt-repeats", "3,1", "--repeat-runs", "2"]
    assert cli.main([*STREAMING, *options]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    report = printed.out.splitlines()[-len(LINES) :]
    assert all(line.startswith(start) for line, start in zip(report, LINES, strict=True))
    assert "hardware:" in printed.out and "versions:" in printed.out
    assert plot.read_bytes().startswith(b"\x89PNG")
    result = json.loads(file.read_text())
    assert list(result) == KEYS
    assert all(list(result[key]) == ["p50", "p95", "p99"] for key in LATENCIES)
    assert all(0 < result[key]["p50"] <= result[key]["p99"] for key in LATENCIES)
    assert (result["model"], result["device"], result["requests"]) == ("tiny", "cpu", 8)
    assert (result["completion_tokens"], result["args"]["prompt_repeats"]) == (40, "3,1")
    assert len(starts) == 1


def test_hf_model_id_names_the_model(starts, capsys):
    argv = ["bench", "streaming", "--hf-model-id", "gpt2", "--load-format", "dummy", *SMALL, "--max-model-len", "64"]
    assert cli.main([*argv, "--num-requests", "1", "--max-new-tokens", "1", "--warmup-runs", "0"]) == 0
    assert starts[0].model.model == "gpt2" and starts[0].model.load_format == "dummy"
    assert "gpt2" in capsys.readouterr().out


def test_compare_an_option_of_the_engine(capsys, tmp_path, starts):
    """Give each counted run its own engine, in the order A B B A."""
    file = tmp_path / "out.json"
    options = ["--compare", "prefill-admission-policy=fifo,pack", "--prefill-max-tokens", "16", "--warmup-runs", "0"]
    assert cli.main([*STREAMING, *options, "--repeat-runs", "2", "--json", str(file)]) == 0
    assert [config.scheduler.policy_name for config in starts] == ["fifo", "pack", "pack", "fifo"]
    result = json.loads(file.read_text())
    names = ["prefill_admission_policy=fifo", "prefill_admission_policy=pack"]
    assert list(result["settings"]) == names
    first, second = result["settings"].values()
    assert first["completion_tokens"] == second["completion_tokens"] == 40
    assert result["ratio"]["ttft_ms"]["p50"] == pytest.approx(second["ttft_ms"]["p50"] / first["ttft_ms"]["p50"])
    assert f"[{names[1]}] / [{names[0]}]" in capsys.readouterr().out


def test_compare_an_option_of_the_load_on_one_engine(capsys, starts):
    assert cli.main([*STREAMING, "--compare", "max-new-tokens=2,default"]) == 0
    assert len(starts) == 1
    completions = [line.split()[-1] for line in capsys.readouterr().out.splitlines() if "Completion" in line]
    assert completions == ["8", str(4 * 64)]


def test_options_reach_the_engine(starts, capsys):
    options = ["--no-prefix-cache", "--no-chunked-prefill", "--no-decode-first", "--prefill-max-batch-size", "2"]
    assert cli.main([*STREAMING, *options, "--compare", "overlap=on,off", "--warmup-runs", "0"]) == 0
    assert [config.scheduler.overlap for config in starts] == [True, False]
    for config in starts:
        assert not config.cache.enable_prefix_caching and not config.scheduler.enable_chunked_prefill
        assert config.scheduler.policy_options == {"decode_first": False, "prefill_max_batch_size": 2}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--cuda-graph", "--cuda-graph"),
        ("--no-paged-attn", "--paged-attn"),
        ("--nvtx --device cpu", "--nvtx"),
        ("--prompt-repeats 512,x", "--prompt-repeats"),
        ("--prompt-repeats 0,1", "--prompt-repeats"),
        ("--num-requests 0", "--num-requests"),
        ("--stream-interval 0", "--stream-interval"),
        ("--submit-interval-ms nan", "--submit-interval-ms"),
        ("--temperature 3", "--temperature"),
        ("--hf-model-id gpt2", "--hf-model-id"),
        ("--prefill-force-fifo-every 8", "--prefill-force-fifo-every"),
        ("--prefill-max-tokens 0", "--prefill-max-tokens"),
        ("--compare pretok=on", "--compare"),
        ("--compare pretok=on,on", "--compare"),
        ("--compare json=a,b", "'json' is not an option that can be compared"),
        ("--compare block_size=16,3", "--block-size"),
        ("--compare pretok=on,perhaps", "--pretok"),
        ("--plot out.txt", "--plot"),
    ],
)
def test_refused_by_name_before_an_engine_starts(options, message, capsys, starts):
    assert cli.main([*STREAMING, *options.split()]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("roseinfer: error:") and message in error
    assert not starts


def test_a_prompt_beyond_the_context(capsys):
    assert cli.main([*STREAMING, "--prompt-repeats", "1,3000"]) == 2
    assert "context" in capsys.readouterr().err.splitlines()[-1]


class Out(list):
    """Stream that is a terminal or not."""

    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal

    def write(self, text: str) -> None:
        self.append(text)

    def flush(self) -> None: ...


def test_progress_on_a_terminal_only():
    for out in (terminal := Out(True), file := Out(False)):
        progress = ProgressBar(2, out)
        progress.advance()
        progress.advance()
        progress.close()
    assert not file
    assert "1/2" in terminal[0] and "2/2" in terminal[1] and "." not in terminal[1]
