"""Common parts of the clients' scripts: the server's address, a tool, and a report of each step on a line.

Only Python itself is needed, since each script runs in the environment of its client.
"""

import json
import os
import traceback
from collections.abc import Callable

URL = os.environ.get("CLIENTS_URL", "")
MODEL = os.environ.get("CLIENTS_MODEL", "")
KEY = "none"
HELLO = "Say hello."
# The proxy answers this with a call of the tool.
CALL = "Please call the tool weather."
FOUND = "rain"
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}

Step = Callable[[], object]


def weather(city: str) -> str:
    """Return the weather in a city."""
    return FOUND


def run(*steps: Step) -> None:
    """Run each step, even after a failed one, and print its name and error."""
    for step in steps:
        error = None
        try:
            step()
        except BaseException as raised:
            traceback.print_exc()
            error = f"{type(raised).__name__}: {raised}"
        print(json.dumps({"step": step.__name__, "error": error}), flush=True)
