"""Check that a deployment answers through its public address, and not another server at the same port."""

import http.client
import json
import time
from collections.abc import Mapping
from urllib.parse import urlsplit

from roseinfer.core.errors import ResourceError

# Header of all responses of a deployment that the command has started. Its value is `Plan.deployment`.
DEPLOYMENT_HEADER = "x-roseinfer-deployment"
ANSWER_TIMEOUT_S = 60.0  # for the first answer, once the deployment is up
REQUEST_TIMEOUT_S, RETRY_PAUSE_S = 30.0, 0.5
BODY = {"prompt": "a", "max_tokens": 1}


def await_answer(url: str, deployment: str, api_key: str | None, timeout_s: float = ANSWER_TIMEOUT_S) -> None:
    """Return when an engine of this deployment has answered a request for one token.

    Raise `ResourceError` with the last answer if none does within `timeout_s`.
    """
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
    until_s = time.monotonic() + timeout_s
    while True:
        problem = _problem(url, deployment, headers)
        if problem is None:
            return
        if time.monotonic() > until_s:
            raise ResourceError(f"no engine of this deployment has answered at {url}: {problem}")
        time.sleep(RETRY_PAUSE_S)


def _problem(url: str, deployment: str, headers: Mapping[str, str]) -> str | None:
    """Send one request. Return what is wrong with its answer, None if it came from an engine of this deployment."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=REQUEST_TIMEOUT_S)
    try:
        connection.request("POST", "/v1/completions", json.dumps(BODY), dict(headers))
        answer = connection.getresponse()
        body = answer.read()
    except (OSError, http.client.HTTPException) as error:
        return str(error) or type(error).__name__
    finally:
        connection.close()
    if answer.headers.get(DEPLOYMENT_HEADER) != deployment:
        return f"another server answered with status {answer.status}"
    return None if answer.status == 200 else f"status {answer.status}: {body[:200].decode(errors='replace')}"
