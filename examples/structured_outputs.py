"""Outputs that follow a schema, a regex, a choice or a grammar, through the openai package.

    roseinfer serve tiny
    python examples/structured_outputs.py

Any chat model gives better answers than the embedded one, which is very small.
"""

import argparse
import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import openai
from pydantic import BaseModel, Field

MESSAGES: list[Any] = [{"role": "user", "content": "A review of a film, as JSON with title, stars and genre."}]


class Review(BaseModel):
    title: Annotated[str, Field(max_length=30)]
    stars: Annotated[int, Field(ge=1, le=5)]
    genre: Literal["comedy", "drama", "other"]


def parsed(client: openai.OpenAI, model: str) -> str:
    """Pass a pydantic model and return an instance of it."""
    done = client.chat.completions.parse(
        model=model, messages=MESSAGES, response_format=Review, max_tokens=300, temperature=0.7, seed=1
    )
    review = done.choices[0].message.parsed
    assert review is not None
    return f"parsed: {review!r}"


def streamed(client: openai.OpenAI, model: str) -> str:
    """Show the same output while it arrives."""
    pieces = []
    with client.chat.completions.stream(
        model=model, messages=MESSAGES, response_format=Review, max_tokens=300, temperature=0.7, seed=2
    ) as stream:
        for event in stream:
            if event.type == "content.delta":
                pieces.append(event.delta)
    return f"streamed in {len(pieces)} pieces: {json.loads(''.join(pieces))}"


CONSTRAINTS: dict[str, dict[str, Any]] = {
    "choice": {"choice": ["positive", "negative", "neutral"]},
    "regex": {"regex": r"[A-Z][a-z]{2,8}, [0-9]{4}"},
    "Lark": {"grammar": 'start: "SELECT " COLUMN ("," COLUMN){0,2} " FROM films"\nCOLUMN: "title" | "stars" | "genre"'},
    "GBNF": {"grammar": 'root ::= ("yes" | "no") " (" [0-9] [0-9]? "%)"'},
}


def constrained(client: openai.OpenAI, model: str) -> Iterator[str]:
    """Use `extra_body` for fields that OpenAI's API does not have."""
    for name, constraint in CONSTRAINTS.items():
        done = client.chat.completions.create(
            model=model, messages=MESSAGES, max_tokens=60, seed=3, extra_body={"structured_outputs": constraint}
        )
        yield f"{name}: {done.choices[0].message.content}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--api-key", default="none")
    args = parser.parse_args()
    try:
        with openai.OpenAI(base_url=args.base_url, api_key=args.api_key) as client:
            model = client.models.list().data[0].id
            print(parsed(client, model))
            print(streamed(client, model))
            for line in constrained(client, model):
                print(line)
    except openai.APIError as error:  # no server at that address, or it rejects the request
        raise SystemExit(f"{args.base_url}: {error}") from None


if __name__ == "__main__":
    main()
