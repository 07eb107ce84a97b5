"""benchmarks/api_cost.py runs in its own process, whose garbage collector it changes, and its requests end."""

import subprocess
import sys


def test_it_measures_requests_and_tokens() -> None:
    options = ["--rounds", "1", "--requests", "9", "--ids", "3", "--streams", "2", "--words", "3"]
    command = [sys.executable, "-m", "benchmarks.api_cost", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    request, token, *responses = done.stdout.splitlines()[-6:]
    assert [line.split(" us ")[0].rsplit(maxsplit=2)[:2] for line in responses] == [
        [f"a response to 3 words, {state}", where] for state in ("not stored", "stored") for where in ("loop", "all")
    ]
    for line, name in ((request, "a request of 3 prompt ids"), (token, "a token, 2 streams")):
        assert line.startswith(name)
        assert float(line.removeprefix(name).split()[0]) > 0
    # One log line for each request of the three measurements: requests, tokens, responses.
    assert done.stderr.count("finish=length") == 9 + 2 + 2 * 9
