"""Facts about broken installations and devices, and once about this machine."""

import json
import socket
import sys
from pathlib import Path

import pytest

from roseinfer.cli import main as cli
from roseinfer.cli.doctor import device, probes
from roseinfer.cli.doctor.facts import Torch
from roseinfer.cli.doctor.requirements import misfit, parse_requirements
from roseinfer.models.loaded_size import LoadedSize
from roseinfer.quant.int8_product import unsupported_reason


@pytest.mark.parametrize(
    ("wanted", "version", "fits"),
    [
        ("torch>=2.11,<=2.13.0", "2.13.0+cpu", True),
        ("torch>=2.11,<=2.13.0", "2.13.1", False),
        ("torch>=2.11,<=2.13.0", "2.9.1", False),
        ("rich>=14,<16", "15.0.0", True),
        ("rich>=14,<16", "16.0", False),
        ("example==0.6.12", "0.6.12.post1", True),
        ("x", "1", True),
    ],
)
def test_versions(wanted: str, version: str, fits: bool) -> None:
    assert (misfit(wanted, version) is None) is fits


def test_requirements_are_sorted_by_extra_and_platform() -> None:
    found = parse_requirements(
        [
            "numpy<3,>=1.26",
            "no-such-package-at-all>=1",
            'uvloop<1; sys_platform != "win32"',
            'pywin32; sys_platform == "win32"',
            'rich<16,>=14; extra == "terminal"',
            'triton>=3.6; sys_platform == "win32" and extra == "cuda"',
        ]
    )
    assert [package.name for package in found[""]] == ["numpy", "no-such-package-at-all", "uvloop"]
    assert [package.found is None for package in found[""]] == [False, True, False]
    assert [package.name for package in found["terminal"]] == ["rich"] and "cuda" not in found


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("import no_such_torch", "PyTorch failed: ModuleNotFoundError"),
        ("import os; os.abort()", "PyTorch ended by signal 6"),
        ("pass", "PyTorch failed: no output"),
        ("print('{}')", "PyTorch failed: no output"),
        ('print(\'{"gpus": [], "unheard_of": 1}\')', "PyTorch failed"),
        ("import time; time.sleep(60)", "did not respond within"),
    ],
)
def test_a_pytorch_that_is_broken(code: str, error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "TORCH_TIMEOUT_S", 0.2 if "sleep" in code else 30.0)
    said = probes.ask_torch(["-S", "-c", code])
    assert (said.error is not None and said.error.startswith(error)) or error in str(said.error)


def test_what_pytorch_says_is_read(capsys: pytest.CaptureFixture[str]) -> None:
    device.main()
    line = capsys.readouterr().out.strip()
    said = probes.ask_torch(["-S", "-c", f"print('noise'); print({line!r})"])
    assert said.error is None and said.version and said.cpu_gflops > 0 and said.threads >= 1
    assert said.int8 == (unsupported_reason() is None)


def test_a_process_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    assert "cannot start a process" in str(probes.ask_torch().error)


@pytest.mark.parametrize(("text", "cores"), [("max 100000", None), ("150000 100000", 1.5), ("", None), (None, None)])
def test_quota(text: str | None, cores: float | None, tmp_path: Path) -> None:
    path = tmp_path / "cpu.max"
    if text is not None:
        path.write_text(text)
    assert probes.cpu_quota(path) == cores


@pytest.mark.parametrize(
    ("name", "error", "needs"),
    [
        ("tiny", None, None),
        ("./no-such-folder", "no such folder", None),
        ("no/such/hub/name", "no such folder", None),
        ("somebody/who-is-not-in-the-cache", None, "not downloaded yet"),
        ("tinny", None, "not downloaded yet; did you mean 'tiny', the embedded model?"),
        ("--bad--name--", "neither a folder", None),
    ],
)
def test_models(name: str, error: str | None, needs: str | None) -> None:
    model = probes.read_model(name)
    assert error in (model.error or "") if error else model.error is None
    assert needs in (model.needs or "") if needs else model.needs is None


def test_a_folder_without_weights_or_with_an_unknown_architecture(tmp_path: Path) -> None:
    assert "neither a config.json nor a GGUF file" in str(probes.read_model(str(tmp_path)).error)
    (tmp_path / "config.json").write_text('{"architectures": ["Nobody"]}')
    assert "not supported" in str(probes.read_model(str(tmp_path)).error)


def test_an_encoder_is_a_model(tmp_path: Path) -> None:
    from tests.helpers.encoders import ENCODERS, make_encoder
    from tests.helpers.tokenizers import byte_tokenizer

    make_encoder(ENCODERS["xlm-r"]).save_pretrained(tmp_path)
    byte_tokenizer().backend.save(str(tmp_path / "tokenizer.json"))
    model = probes.read_model(str(tmp_path))
    assert (model.error, model.architecture, model.context) == (None, "XLMRobertaModel", 62)


def test_a_gguf_file_is_a_model(tmp_path: Path) -> None:
    from tests.helpers.checkpoints import make_reference
    from tests.helpers.gguf_files import write_model

    path = write_model(tmp_path / "m.gguf", make_reference("llama"))
    model = probes.read_model(str(path))
    assert (model.error, model.architecture, model.context) == (None, "LlamaForCausalLM", 512)
    assert model.weight_bytes is not None and 0 < model.weight_bytes < path.stat().st_size
    assert model.loaded == LoadedSize("F32", model.weight_bytes, None, model.weight_bytes, four_bits=False)
    assert probes.read_model(str(tmp_path), "m.gguf").error is probes.read_model(str(tmp_path)).error is None
    path.write_bytes(path.read_bytes()[:2000])
    assert "truncated or damaged" in str(probes.read_model(str(path)).error)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = Torch(version="2.13.0", threads=2, cpu_gflops=50.0)
    monkeypatch.setattr(probes, "ask_torch", lambda: torch)


def test_doctor(asked: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "tiny", "--port", "0"]) == 0
    said = capsys.readouterr()
    assert "model tiny" in said.out and said.out.endswith("serving will work\n") and said.err == ""


def test_a_model_is_looked_for_where_serve_keeps_it(
    asked: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commit = "0" * 40
    snapshot = tmp_path / "models--org--model" / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text('{"architectures": ["Nobody"]}')
    (tmp_path / "models--org--model" / "refs").mkdir()
    (tmp_path / "models--org--model" / "refs" / "v1").write_text(commit)
    found = ["doctor", "org/model", "--port", "0", "--download-dir", str(tmp_path), "--revision"]
    assert cli.main([*found, "v1"]) == 1
    assert "Nobody" in capsys.readouterr().out
    assert cli.main([*found, "v2"]) == 0
    assert "not downloaded yet" in capsys.readouterr().out


def test_a_problem_is_in_the_exit_code(asked: None, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert cli.main(["doctor", "--port", str(port), "--json"]) == 1
    said = json.loads(capsys.readouterr().out)
    (check,) = (check for check in said["checks"] if check["state"] == "problem")
    assert said["works"] is False and check["name"] == "port" and "in use" in check["found"]
    assert cli.main(["doctor", "--port", "70000"]) == 2


def test_an_engine_for_others_needs_no_port_of_a_server(asked: None, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for more, code in (([], 0), (["--port", port], 1)):
            assert cli.main(["doctor", "--bind", "127.0.0.1:0", "--json", *more]) == code
            names = [check["name"] for check in json.loads(capsys.readouterr().out)["checks"]]
            assert ("port" in names) == bool(more) and "bind" in names
