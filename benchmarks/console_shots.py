"""The pictures of the console in the docs: a real server with the embedded model, under a load with objectives.

    python -m benchmarks.console_shots [--out docs/img] [--rate 6] [--seconds 40]

Writes console-playground.png, console-requests.png, console-machine.png and console-phone.png.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.browser import chromium, launched
from benchmarks.faults.server import ServerUnderTest, until

CLASSES = """\
[classes.chat]
ttft_ms = 300
tpot_ms = 40

[classes.code]
ttft_ms = 150
tpot_ms = 25

[classes.batch]
timeout_s = 120
"""
# Which classes the load's requests belong to, and how many of each to the others.
SHARES = {"chat": 5, "code": 3, "batch": 2}
DESKTOP, PHONE = {"width": 1280, "height": 800}, {"width": 390, "height": 844}


@contextmanager
def load(url: str, folder: Path, rate: float, seconds: float) -> Iterator[None]:
    drawn = [{"name": name, "share": share, "body": {"slo": {"class": name}}} for name, share in SHARES.items()]
    (folder / "load.json").write_text(json.dumps(drawn))
    command = [sys.executable, "-m", "roseinfer.cli", "bench", "serve", "--url", url, "--procs", "1"]
    lengths = ["--in-len", "400", "--in-min", "20", "--out-len", "120", "--out-min", "10", "--vocab", "4000"]
    arrivals = ["--workload", "gamma", "--burstiness", "0.4", "--rate", str(rate), "--num", str(int(rate * seconds))]
    process = subprocess.Popen(
        [*command, *lengths, *arrivals, "--slo-classes", str(folder / "load.json")], stdout=subprocess.DEVNULL
    )
    try:
        yield
    finally:
        process.terminate()
        process.wait()


def playground(page: Any) -> None:
    """A promise that cannot be kept, and behind it one that is."""
    page.get_by_role("textbox", name="Message").fill("Write a function that reverses a string")
    page.get_by_role("button", name="Relaxed").click()
    page.get_by_role("button", name="Send", exact=True).click()
    page.locator(".badge.kept").wait_for()
    page.get_by_role("textbox", name="Message").fill("And one that sorts a list of words by their length")
    page.get_by_role("button", name="Tight").click()
    page.get_by_role("button", name="Send", exact=True).click()
    page.get_by_role("alert").wait_for()


def requests(page: Any) -> None:
    """One that was late, else one that was kept, opened."""
    page.get_by_role("tab", name="Requests").click()
    row = page.locator(".window .row")
    judged = page.locator(".badge.kept, .badge.refused, .badge.late")
    row.filter(has=judged).first.wait_for()
    kinds = [row.filter(has=page.locator(f".badge.{kind}")) for kind in ("late", "kept", "refused")]
    next(rows for rows in kinds if rows.count()).first.click()
    page.locator(".detail .timeline").wait_for()


def machine(page: Any) -> None:
    page.get_by_role("tab", name="Machine").click()
    page.locator(".tiles").wait_for()
    page.wait_for_timeout(2000)


def shoot(browser: Any, url: str, out: Path) -> None:
    for name, size, scheme, show in (
        ("requests", DESKTOP, "light", requests),
        ("machine", DESKTOP, "dark", machine),
        ("phone", PHONE, "dark", requests),
        ("playground", DESKTOP, "light", playground),
    ):
        context = browser.new_context(viewport=size, color_scheme=scheme)
        page = context.new_page()
        page.goto(url)
        page.locator(".link-state.live").wait_for()
        show(page)
        path = out / f"console-{name}.png"
        page.screenshot(path=path)
        print(f"{path}: {path.stat().st_size / 1000:.0f} KB")
        context.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/img"))
    parser.add_argument("--rate", type=float, default=6.0, help="requests a second")
    parser.add_argument("--seconds", type=float, default=40.0, help="of load before the first picture")
    args = parser.parse_args()
    executable = chromium()
    if executable is None:
        sys.exit("no Chromium on this machine")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "classes.toml").write_text(CLASSES)
        with ServerUnderTest("--slo-classes", str(folder / "classes.toml")) as server, launched(executable) as browser:
            until(lambda: server.get("/ready")[0] == 200, 120.0)
            with load(server.url, folder, args.rate, args.seconds + 60):
                browser.new_page().wait_for_timeout(args.seconds * 1000)
                shoot(browser, server.url, args.out)


if __name__ == "__main__":
    main()
