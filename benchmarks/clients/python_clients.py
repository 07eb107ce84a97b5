"""Clients from PyPI, each in a separate environment, driven by its script in `pypi/`."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.clients.place import Place, Run, install_step

SCRIPTS = Path(__file__).parent / "pypi"


@dataclass(frozen=True, slots=True)
class PythonClient:
    """Client and what pip installs for it: `requirements`, of which the first is the package whose version counts."""

    name: str
    requirements: tuple[str, ...]

    @property
    def script(self) -> Path:
        return SCRIPTS / f"use_{self.name.replace('-', '_')}.py"

    def install(self, folder: Path, upgrade: bool) -> None:
        """Create the client's environment if it is missing. Raise `InstallError`."""
        environment = self._environment(folder)
        if (environment / "installed").exists() and not upgrade:
            return
        install_step([sys.executable, "-m", "venv", str(environment)])
        pip = [str(environment / "bin/python"), "-m", "pip", "--quiet", "--disable-pip-version-check"]
        install_step([*pip, "install", "--no-compile", "--upgrade", *self.requirements])
        (environment / "installed").touch()

    def version(self, folder: Path) -> str:
        package = self.requirements[0].partition("[")[0]
        code = f"from importlib.metadata import version; print(version({package!r}))"
        return install_step([str(self._environment(folder) / "bin/python"), "-c", code]).strip()

    def run(self, folder: Path, place: Place) -> list[str]:
        """Run the script and return its errors."""
        variables = {"CLIENTS_URL": place.url, "CLIENTS_MODEL": place.model, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
        return step_errors(place.run([self._environment(folder) / "bin/python", self.script], variables))

    def _environment(self, folder: Path) -> Path:
        return folder.absolute() / "pypi" / self.name


CLIENTS = (
    PythonClient("openai", ("openai", "pydantic")),
    PythonClient("anthropic", ("anthropic", "pydantic")),
    PythonClient("llm", ("llm",)),
    PythonClient("aider", ("aider-chat",)),
    PythonClient("litellm", ("litellm", "mcp")),
    PythonClient("instructor", ("instructor", "openai", "anthropic")),
    PythonClient("pydantic-ai", ("pydantic-ai-slim[openai,anthropic]",)),
    PythonClient("openai-agents", ("openai-agents",)),
    PythonClient("langchain", ("langchain", "langchain-openai", "langchain-anthropic")),
    PythonClient("llama-index", ("llama-index-llms-openai-like",)),
    PythonClient("smolagents", ("smolagents[openai]",)),
)


def step_errors(done: Run) -> list[str]:
    """Return the errors of a script that prints a JSON line for each step."""
    errors: list[str] = []
    steps = 0
    for line in done.output.splitlines():
        if line.startswith('{"step":'):
            step = json.loads(line)
            steps += 1
            if step["error"]:
                errors.append(f"{step['step']}: {step['error']}")
    if done.code or not steps:
        errors.append(f"exit code {done.code} after {steps} steps: {done.output[-500:]}")
    return errors
