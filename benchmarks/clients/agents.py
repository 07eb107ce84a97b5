"""Agents from npm, each as it is installed, configured only with the server's URL, key and model.

An agent runs in an empty folder, may not write or execute, and is made to call one harmless tool. Output of random
weights cannot become another call, since the proxy forbids the token that begins one.
"""

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.clients.place import NOTES, Place, Run, install_step
from benchmarks.clients.python_clients import step_errors

NPM = Path(__file__).parent / "npm"
HELLO = "Say hello."
AGAIN = "Now another conversation: say hello."
KEY = "none"
PROVIDER = "roseinfer"


@dataclass(frozen=True, slots=True)
class Command:
    """One run of an agent, and its variables."""

    arguments: list[str | Path]
    environment: Mapping[str, str] = field(default_factory=dict)


class Agent:
    """Base of agents that run once per conversation. `tools`: those that are called, one per conversation."""

    name: str
    package: str
    tools: tuple[str, ...]

    def arguments(self, place: Place) -> dict[str, Any]:
        """Return the schema that replaces each tool's own, so that its arguments are not random."""
        raise NotImplementedError

    def configure(self, place: Place) -> None:
        """Write the agent's own configuration: URL, key and model."""

    def command(self, binaries: Path, place: Place, prompt: str) -> Command:
        raise NotImplementedError

    def failures(self, event: dict[str, Any]) -> Iterator[str]:
        """Yield the errors that a line of the agent's output reports."""
        raise NotImplementedError

    def conversations(self) -> tuple[str, ...]:
        return (HELLO, *(f"Please call the tool {tool} once." for tool in self.tools), AGAIN)

    def errors(self, done: Run) -> list[str]:
        lines = [json.loads(line) for line in done.output.splitlines() if line.startswith("{")]
        found = [failure for line in lines for failure in self.failures(line)]
        if done.code and not found:
            found.append(f"exit code {done.code}: {done.output[-500:]}")
        return found

    def version(self, folder: Path) -> str:
        return package_version(folder, self.package)

    def run(self, folder: Path, place: Place) -> Iterator[list[str]]:
        """Yield the errors of each conversation."""
        self.configure(place)
        for prompt in self.conversations():
            command = self.command(folder.absolute() / "npm/node_modules/.bin", place, prompt)
            yield self.errors(place.run(command.arguments, command.environment))


class Codex(Agent):
    # The second one is in a namespace, and answers that there is no such agent.
    name, package, tools = "codex", "@openai/codex", ("get_goal", "close_agent")

    def arguments(self, place: Place) -> dict[str, Any]:
        return {"close_agent": constant("target", "nobody")}

    def configure(self, place: Place) -> None:
        folder = place.home / ".codex"
        folder.mkdir()
        lines = (
            f'model = "{place.model}"',
            f'model_provider = "{PROVIDER}"',
            f"[model_providers.{PROVIDER}]",
            f'name = "{PROVIDER}"',
            f'base_url = "{place.url}/v1"',
            'env_key = "ROSEINFER_API_KEY"',
        )
        (folder / "config.toml").write_text("\n".join(lines) + "\n")

    def command(self, binaries: Path, place: Place, prompt: str) -> Command:
        options = ["--json", "--skip-git-repo-check", "--sandbox", "read-only"]
        return Command([binaries / "codex", "exec", *options, prompt], {"ROSEINFER_API_KEY": KEY})

    def failures(self, event: dict[str, Any]) -> Iterator[str]:
        if event.get("type") in ("error", "turn.failed"):
            yield str(event.get("message") or event.get("error"))


