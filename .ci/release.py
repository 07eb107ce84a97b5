"""Build, check and upload the committed version, then tag it: `make release`.

Credentials come as twine reads them: TWINE_USERNAME and TWINE_PASSWORD (for PyPI `__token__` and a token), or
~/.pypirc. TWINE_REPOSITORY_URL or TWINE_REPOSITORY names another index. Nothing is asked. Archives are built from the
commit, so files that git does not know are not in them.
"""

import io
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

VERSION = re.compile(r'^__version__ = "(.+)"$', re.MULTILINE)
# The wheel suits any machine; the source archive builds the compiled functions.
PURE = os.environ | {"ROSEINFER_EXTENSION": "0"}
HEADING = re.compile(r"^## .*$", re.MULTILINE)


def output(*command: str) -> bytes:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout


def module(name: str, *arguments: str) -> None:
    """Run a Python module as a program. Raises `SystemExit` with its status if it fails."""
    done = subprocess.run([sys.executable, "-m", name, *arguments], env=PURE)
    if done.returncode:
        raise SystemExit(done.returncode)


def refuse(problem: str) -> None:
    raise SystemExit(f"release: {problem}")


def released_version() -> str:
    """Return the version to release. Refuse what is not committed, tagged already or not in CHANGELOG.md."""
    changes = output("git", "status", "--porcelain").decode()
    if changes:
        refuse(f"commit or remove these changes first:\n{changes.rstrip()}")
    found = VERSION.search(Path("roseinfer/__init__.py").read_text(encoding="utf-8"))
    if found is None:
        raise SystemExit("release: roseinfer/__init__.py has no line '__version__ = \"...\"'")
    version = found[1]
    if output("git", "tag", "--list", f"v{version}"):
        refuse(f"version {version} is tagged already (v{version}); set __version__ in roseinfer/__init__.py")
    first = HEADING.search(Path("CHANGELOG.md").read_text(encoding="utf-8"))
    if first is None or not re.fullmatch(rf"## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d", first[0]):
        shown = "no section" if first is None else f"'{first[0]}'"
        refuse(f"CHANGELOG.md begins with {shown} (expected '## [{version}] - YYYY-MM-DD')")
    return version


def main() -> None:
    version = released_version()
    with tempfile.TemporaryDirectory() as folder:
        source, archives = Path(folder, "source"), Path(folder, "archives")
        with tarfile.open(fileobj=io.BytesIO(output("git", "archive", "HEAD"))) as tree:
            tree.extractall(source, filter="data")
        module("build", "--no-isolation", "--outdir", str(archives), str(source))
        names = sorted(path.name for path in archives.iterdir())
        expected = [f"roseinfer-{version}-py3-none-any.whl", f"roseinfer-{version}.tar.gz"]
        if names != expected:
            refuse(f"the build made {names} (expected {expected})")
        paths = [str(archives / name) for name in names]
        module("twine", "check", "--strict", *paths)
        module("twine", "upload", "--non-interactive", *paths)
    output("git", "tag", f"v{version}")
    print(f"release: uploaded roseinfer {version} and tagged v{version}; publish the tag: git push origin v{version}")


if __name__ == "__main__":
    main()
