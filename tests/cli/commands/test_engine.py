"""`roseinfer engine` and `serve --engines` report invalid options in one line before any start."""

import os
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from roseinfer.cli import main as cli

SECRET = "0123456789abcdef"


def secret_file(folder: Path, text: str = SECRET, mode: int = 0o600) -> str:
    path = folder / "secret"
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def told(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert cli.main(argv) == 2
    usage, error = capsys.readouterr().err.strip().splitlines()
    assert usage.startswith(f"usage: roseinfer {argv[0]}") and SECRET not in error
    return error.removeprefix("roseinfer: error: ")


@pytest.fixture(autouse=True)
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("no model is needed to see that the options are wrong")

    monkeypatch.setattr("roseinfer.config.hub.resolve_model", refuse)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ([], "--bind must be given"),
        (["--bind", "127.0.0.1:7000"], "--secret-file must be given"),
        (["--bind", "7000", "--secret-file", "FILE"], "--bind: '7000' is no HOST:PORT"),
        (["--bind", "::1:7000", "--secret-file", "FILE"], "an IPv6 address stands in brackets, as [::1]:7000"),
        (["--bind", "127.0.0.1:70000", "--secret-file", "FILE"], "is no HOST:PORT"),
        (["--bind", "127.0.0.1:0", "--secret-file", "nowhere"], "--secret-file: cannot read nowhere: No such file"),
        (["--bind", "127.0.0.1:0", "--secret-file", "/tmp"], "--secret-file: cannot read /tmp: Is a directory"),
        (
            ["--bind", "127.0.0.1:0", "--secret-file", "FILE", "--devices", "0,1"],
            "--devices must name the GPUs of one engine",
        ),
        (
            ["--bind", "127.0.0.1:0", "--secret-file", "FILE", "--stall-timeout", "0"],
            "--stall-timeout must be positive",
        ),
    ],
)
def test_an_engine_that_cannot_be_kept(
    options: list[str], error: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = secret_file(tmp_path)
    assert error in told(["engine", *[option.replace("FILE", file) for option in options]], capsys)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--engines", "a:1"], "--engines needs --secret-file"),
        (["--secret-file", "FILE"], "--secret-file: only engines on other hosts ask for a secret"),
        (["--engines", "a:1,b", "--secret-file", "FILE"], "--engines: 'b' is no HOST:PORT"),
        (["--engines", "a:1,,b:2", "--secret-file", "FILE"], "--engines must be different addresses"),
        (["--engines", "a:1,a:1", "--secret-file", "FILE"], "--engines must be different addresses"),
        (
            ["--engines", "a:1", "--secret-file", "FILE", "--replicas", "2"],
            "--replicas cannot be combined",
        ),
        (
            ["--engines", "a:1", "--secret-file", "FILE", "--devices", "0"],
            "--devices cannot be combined",
        ),
        (
            ["--engines", "a:1", "--secret-file", "FILE", "--max-num-seqs", "8"],
            "--max-num-seqs is an engine option: pass it to each `roseinfer engine`",
        ),
        (["--engines", "a:1", "--secret-file", "FILE", "--device", "cpu"], "--device is an engine option"),
        (["--engines", "a:1", "--secret-file", "FILE", "--router", "pace"], "--router needs several"),
        (["--engines", "a:1", "--secret-file", "nowhere"], "--secret-file: cannot read nowhere"),
    ],
)
def test_engines_that_cannot_be_served(
    options: list[str], error: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = secret_file(tmp_path)
    assert error in told(["serve", *[option.replace("FILE", file) for option in options]], capsys)


@pytest.mark.parametrize(
    ("text", "mode", "error"),
    [
        (SECRET, 0o644, "others may read FILE: chmod 600 FILE"),
        (SECRET, 0o620, "others may read FILE"),
        ("", 0o600, "FILE: a secret has 16 to 1024 bytes, this one 0: make one with: openssl rand -hex 32"),
        ("  too short \n", 0o600, "this one 9"),
        ("x" * 1025, 0o600, "this one 1025"),
    ],
)
def test_a_secret_that_is_none(
    text: str, mode: int, error: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = secret_file(tmp_path, text, mode)
    said = told(["engine", "--bind", "127.0.0.1:0", "--secret-file", file], capsys)
    assert said.startswith("--secret-file: ") and error.replace("FILE", file) in said


def test_an_address_that_is_not_ours_is_told_before_anything_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    with TemporaryDirectory() as folder:  # pytest's own path may be too long for a socket
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr("tempfile.tempdir", None)
        argv = ["engine", "--bind", "192.0.2.1:7000", "--secret-file", secret_file(tmp_path)]
        assert "--bind: cannot listen on 192.0.2.1:7000: Cannot assign requested address" in told(argv, capsys)
        assert os.listdir(folder) == [], "nothing is left"
