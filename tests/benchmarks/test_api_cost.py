"""benchmarks/api_cost.py runs in its own process, whose garbage collector it changes, and its requests end."""

import subprocess
import sys


def measured(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.api_cost", "--rounds", "1", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done


def test_it_measures_requests_and_tokens() -> None:
    done = measured("--requests", "9", "--ids", "3", "--streams", "2", "--words", "3")
    request, token, *responses = done.stdout.splitlines()[-6:]
    assert [line.split(" us ")[0].rsplit(maxsplit=2)[:2] for line in responses] == [
        [f"a response to 3 words, {state}", where] for state in ("not stored", "stored") for where in ("loop", "all")
    ]
    for line, name in ((request, "a request of 3 prompt ids"), (token, "a token, 2 streams")):
        assert line.startswith(name)
        assert float(line.removeprefix(name).split()[0]) > 0
    # One log line for each request of the three measurements: requests, tokens, responses.
    assert done.stderr.count("finish=length") == 9 + 2 + 2 * 9


def test_it_measures_log_lines() -> None:
    done = measured("--requests", "5", "--log")
    rows = [line.split("  ")[0] for line in done.stdout.splitlines()[-6:]]
    assert rows == [
        f"{row}, {form}"
        for form in ("text", "json")
        for row in ("a request, log level info", "a request, log level error", "its log line")
    ]
    lines = done.stderr.splitlines()
    assert len(lines) == 2 * 5 and sum(line.startswith("{") for line in lines) == 5
