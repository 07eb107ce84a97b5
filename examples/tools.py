"""A model that calls functions of this file, through the openai package.

    roseinfer serve tiny
    python examples/tools.py "What is the weather in Paris?"

The embedded model calls a tool because it must (`tool_choice="required"`), with meaningless arguments. Try a chat model
that knows tools, and `--choice auto`.
"""

import argparse
import json
from collections.abc import Callable
from typing import Annotated, Any, Literal

import openai
from pydantic import BaseModel, Field


class Weather(BaseModel):
    """The current weather in a city."""

    city: Annotated[str, Field(max_length=30)]
    unit: Literal["celsius", "fahrenheit"]


class Sum(BaseModel):
    """The sum of two numbers."""

    a: Annotated[int, Field(ge=-9999, le=9999)]
    b: Annotated[int, Field(ge=-9999, le=9999)]


def weather(asked: Weather) -> dict[str, Any]:
    return {"city": asked.city, "sky": "clear", "temperature": 21 if asked.unit == "celsius" else 70}


def add(asked: Sum) -> dict[str, Any]:
    return {"sum": asked.a + asked.b}


FUNCTIONS: dict[str, tuple[type[BaseModel], Callable[[Any], dict[str, Any]]]] = {
    "get_weather": (Weather, weather),
    "add": (Sum, add),
}


def call(name: str, arguments: str) -> str:
    """Return a tool's result or error. The model may name an unknown tool, or be cut off."""
    if name not in FUNCTIONS:
        return json.dumps({"error": f"there is no tool {name}"})
    model, function = FUNCTIONS[name]
    try:
        return json.dumps(function(model.model_validate_json(arguments)))
    except ValueError as error:
        return json.dumps({"error": str(error)})


def streamed(client: openai.OpenAI, show: Callable[[str], None], **fields: Any) -> Any:
    """Return a message, and show it while it arrives."""
    with client.chat.completions.stream(**fields) as stream:
        for event in stream:
            if event.type == "content.delta":
                show(event.delta)
            elif event.type == "tool_calls.function.arguments.done":
                show(f"{event.name}({event.arguments})\n")
        return stream.current_completion_snapshot.choices[0].message


def converse(client: openai.OpenAI, model: str, question: str, choice: str, show: Callable[[str], None]) -> None:
    """Converse until the model answers without calling a tool, at most three times. `choice` is for the first turn."""
    tools = [openai.pydantic_function_tool(model, name=name) for name, (model, _) in FUNCTIONS.items()]
    messages: list[Any] = [{"role": "user", "content": question}]
    for turn in range(3):
        fields = {"model": model, "messages": messages, "tools": tools, "max_tokens": 200, "seed": 1, "temperature": 0}
        wanted = choice if turn == 0 else "auto"
        try:
            said = streamed(client, show, **fields, tool_choice=wanted, parallel_tool_calls=False)
        except openai.LengthFinishReasonError:
            show("... (cut)\n")
            return
        messages.append({"role": "assistant", "content": said.content, "tool_calls": said.tool_calls or []})
        for made in said.tool_calls or []:
            result = call(made.function.name, made.function.arguments)
            show(f"-> {result}\n")
            messages.append({"role": "tool", "tool_call_id": made.id, "content": result})
        if not said.tool_calls:
            show("\n")
            return


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question", nargs="?", default="What is the weather in Paris?")
    parser.add_argument("--choice", default="required", choices=("required", "auto", "none"))
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--api-key", default="none")
    args = parser.parse_args()
    try:
        with openai.OpenAI(base_url=args.base_url, api_key=args.api_key) as client:
            model = client.models.list().data[0].id
            converse(client, model, args.question, args.choice, lambda text: print(text, end="", flush=True))
    except openai.APIError as error:  # no server at that address, or it rejects the request
        raise SystemExit(f"{args.base_url}: {error}") from None


if __name__ == "__main__":
    main()
