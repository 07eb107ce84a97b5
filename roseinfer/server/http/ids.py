"""Request ids: taken from the client if usable, random otherwise."""

import random
import re

from roseinfer.server.http.errors import bad_request

MAX_ID_CHARS = 128
# Visible ASCII: safe in a header, in a log line and in JSON.
_VALID = re.compile(rf"[\x21-\x7e]{{1,{MAX_ID_CHARS}}}")


def new_request_id() -> str:
    """Nobody else's; not a secret."""
    return f"{random.getrandbits(128):032x}"


def check_request_id(value: str, param: str) -> str:
    if not _VALID.fullmatch(value):
        raise bad_request(f"{param} must be 1 to {MAX_ID_CHARS} visible ASCII characters", param)
    return value
