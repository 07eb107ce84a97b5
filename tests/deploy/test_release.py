"""`make release`: what it refuses, and an upload to an index on this machine."""

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

for needed in ("build", "twine", "setuptools"):
    pytest.importorskip(needed, reason="`make release` needs the extra `release`")

SCRIPT = Path(__file__).parents[2] / ".ci" / "release.py"
PYPROJECT = """
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"
[project]
name = "roseinfer"
dynamic = ["version"]
readme = "README.md"
[tool.setuptools.dynamic]
version = {attr = "roseinfer.__version__"}
"""
FILES = {
    "pyproject.toml": PYPROJECT,
    "README.md": "# roseinfer\n",
    "CHANGELOG.md": "# Changelog\n\n## [1.2.0] - 2026-01-02\n- New.\n\n## [1.1.0] - 2026-01-01\n- Old.\n",
    "roseinfer/__init__.py": '__version__ = "1.2.0"\n',
    ".gitignore": "/build/\n*.egg-info/\n__pycache__/\nignored.py\n",
    "roseinfer/ignored.py": "",
}


def git(clone: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=Test", "-c", "user.email=test@example.org")
    return subprocess.check_output(["git", *identity, *arguments], cwd=clone, text=True)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A repository with the release script and a small package, all committed."""
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    (tmp_path / ".ci").mkdir()
    shutil.copy(SCRIPT, tmp_path / ".ci")
    git(tmp_path, "init", "--quiet")
    commit(tmp_path)
    return tmp_path


def commit(clone: Path) -> None:
    git(clone, "add", "--all")
    git(clone, "commit", "--quiet", "--message", "x")


def release(clone: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TWINE_", "PYTHON"))}
    command = [sys.executable, ".ci/release.py"]
    env = kept | {"HOME": str(clone)} | environment
    return subprocess.run(
        command, cwd=clone, env=env, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL
    )


def test_a_dirty_tree_is_refused(clone: Path) -> None:
    (clone / "new.txt").touch()
    done = release(clone)
    assert done.returncode == 1 and "commit or remove these changes first:\n?? new.txt" in done.stderr


def test_a_tagged_version_is_refused(clone: Path) -> None:
    git(clone, "tag", "v1.2.0")
    done = release(clone)
    assert done.returncode == 1 and "version 1.2.0 is tagged already" in done.stderr


@pytest.mark.parametrize("heading", ["## [1.1.0] - 2026-01-02", "## [Unreleased]", "## [1.2.0]", "# Changelog"])
def test_a_version_without_its_section_is_refused(clone: Path, heading: str) -> None:
    (clone / "CHANGELOG.md").write_text(f"{heading}\n- New.\n")
    commit(clone)
    done = release(clone)
    assert done.returncode == 1 and "(expected '## [1.2.0] - YYYY-MM-DD')" in done.stderr


class Index(BaseHTTPRequestHandler):
    """Package index that accepts one password."""

    received: list[bytes]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        known = self.headers["Authorization"] == "Basic X190b2tlbl9fOnNlY3JldA=="  # __token__:secret
        if known:
            self.received.append(body)
        self.send_response(200 if known else 403)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def index() -> Iterator[HTTPServer]:
    Index.received = []
    with HTTPServer(("127.0.0.1", 0), Index) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def upload(clone: Path, index: HTTPServer, password: str) -> subprocess.CompletedProcess[str]:
    to = {"TWINE_REPOSITORY_URL": f"http://127.0.0.1:{index.server_port}/", "TWINE_USERNAME": "__token__"}
    return release(clone, TWINE_PASSWORD=password, **to)


@pytest.mark.exhaustive
def test_a_rejected_upload_leaves_no_tag(clone: Path, index: HTTPServer) -> None:
    wrong = upload(clone, index, "wrong")
    assert wrong.returncode and git(clone, "tag", "--list") == "" and Index.received == []


def test_credentials_are_all_that_it_needs(clone: Path, index: HTTPServer) -> None:
    done = upload(clone, index, "secret")
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(Index.received) == 2 and all(b"1.2.0" in body for body in Index.received)
    assert not any(b"ignored.py" in body for body in Index.received), "the archives have what is committed"
    assert git(clone, "tag", "--list") == "v1.2.0\n" and git(clone, "status", "--porcelain") == ""
    assert "is tagged already" in release(clone).stderr
