"""OpenAI's Responses API: text, a schema and a tool, through the openai package.

    roseinfer serve tiny
    python examples/responses.py

The conversation is the list of items so far, sent again with each turn. `previous_response_id` would name the response
that the server stored instead. Any chat model gives better answers than the embedded one, which is very small.
"""

import argparse
import json
from typing import Annotated, Any, Literal

import openai
from pydantic import BaseModel, Field

FILM = "The film was great fun, five stars! Write that down as JSON with stars and mood."


class Review(BaseModel):
    stars: Annotated[int, Field(ge=1, le=5)]
    mood: Literal["glad", "cross"]


def weather(city: str, days: int) -> str:
    """Return a forecast; the model may call this."""
    return f"{city}: sun for {days} days"


TOOL: Any = {
    "type": "function",
    "name": "weather",
    "description": "Tells the weather of the next days.",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}, "days": {"enum": [1, 3, 7]}},
        "required": ["city", "days"],
        "additionalProperties": False,
    },
}


def told(client: openai.OpenAI, model: str) -> str:
    """Return the text that arrives in a stream."""
    with client.responses.stream(model=model, input="def fibonacci(", max_output_tokens=40, temperature=0) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
    return f"text: {text!r}"


def parsed(client: openai.OpenAI, model: str) -> str:
    """Pass a pydantic model and return an instance of it."""
    response = client.responses.parse(model=model, input=FILM, text_format=Review, temperature=0)
    return f"parsed: {response.output_parsed!r}"


def answered(client: openai.OpenAI, model: str) -> list[str]:
    """Let the model call the tool and answer with its result. The call is required here; `auto` leaves the choice."""
    items: list[Any] = [{"role": "user", "content": "What is the weather in Rome for the next 3 days?"}]
    first = client.responses.create(
        model=model, input=items, tools=[TOOL], tool_choice="required", parallel_tool_calls=False, temperature=0
    )
    lines = []
    items += first.output
    for item in first.output:
        if item.type == "function_call":
            result = weather(**json.loads(item.arguments))
            lines.append(f"called: {item.name}({item.arguments}) -> {result}")
            items.append({"type": "function_call_output", "call_id": item.call_id, "output": result})
    last = client.responses.create(
        model=model, input=items, tools=[TOOL], tool_choice="none", max_output_tokens=40, temperature=0
    )
    return [*lines, f"answer: {last.output_text!r}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--api-key", default="none")
    args = parser.parse_args()
    try:
        with openai.OpenAI(base_url=args.base_url, api_key=args.api_key) as client:
            model = client.models.list().data[0].id
            for line in (told(client, model), parsed(client, model), *answered(client, model)):
                print(line)
    except openai.APIError as error:  # no server at that address, or it rejects the request
        raise SystemExit(f"{args.base_url}: {error}") from None


if __name__ == "__main__":
    main()
