"""`roseinfer engine` and `serve --engines` report invalid options in one line before any start."""

import os
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from roseinfer.cli import main as cli
from tests.helpers.remote import write_certificate


def certificates(folder: Path) -> str:
    return str(write_certificate(folder / "tls"))


def told(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert cli.main(argv) == 2
    usage, error = capsys.readouterr().err.strip().splitlines()
    assert usage.startswith(f"usage: roseinfer {argv[0]}")
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
        (["--bind", "127.0.0.1:7000"], "--tls-dir must be given"),
        (["--bind", "7000", "--tls-dir", "DIR"], "--bind: invalid address '7000' (expected HOST:PORT)"),
        (["--bind", "::1:7000", "--tls-dir", "DIR"], "put an IPv6 address in brackets, as [::1]:7000"),
        (["--bind", "127.0.0.1:70000", "--tls-dir", "DIR"], "(expected HOST:PORT)"),
        (["--bind", "127.0.0.1:0", "--tls-dir", "nowhere"], "nowhere/ca.crt: No such file"),
        (
            ["--bind", "127.0.0.1:0", "--tls-dir", "DIR", "--devices", "0,1"],
            "--devices must name the GPUs of one engine",
        ),
        (
            ["--bind", "127.0.0.1:0", "--tls-dir", "DIR", "--stall-timeout", "0"],
            "--stall-timeout must be positive",
        ),
    ],
)
def test_an_engine_that_cannot_be_kept(
    options: list[str], error: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = certificates(tmp_path)
    assert error in told(["engine", *[option.replace("DIR", folder) for option in options]], capsys)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--engines", "a:1"], "--engines needs --tls-dir"),
        (["--tls-dir", "DIR"], "--tls-dir is only for engines on other hosts"),
        (["--engines", "a:1,b", "--tls-dir", "DIR"], "--engines: invalid address 'b' (expected HOST:PORT)"),
        (["--engines", "a:1,,b:2", "--tls-dir", "DIR"], "--engines must be different addresses"),
        (["--engines", "a:1,a:1", "--tls-dir", "DIR"], "--engines must be different addresses"),
        (
            ["--engines", "a:1", "--tls-dir", "DIR", "--replicas", "2"],
            "--replicas cannot be combined",
        ),
        (
            ["--engines", "a:1", "--tls-dir", "DIR", "--devices", "0"],
            "--devices cannot be combined",
        ),
        (
            ["--engines", "a:1", "--tls-dir", "DIR", "--max-num-seqs", "8"],
            "--max-num-seqs is an engine option: pass it to each `roseinfer engine`",
        ),
        (["--engines", "a:1", "--tls-dir", "DIR", "--device", "cpu"], "--device is an engine option"),
        (["--engines", "a:1", "--tls-dir", "DIR", "--router", "pace"], "--router needs several"),
        (["--engines", "a:1", "--tls-dir", "nowhere"], "nowhere/ca.crt: No such file"),
    ],
)
def test_engines_that_cannot_be_served(
    options: list[str], error: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = certificates(tmp_path)
    assert error in told(["serve", *[option.replace("DIR", folder) for option in options]], capsys)


def test_a_private_key_that_others_may_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = certificates(tmp_path)
    (tmp_path / "tls" / "tls.key").chmod(0o644)
    said = told(["engine", "--bind", "127.0.0.1:0", "--tls-dir", folder], capsys)
    assert said == f"--tls-dir: other users may read {folder}/tls.key; run: chmod 600 {folder}/tls.key"


def test_an_address_that_is_not_ours_is_told_before_anything_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    with TemporaryDirectory() as folder:  # pytest's own path may be too long for a socket
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr("tempfile.tempdir", None)
        argv = ["engine", "--bind", "192.0.2.1:7000", "--tls-dir", certificates(tmp_path)]
        assert "--bind: cannot listen on 192.0.2.1:7000: Cannot assign requested address" in told(argv, capsys)
        assert os.listdir(folder) == [], "nothing is left"


@pytest.mark.parametrize("command", ["engine", "serve", "doctor"])
def test_the_former_secret_is_rejected_and_its_successor_named(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as error:
        cli.main([command, "--secret-file", "secret"])
    assert error.value.code == 2
    said = capsys.readouterr().err
    assert "--secret-file was removed: hosts use TLS now" in said and "--tls-dir" in said
    if command != "doctor":
        (tmp_path / "config.toml").write_text('secret_file = "secret"\n')
        assert "option 'secret_file' was removed" in told([command, "--config", str(tmp_path / "config.toml")], capsys)
