"""Run clients and agents against `roseinfer serve` and print the results.

python -m benchmarks.clients                 the clients from PyPI
python -m benchmarks.clients npm             the agents from npm
python -m benchmarks.clients codex openai    some of both
"""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from benchmarks.clients import agents
from benchmarks.clients.agents import AGENTS, Agent
from benchmarks.clients.model import write_folder
from benchmarks.clients.place import InstallError, Place
from benchmarks.clients.proxy import Exchange, Proxy, Shortener
from benchmarks.clients.python_clients import CLIENTS, PythonClient
from benchmarks.clients.report import Row, table
from benchmarks.clients.wire import shared_start
from benchmarks.gpu_server import Server, ServerError

MODEL = "random"
START_TIMEOUT_S = 120.0
TEMPLATE = Path(__file__).parents[2] / "examples/chatml_tools.jinja"
GROUPS: dict[str, tuple[str, ...]] = {
    "pypi": tuple(client.name for client in CLIENTS),
    "npm": tuple(agent.name for agent in AGENTS),
}


def run_client(client: PythonClient, folder: Path, server: Server) -> Row:
    with Proxy(server.url, Shortener(folder / "model")) as proxy, Place(proxy.url, MODEL) as place:
        errors = client.run(folder, place)
        return Row(client.name, client.version(folder), proxy.exchanges, errors)


def run_agent(agent: Agent, folder: Path, server: Server) -> Row:
    """Run all conversations of an agent; of several, the last one should find the start of the first in the cache."""
    shortener = Shortener(folder / "model")
    with Proxy(server.url, shortener) as proxy, Place(proxy.url, MODEL) as place:
        shortener.arguments = agent.arguments(place)
        row = Row(agent.name, agent.version(folder), proxy.exchanges)
        starts: list[Exchange] = []
        seen = 0
        for errors in agent.run(folder, place):
            row.errors += errors
            starts += main_request(proxy.exchanges[seen:])
            seen = len(proxy.exchanges)
        if len(starts) > 1:
            row.cached = cached_share(proxy, starts[0], starts[-1])
        return row


def main_request(exchanges: list[Exchange]) -> list[Exchange]:
    """Return the first request with the most tools: agents also send smaller ones, for example for a title."""
    answered = [one for one in exchanges if one.is_answer and one.usage is not None]
    return [max(answered, key=lambda one: len((one.sent or {}).get("tools") or []))] if answered else []


def cached_share(proxy: Proxy, first: Exchange, second: Exchange) -> float | None:
    """Return the share of two prompts' common start that the second found in the cache, at least.

    The server counts the common start: it is the second prompt up to the first difference, plus the few tokens that
    begin an answer.
    """
    common = proxy.ask(second.path, shared_start(first.sent or {}, second.sent or {})).usage
    if common is None or second.usage is None:
        return None
    return min(second.usage.cached_tokens / common.prompt_tokens, 1.0)


def rows(names: list[str], folder: Path, upgrade: bool) -> Iterator[Row]:
    clients = [client for client in CLIENTS if client.name in names]
    chosen = [agent for agent in AGENTS if agent.name in names]
    for client in clients:
        client.install(folder, upgrade)
    if chosen:
        agents.install(folder, upgrade)
    model = write_folder(folder / "model")
    options = ["--load-format", "dummy", "--chat-template", str(TEMPLATE), "--served-model-name", MODEL]
    server = Server([str(model), *options, "--num-kv-blocks", "16384"], folder / "server.log")
    try:
        server.await_health(START_TIMEOUT_S)
        yield from (run_client(client, folder, server) for client in clients)
        yield from (run_agent(agent, folder, server) for agent in chosen)
    finally:
        server.stop()


def write_log(folder: Path, row: Row) -> None:
    """Write each request and answer of a client as a line of JSON."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(asdict(exchange)) for exchange in row.exchanges]
    (folder / f"{row.client}.jsonl").write_text("\n".join(lines) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = [*GROUPS, *(name for names in GROUPS.values() for name in names)]
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(known))
    parser.add_argument("--folder", type=Path, default=Path(".clients"), help="environments and the model's folder")
    parser.add_argument("--upgrade", action="store_true", help="install the newest versions again")
    parser.add_argument("--log", type=Path, metavar="DIR", help="write all requests and answers there")
    args = parser.parse_args()
    unknown = set(args.names) - set(known)
    if unknown:
        parser.error(f"unknown client '{min(unknown)}' (expected {', '.join(known)})")
    names = [one for name in args.names or ["pypi"] for one in GROUPS.get(name, (name,))]
    done: list[Row] = []
    try:
        for row in rows(names, args.folder, args.upgrade):
            done.append(row)
            print(f"{row.client} {row.version}: {len(row.all_errors)} errors", file=sys.stderr, flush=True)
            if args.log is not None:
                write_log(args.log, row)
    except (InstallError, ServerError) as error:
        sys.exit(f"{error}")
    print(table(done))
    return int(any(row.all_errors for row in done))


if __name__ == "__main__":
    sys.exit(main())