class ClaudeCode(Agent):
    # The second one requests tools that are not part of every request.
    name, package, tools = "claude-code", "@anthropic-ai/claude-code", ("Read", "ToolSearch")

    def arguments(self, place: Place) -> dict[str, Any]:
        searched = constant("query", "select:WebFetch")
        return {"Read": constant("file_path", str(place.work / NOTES)), "ToolSearch": searched}

    def command(self, binaries: Path, place: Place, prompt: str) -> Command:
        environment = {
            "ANTHROPIC_BASE_URL": place.url,
            "ANTHROPIC_AUTH_TOKEN": KEY,
            "ANTHROPIC_MODEL": place.model,
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": place.model,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_AUTOUPDATER": "1",
        }
        return Command([binaries / "claude", "-p", prompt, "--output-format", "json"], environment)

    def failures(self, event: dict[str, Any]) -> Iterator[str]:
        if event.get("is_error"):
            yield str(event.get("result"))
        for denied in event.get("permission_denials") or []:
            yield f"denied: {denied}"


class OpenCode(Agent):
    name, package, tools = "opencode", "opencode-ai", ("read",)

    def arguments(self, place: Place) -> dict[str, Any]:
        return {"read": constant("filePath", str(place.work / NOTES))}

    def configure(self, place: Place) -> None:
        folder = place.home / ".config/opencode"
        folder.mkdir(parents=True)
        provider = {
            "npm": "@ai-sdk/openai-compatible",
            "name": PROVIDER,
            "options": {"baseURL": f"{place.url}/v1", "apiKey": KEY},
            "models": {place.model: {"name": place.model}},
        }
        model = f"{PROVIDER}/{place.model}"
        only_reads = {"*": "ask", "read": "allow"}  # nobody answers questions, so the rest is denied
        config = {"provider": {PROVIDER: provider}, "model": model, "permission": only_reads, "autoupdate": False}
        (folder / "opencode.json").write_text(json.dumps(config))

    def command(self, binaries: Path, place: Place, prompt: str) -> Command:
        quiet = {"OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_LSP_DOWNLOAD": "1"}
        return Command([binaries / "opencode", "run", "--format", "json", prompt], quiet)

    def failures(self, event: dict[str, Any]) -> Iterator[str]:
        if event.get("type") == "error":
            yield str(event.get("error"))
        state = (event.get("part") or {}).get("state") or {}
        if state.get("status") == "error":
            yield f"{event['part'].get('tool')}: {state.get('error')}"


class AiSdk(Agent):
    """Vercel's AI SDK, a library; a script runs its steps in one process."""

    name, package, tools = "ai-sdk", "ai", ("weather",)

    def arguments(self, place: Place) -> dict[str, Any]:
        return {}

    def conversations(self) -> tuple[str, ...]:
        return (HELLO,)

    def command(self, binaries: Path, place: Place, prompt: str) -> Command:
        # Node looks for packages in the script's folder.
        script = binaries.parent.parent / "ai_sdk.mjs"
        shutil.copy(NPM / "ai_sdk.mjs", script)
        return Command(["node", script], {"CLIENTS_URL": place.url, "CLIENTS_MODEL": place.model})

    def errors(self, done: Run) -> list[str]:
        return step_errors(done)

    def version(self, folder: Path) -> str:
        return package_version(folder, self.package)


AGENTS: tuple[Agent, ...] = (Codex(), ClaudeCode(), OpenCode(), AiSdk())


def install(folder: Path, upgrade: bool) -> None:
    """Install all agents with npm if they are missing. Raise `InstallError`."""
    target = folder / "npm"
    if (target / "installed").exists() and not upgrade:
        return
    target.mkdir(parents=True, exist_ok=True)
    shutil.copy(NPM / "package.json", target)
    (target / "package-lock.json").unlink(missing_ok=True)
    command = ["npm", "install", "--no-audit", "--no-fund", "--silent"]
    install_step(command, target)
    (target / "installed").touch()


def package_version(folder: Path, package: str) -> str:
    described = json.loads((folder / "npm/node_modules" / package / "package.json").read_text())
    return str(described["version"])


def constant(name: str, value: str) -> dict[str, Any]:
    """Return the schema of an object with one property that has one value."""
    properties = {name: {"type": "string", "enum": [value]}}
    return {"type": "object", "properties": properties, "required": [name], "additionalProperties": False}
