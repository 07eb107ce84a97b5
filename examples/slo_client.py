"""A request with latency objectives, through the openai package.

    roseinfer serve tiny
    python examples/slo_client.py --ttft-ms 200 --tpot-ms 20 "def fibonacci("

The server answers within the objectives, or rejects the request at once: a 429 with the code `slo_unattainable`, the
value that could be met, and a time to retry. This client retries a few times, unless that is no use.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import openai

Print = Callable[[str], None]


def complete(client: openai.OpenAI, model: str, prompt: str, slo: dict[str, Any], show: Print) -> dict[str, Any] | None:
    """Stream one completion. Return `usage.slo`: {"ttft_ms", "tpot_ms", "met"} as measured by the server."""
    stream = client.completions.create(
        model=model,
        prompt=prompt,
        max_tokens=64,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"slo": {**slo, "report": True}},
    )
    report = None
    for chunk in stream:
        if chunk.choices:
            show(chunk.choices[0].text)
        if chunk.usage is not None:
            report = (chunk.usage.model_extra or {}).get("slo")
    return report


def with_patience(ask: Callable[[], Any], attempts: int, show: Print, sleep: Callable[[float], None]) -> Any:
    """Retry when the server says so. Raise the last rejection, and every other error."""
    for attempt in range(1, attempts + 1):
        try:
            return ask()
        except openai.RateLimitError as error:
            if error.code != "slo_unattainable":  # some other limit, such as one per key
                raise
            reason = error.body.get("message") if isinstance(error.body, dict) else error.message
            show(f"\nrejected: {reason}\n")
            headers = error.response.headers
            if headers.get("x-should-retry") == "false" or attempt == attempts:
                raise  # even an idle server could not do it, or there were enough attempts
            sleep(float(headers.get("retry-after", "1")))
    raise AssertionError("at least one attempt")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompt", nargs="?", default="def fibonacci(")
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--ttft-ms", type=float, default=200.0)
    parser.add_argument("--tpot-ms", type=float, default=20.0)
    parser.add_argument("--attempts", type=int, default=3)
    args = parser.parse_args(argv)
    # By default the package retries silently.
    client = openai.OpenAI(base_url=args.base_url, api_key=args.api_key, max_retries=0)
    slo = {"ttft_ms": args.ttft_ms, "tpot_ms": args.tpot_ms}

    def show(text: str) -> None:
        print(text, end="", flush=True)

    try:
        model = client.models.list().data[0].id
        report = with_patience(
            lambda: complete(client, model, args.prompt, slo, show), max(1, args.attempts), show, time.sleep
        )
    except openai.RateLimitError:
        print("gave up")
        return 1
    except openai.APIError as error:  # no server at that address, or it rejects the request for another reason
        print(f"{args.base_url}: {error}")
        return 1
    if report is None:
        print("\n(the server reports no objectives)")
    else:
        kept = "kept" if report["met"] else "missed"
        print(f"\nTTFT {report['ttft_ms']:.1f} ms, TPOT {report['tpot_ms']:.1f} ms: objectives {kept}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
