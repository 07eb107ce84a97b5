"""The command `aider`: a question, and an edit of a file."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from steps import HELLO, KEY, MODEL, URL, run

QUIET = (
    "--yes-always",
    "--no-git",
    "--no-gitignore",
    "--no-pretty",
    "--no-check-update",
    "--analytics-disable",
    "--no-show-release-notes",
    "--no-show-model-warnings",
    "--no-suggest-shell-commands",
    "--no-detect-urls",
    "--map-tokens=0",
)
FILE = "notes.txt"
# With prices of models in its cache it asks nobody for them.
PRICES = Path.home() / ".aider/caches/model_prices_and_context_window.json"
PRICES.parent.mkdir(parents=True, exist_ok=True)
PRICES.write_text('{"none": {}}')
EDIT = f"{FILE}\n```\nBuy bread.\n```"


def aider(prompt: str, *arguments: str) -> str:
    """Return the file's content after the edit."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / FILE
        path.write_text("Buy milk.\n")
        command = [str(Path(sys.executable).with_name("aider")), "--model", f"openai/{MODEL}", *QUIET, *arguments]
        environment = {**os.environ, "OPENAI_API_BASE": f"{URL}/v1", "OPENAI_API_KEY": KEY}
        done = subprocess.run(
            [*command, "--message", prompt, FILE],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
        )
        said = done.stdout + done.stderr
        assert done.returncode == 0 and "Error" not in said, said[-2000:]
        return path.read_text()


def plain() -> None:
    assert aider(HELLO, "--no-stream", "--chat-mode", "ask") == "Buy milk.\n"


def stream() -> None:
    assert aider(HELLO) == "Buy milk.\n"


def edit() -> None:
    assert aider(f"Answer exactly this:\n{EDIT}", "--edit-format", "whole") == "Buy bread.\n"


run(plain, stream, edit)
