"""How long the console keeps a browser from drawing, with its list full of requests and more of them coming.

    python -m benchmarks.console_frames [--requests 1000] [--rate 20] [--seconds 8]

A server with the embedded model answers `--requests` short requests, then `--rate` of them a second while a headless
Chromium looks at each of the console's tabs and uses it. A frame is late when the page's main thread is busy, so what
is printed is the longest of its tasks: by the clock, and in the thread's own CPU time, which another program on the
machine does not lengthen. The goal is 50 ms.
"""

import argparse
import itertools
import json
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

import httpx

from benchmarks.browser import chromium, launched
from benchmarks.faults.server import ServerUnderTest, until
from roseinfer.bench.report import header, table

TRACED = ["toplevel", "disabled-by-default-devtools.timeline", "devtools.timeline", "__metadata"]
CLASSES = [{}, {"slo": {"ttft_ms": 2000, "tpot_ms": 200}}, {"slo": {"ttft_ms": 1}}]


class Busy(NamedTuple):
    """What one look at the page kept its main thread busy with: tasks, and the longest of them in ms."""

    tasks: int
    longest_ms: float
    longest_cpu_ms: float
    busy_share: float


def busy(trace: bytes) -> Busy:
    """Of a trace as Chromium writes it: the tasks of the page's main thread."""
    events = json.loads(trace)["traceEvents"]
    main = {
        (event["pid"], event["tid"])
        for event in events
        if event["name"] == "thread_name" and event["args"]["name"] == "CrRendererMain"
    }
    tasks = [
        event
        for event in events
        if event["name"] == "ThreadControllerImpl::RunTask"
        and event["ph"] == "X"
        and (event["pid"], event["tid"]) in main
    ]
    if not tasks:
        raise RuntimeError("the trace has no tasks of a page's main thread")
    began, ended = min(task["ts"] for task in tasks), max(task["ts"] + task["dur"] for task in tasks)
    return Busy(
        len(tasks),
        max(task["dur"] for task in tasks) / 1000,
        max(task.get("tdur", 0) for task in tasks) / 1000,
        sum(task["dur"] for task in tasks) / (ended - began),
    )


def ask(client: httpx.Client, number: int) -> None:
    body = {"prompt": f"def f{number}(", "max_tokens": 4, **CLASSES[number % len(CLASSES)]}
    client.post("/v1/completions", json=body)


@contextmanager
def load(client: httpx.Client, rate: float) -> Iterator[None]:
    """`rate` requests a second while the block runs."""
    over = threading.Event()

    def go_on() -> None:
        for number in itertools.count():
            if over.wait(1 / rate):
                return
            ask(client, number)

    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


# --- what is done with the page ---------------------------------------------------------------------------------
def open_list(page: Any, seconds: float) -> None:
    page.keyboard.press("2")
    page.locator(".window .row").first.wait_for()
    page.wait_for_timeout(seconds * 1000)


def scroll(page: Any, seconds: float) -> None:
    page.locator("#rows").hover()
    for _ in range(int(seconds * 10)):
        page.mouse.wheel(0, 600)
        page.wait_for_timeout(100)


def walk(page: Any, seconds: float) -> None:
    page.locator("#rows").focus()
    page.keyboard.press("Home")
    page.keyboard.press("Enter")
    for _ in range(int(seconds * 10)):
        page.keyboard.press("j")
        page.wait_for_timeout(100)
    page.keyboard.press("Escape")


def search(page: Any, seconds: float) -> None:
    page.locator("#filter").press_sequentially("custom refused ttft", delay=seconds * 50)
    page.locator("#filter").fill("")


def watch(page: Any, seconds: float) -> None:
    page.locator("#rows").focus()
    page.keyboard.press("3")
    page.wait_for_timeout(seconds * 1000)


LOOKS: dict[str, Callable[[Any, float], None]] = {
    "open the list": open_list,
    "scroll through it": scroll,
    "walk and open": walk,
    "filter it": search,
    "watch the machine": watch,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--rate", type=float, default=20.0)
    parser.add_argument("--seconds", type=float, default=8.0)
    args = parser.parse_args()
    executable = chromium()
    if executable is None:
        sys.exit("no Chromium on this machine")
    print(header("console_frames", {"requests": args.requests, "rate": args.rate}))
    with ServerUnderTest("--api-workers", "1") as server, httpx.Client(base_url=server.url, timeout=60) as client:
        until(lambda: server.get("/ready")[0] == 200, 120.0)
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda number: ask(client, number), range(args.requests)))
        with launched(executable) as browser, load(client, args.rate):
            page = browser.new_page(viewport={"width": 1280, "height": 800})
            page.goto(server.url)
            page.locator(".link-state.live").wait_for()
            page.get_by_role("log").focus()
            rows = []
            for name, look in LOOKS.items():
                browser.start_tracing(page=page, categories=TRACED)
                look(page, args.seconds)
                rows.append({"": name, **busy(browser.stop_tracing())._asdict()})
    print(table(rows))


if __name__ == "__main__":
    main()
