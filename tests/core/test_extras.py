"""Commands in messages about missing extras: they work as printed."""

from pathlib import Path

from roseinfer.core.extras import ROOT, install_command


def test_a_clone_is_installed_from_itself(tmp_path, monkeypatch):
    (tmp_path / "pyproject.toml").touch()
    assert install_command("tls", tmp_path) == f"pip install -e '{tmp_path}[tls]'"
    monkeypatch.chdir(tmp_path)
    assert install_command("tls", tmp_path) == "pip install -e '.[tls]'"


def test_an_installed_package_is_installed_by_name(tmp_path):
    assert install_command("terminal", tmp_path) == "pip install 'roseinfer[terminal]'"


def test_this_is_a_clone():
    assert Path(__file__).is_relative_to(ROOT) and (ROOT / "pyproject.toml").is_file()
