"""`roseinfer certificates`: the files that it makes, how they are renewed, and options that it rejects."""

import stat
from pathlib import Path

import pytest

from roseinfer.cli import main as cli
from roseinfer.cluster.remote.tls import TlsFolder
from roseinfer.core.extras import install_command


def make(folder: Path, hosts: str, *options: str) -> None:
    assert cli.main(["certificates", str(folder), "--hosts", hosts, *options]) == 0


def test_each_host_gets_a_folder_that_only_we_may_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "deployment"
    make(folder, "10.0.0.2, node-3.example.org")
    assert {path.name for path in folder.iterdir()} == {"ca", "10.0.0.2", "node-3.example.org"}
    for name in ("10.0.0.2", "node-3.example.org"):
        TlsFolder(folder / name)
        assert {path.name for path in (folder / name).iterdir()} == {"ca.crt", "tls.crt", "tls.key"}
    for path in folder.rglob("*"):
        assert not path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO), path
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 3 and said[-1] == f"{folder}/ca/ca.key signs further certificates; keep it on this machine"


def test_a_second_run_renews_with_the_same_ca(tmp_path: Path) -> None:
    make(tmp_path, "a", "--days", "30")
    tls = TlsFolder(tmp_path / "a")
    ca, before = (tmp_path / "a" / "ca.crt").read_bytes(), tls.contexts()
    make(tmp_path, "a,b", "--days", "90")
    assert tls.contexts().expires_s - before.expires_s > 50 * 86400
    assert {(tmp_path / name / "ca.crt").read_bytes() for name in ("a", "b", "ca")} == {ca}


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ([], "--dir must be given"),
        (["DIR"], "--hosts must be given"),
        (["DIR", "--hosts", "a,,b"], "--hosts: '' is neither a host name nor an IP address"),
        (["DIR", "--hosts", "10.0.0.2:7000"], "'10.0.0.2:7000' is neither"),
        (["DIR", "--hosts", "../escape"], "'../escape' is neither"),
        (["DIR", "--hosts", "ca"], "'ca' is the folder of the CA"),
        (["DIR", "--hosts", "a", "--days", "0"], "--days must be positive"),
        (["DIR", "--hosts", "a", "--days", "4000"], "--days must be at most 3650"),
    ],
)
def test_wrong_options_are_rejected_by_name(
    options: list[str], error: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["certificates", *[each.replace("DIR", str(tmp_path)) for each in options]]) == 2
    assert error in capsys.readouterr().err.splitlines()[-1]
    assert not list(tmp_path.iterdir())


def test_half_a_ca_is_not_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A new CA would lock out all hosts that have certificates of the old one."""
    make(tmp_path, "a")
    (tmp_path / "ca" / "ca.key").write_text("no key")
    assert cli.main(["certificates", str(tmp_path), "--hosts", "a"]) == 2
    assert "has no valid CA" in capsys.readouterr().err


def test_without_the_extra_the_error_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "cryptography", None)
    assert cli.main(["certificates", str(tmp_path), "--hosts", "a"]) == 1
    assert install_command("tls") in capsys.readouterr().err
