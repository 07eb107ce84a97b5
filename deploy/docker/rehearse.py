"""Goes through a Dockerfile's steps without a container runtime: python deploy/docker/rehearse.py [Dockerfile]

The build stage's COPY and RUN happen in a fresh folder (the image's /opt, /src and /models are below it), with this
Python in place of the base image's. Then the entry point is started there as the image would start it, the health
check is run until it passes, a completion is asked for, and the server is told to stop. What needs root or the base
image (RUN steps of the last stage, USER) is listed and left out. pip downloads what the Dockerfile says.
"""

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).parents[2]
# Of the image, which are below the fresh folder here.
PLACES = ("/opt/", "/src", "/models")
PORT, OTHER_PORT = "8000", "8765"
PATIENCE_S = 120.0


class Step(NamedTuple):
    """One instruction. `stage`: counted from 0; of what precedes the first FROM, -1."""

    stage: int
    name: str
    rest: str


def steps(text: str) -> Iterator[Step]:
    """The instructions of a Dockerfile, with their continuation lines joined and comments left out."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    stage = -1
    for line in re.sub(r"\\\n", " ", "\n".join(lines)).splitlines():
        if line.strip():
            name, rest = line.strip().split(None, 1)
            stage += name == "FROM"
            yield Step(stage, name, rest)


class Rehearsal:
    def __init__(self, dockerfile: Path, root: Path, given: dict[str, str]) -> None:
        self._steps = list(steps(dockerfile.read_text(encoding="utf-8")))
        self._root = root
        self._given = given
        self._arguments: dict[str, str] = {}

    def build(self) -> None:
        """The first stage's steps. Raises `CalledProcessError` if one of them fails."""
        last = max(step.stage for step in self._steps)
        for step in self._steps:
            if step.name == "ARG":
                name, _, default = step.rest.partition("=")
                self._arguments[name] = self._given.get(name, default)
            elif step.name in ("RUN", "USER") and step.stage == last:
                print(f"left out: {step.name} {step.rest}", flush=True)
            elif step.stage < last and step.name == "COPY":
                self._copy(*shlex.split(step.rest))
            elif step.stage < last and step.name == "RUN":
                command = self.relocated(step.rest)
                print(f"RUN {command}", flush=True)
                subprocess.run(["sh", "-ec", command], check=True, cwd=self._root, env=self._environment())

    def serve(self, arguments: list[str]) -> None:
        """Entry point, health check, a request, the end. Raises `SystemExit` if one is not as it should be."""
        command = [self._with_port(word) for word in json.loads(self._only("ENTRYPOINT"))] + arguments
        check = json.loads(self._only("HEALTHCHECK").partition("CMD ")[2])
        environment = self._environment()
        command[0] = str(shutil.which(command[0], path=environment["PATH"]))
        check = [str(shutil.which(check[0], path=environment["PATH"])), *map(self._with_port, check[1:])]
        print(shlex.join(command), flush=True)
        began = time.monotonic()
        server = subprocess.Popen(command, cwd=self._root, env=environment)
        try:
            while subprocess.run(check, env=environment, stderr=subprocess.DEVNULL).returncode:
                if server.poll() is not None or time.monotonic() > began + PATIENCE_S:
                    raise SystemExit("the health check never passed")
                time.sleep(0.2)
            print(f"healthy after {time.monotonic() - began:.1f} s", flush=True)
            print(completion(f"http://127.0.0.1:{OTHER_PORT}/v1/completions"), flush=True)
        finally:
            server.send_signal(signal.SIGTERM)
            status = server.wait(PATIENCE_S)
        if status:
            raise SystemExit(f"the server ended with {status}")
        print("stopped: 0", flush=True)

    def _copy(self, *words: str) -> None:
        *sources, target = words
        into = Path(self.relocated(target))
        for source in sources:
            path = REPOSITORY / source
            print(f"COPY {source} {into}", flush=True)
            if path.is_dir():
                shutil.copytree(path, into, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
            else:
                into.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, into)

    def relocated(self, text: str) -> str:
        return re.sub(rf"(?<![\w/])(?=(?:{'|'.join(PLACES)})(?:\W|\w))", str(self._root), text)

    def _with_port(self, word: str) -> str:
        return word.replace(PORT, OTHER_PORT)

    def _only(self, name: str) -> str:
        (found,) = [step.rest for step in self._steps if step.name == name]
        return found

    def _environment(self) -> dict[str, str]:
        made = {**os.environ, **self._arguments, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        made.pop("PYTHONPATH", None)
        for step in self._steps:
            for word in shlex.split(step.rest) if step.name == "ENV" else ():
                name, _, value = word.partition("=")
                made[name] = self.relocated(value).replace(f"${name}", made.get(name, ""))
        return made


def completion(url: str) -> str:
    body = json.dumps({"prompt": "def fibonacci(", "max_tokens": 16, "temperature": 0}).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        text: str = json.load(answer)["choices"][0]["text"]
    return repr(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dockerfile", nargs="?", type=Path, default=REPOSITORY / "deploy/docker/cpu.Dockerfile")
    parser.add_argument("--build-arg", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--folder", type=Path, help="an empty one to do it in; default: a temporary one")
    run_with = "the rest of the line: what the image would be run with"
    parser.add_argument("--serve", nargs=argparse.REMAINDER, default=[], metavar="ARGUMENT", help=run_with)
    args = parser.parse_args()
    given = dict(word.split("=", 1) for word in args.build_arg)
    with tempfile.TemporaryDirectory(prefix="roseinfer-image-", dir=args.folder) as folder:
        rehearsal = Rehearsal(args.dockerfile, Path(folder), given)
        rehearsal.build()
        rehearsal.serve(args.serve)


if __name__ == "__main__":
    main()
