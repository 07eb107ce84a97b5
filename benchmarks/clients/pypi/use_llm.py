"""The command `llm`, with the server in its file of OpenAI-compatible models."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from steps import CALL, HELLO, KEY, MODEL, URL, run

FOLDER = Path(tempfile.mkdtemp())
MODELS = f"""
- model_id: served
  model_name: {MODEL}
  api_base: "{URL}/v1"
  supports_tools: true
  supports_schema: true
"""
FUNCTION = """
def weather(city: str) -> str:
    "Return the weather in a city."
    return "rain"
"""
(FOLDER / "extra-openai-models.yaml").write_text(MODELS)


def llm(*arguments: str) -> str:
    command = [str(Path(sys.executable).with_name("llm")), *arguments, "-m", "served", "--key", KEY]
    environment = {**os.environ, "LLM_USER_PATH": str(FOLDER)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 0 and "Error" not in done.stderr, done.stderr
    return done.stdout + done.stderr


def plain() -> None:
    llm(HELLO, "--no-stream")


def stream() -> None:
    llm(HELLO)


def conversation() -> None:
    llm("And again.", "-c")


def tool() -> None:
    for stream in ((), ("--no-stream",)):
        assert "rain" in llm(CALL, "--functions", FUNCTION, "--td", *stream)


def schema() -> None:
    assert set(json.loads(llm(HELLO, "--schema", "name, age int"))) == {"name", "age"}


run(plain, stream, conversation, tool, schema)
