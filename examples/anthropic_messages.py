"""Anthropic's Messages API: text, a schema and a tool, through the anthropic package.

    roseinfer serve tiny
    python examples/anthropic_messages.py

Any chat model gives better answers than the embedded one, which is very small.
"""

import argparse
from typing import Annotated, Any, Literal

import anthropic
from pydantic import BaseModel, Field

FILM = "The film was great fun, five stars! Write that down as JSON with stars and mood."
# Sampling fields, including some that Anthropic's API does not have.
GREEDY = {"temperature": 0}


class Review(BaseModel):
    stars: Annotated[int, Field(ge=1, le=5)]
    mood: Literal["glad", "cross"]


def weather(city: str, days: int) -> str:
    """Return a forecast; the model may call this."""
    return f"{city}: sun for {days} days"


TOOL: Any = {
    "name": "weather",
    "description": "Tells the weather of the next days.",
    "strict": True,
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}, "days": {"enum": [1, 3, 7]}},
        "required": ["city", "days"],
        "additionalProperties": False,
    },
}


def says(text: str) -> Any:
    return {"role": "user", "content": text}


def told(client: anthropic.Anthropic, model: str) -> str:
    """Return the text that arrives in a stream."""
    with client.messages.stream(
        model=model, max_tokens=40, messages=[says("def fibonacci(")], extra_body=GREEDY
    ) as stream:
        text = "".join(stream.text_stream)
    return f"text: {text!r}"


def parsed(client: anthropic.Anthropic, model: str) -> str:
    """Pass a pydantic model and return an instance of it."""
    question = says(FILM)
    message = client.messages.parse(
        model=model, max_tokens=200, messages=[question], output_format=Review, extra_body=GREEDY
    )
    return f"parsed: {message.parsed_output!r}"


def answered(client: anthropic.Anthropic, model: str) -> list[str]:
    """Let the model call the tool and answer with its result. The call is required here; `auto` leaves the choice."""
    messages = [says("What is the weather in Rome for the next 3 days?")]
    counted = client.messages.count_tokens(model=model, messages=messages, tools=[TOOL])
    lines = [f"prompt: {counted.input_tokens} tokens"]
    first = client.messages.create(
        model=model,
        max_tokens=200,
        messages=messages,
        tools=[TOOL],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        extra_body=GREEDY,
    )
    messages.append({"role": "assistant", "content": first.content})
    for block in first.content:
        if block.type == "tool_use":
            asked: Any = block.input
            result = weather(**asked)
            lines.append(f"called: {block.name}({asked}) -> {result}")
            found = {"type": "tool_result", "tool_use_id": block.id, "content": result}
            messages.append({"role": "user", "content": [found]})
    last = client.messages.create(
        model=model, max_tokens=40, messages=messages, tools=[TOOL], tool_choice={"type": "none"}, extra_body=GREEDY
    )
    texts = [block.text for block in last.content if block.type == "text"]
    return [*lines, f"answer: {''.join(texts)!r}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url", default="http://127.0.0.1:8000", help="without /v1, which the package adds")
    parser.add_argument("--api-key", default="none")
    args = parser.parse_args()
    try:
        with anthropic.Anthropic(base_url=args.base_url, api_key=args.api_key) as client:
            model = client.models.list().data[0].id
            for line in (told(client, model), parsed(client, model), *answered(client, model)):
                print(line)
    except anthropic.APIError as error:  # no server at that address, or it rejects the request
        raise SystemExit(f"{args.base_url}: {error}") from None


if __name__ == "__main__":
    main()
