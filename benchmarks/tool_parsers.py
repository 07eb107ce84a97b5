"""What reading tool calls and reasoning costs the API process, per streamed token.

    python -m benchmarks.tool_parsers [--rounds 15] [--repeats 40]

Outputs of the embedded model's tokens, one token a message, go through what turns them into text, with a parser and
without, and then into events of a chat's stream. Figures are microseconds of one thread's CPU a token, the smallest of
all rounds; no engine, no sockets.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from statistics import median

from roseinfer.bench.report import header
from roseinfer.core.config.engine import ModelConfig
from roseinfer.core.outputs import RequestOutput
from roseinfer.core.sampling import SamplingParams
from roseinfer.engine.api import SequenceChunk
from roseinfer.engine.output import SequenceText
from roseinfer.engine.parsed import ParsedSequenceText
from roseinfer.engine.start import load_tokenizer
from roseinfer.server.formats.answers import EventEncoder
from roseinfer.server.formats.chat import ChatWriter
from roseinfer.server.request.job import Job, Prompt, StreamChoices, Usage
from roseinfer.text.output import OutputParser
from roseinfer.text.reasoning import Reasoner
from roseinfer.text.tokenizer import Tokenizer
from roseinfer.text.tools.base import Tool, ToolFormat
from roseinfer.text.tools.registry import format_names, tool_format

PROSE = "The weather in Paris is mild today, with some wind from the west and 18 degrees in the afternoon. " * 5
MARKUP = "Use <b>bold</b> and a < b or [link](x), {braces} too: <i>so</i> [1] it {goes} on. " * 5
NOTE = "with some wind from the west " * 10
ARGUMENTS = '{"city": "Paris", "days": [1, 2, 3], "note": "' + NOTE + '", "deep": {"a": null}}'
TEXT = "with some wind\nfrom the west " * 15
CALLS = {
    "hermes": f'<tool_call>\n{{"name": "plan", "arguments": {ARGUMENTS}}}\n</tool_call>',
    "llama_json": f'{{"name": "plan", "parameters": {ARGUMENTS}}}',
    "mistral": f'[TOOL_CALLS][{{"name": "plan", "arguments": {ARGUMENTS}}}]',
    "pythonic": f"[plan(city='Paris', days=[1, 2, 3], note='{NOTE}', deep={{'a': None}})]",
    "qwen_xml": f"<tool_call>\n<function=plan>\n<parameter=note>\n{TEXT}\n</parameter>\n</function>\n</tool_call>",
}
TOOLS = [Tool("plan", {"type": "object", "properties": {"note": {"type": "string"}}})]
MakeParser = Callable[[], OutputParser]


def chunks(tokenizer: Tokenizer, outputs: Sequence[RequestOutput], parser: MakeParser | None) -> list[SequenceChunk]:
    params = SamplingParams()
    text = SequenceText(0, params, tokenizer) if parser is None else ParsedSequenceText(0, params, tokenizer, parser())
    return [chunk for output in outputs if (chunk := text.take(output, 0.0)) is not None]


def events(encoder: EventEncoder, given: Sequence[SequenceChunk]) -> int:
    """As a stream's receiver does while its client keeps up. Returns bytes."""
    size = 0
    for chunk in given:
        event = encoder.plain(0, chunk)
        if event is None:
            encoder.add(0, chunk)
            event = encoder.encode(encoder.take())
        size += len(event)
    return size


def encoder_of(tokenizer: Tokenizer, parser: MakeParser | None) -> EventEncoder:
    prompt = Prompt(ids=[1], params=SamplingParams(), parser=parser)
    job = Job(
        api="chat", id="chatcmpl-0", request_id="0", model="tiny", created=0, arrival_s=0.0, prompts=(prompt,),
        stream=StreamChoices(),
    )  # fmt: skip
    return EventEncoder(job, ChatWriter(job, tokenizer), lambda: Usage(1, 1, 0))


class Costs:
    """Microseconds a token: to text, and to the bytes of an event."""

    def __init__(self, tokenizer: Tokenizer, text: str, rounds: int, repeats: int) -> None:
        ids = tokenizer.encode(text, add_special_tokens=False)
        self._outputs = [RequestOutput("0-0", (id,), None, None, None, None) for id in ids]
        self._tokenizer, self._rounds, self._repeats = tokenizer, rounds, repeats

    def of(self, parser: MakeParser | None) -> tuple[float, float]:
        read = self._smallest(lambda: chunks(self._tokenizer, self._outputs, parser))
        given = chunks(self._tokenizer, self._outputs, parser)
        encoder = encoder_of(self._tokenizer, parser)
        written = self._smallest(lambda: events(encoder, [replace(chunk) for chunk in given]))
        copied = self._smallest(lambda: [replace(chunk) for chunk in given])
        return read, read + written - copied

    def _smallest(self, run: Callable[[], object]) -> float:
        taken = []
        for _ in range(self._rounds):
            began = time.thread_time()
            for _ in range(self._repeats):
                run()
            taken.append((time.thread_time() - began) / (self._repeats * len(self._outputs)))
        return min(taken) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--repeats", type=int, default=40)
    args = parser.parse_args()
    print(header("tool parsers", vars(args)))
    tokenizer = load_tokenizer(ModelConfig())
    thinks = Reasoner("<think>", "</think>", tokenizer)
    print(f"{'output':<22}{'parser':<24}{'to text':>9}{'more':>7}{'to event':>10}{'more':>7}   us a token")
    more: list[float] = []
    for name, text in {
        "prose": PROSE,
        "markup": MARKUP,
        **{f"call, {name}": call for name, call in CALLS.items()},
    }.items():
        costs = Costs(tokenizer, text, args.rounds, args.repeats)
        bare = costs.of(None)
        print(f"{name:<22}{'none':<24}{bare[0]:>9.2f}{'':>7}{bare[1]:>10.2f}")
        for format in format_names():
            if name.startswith("call") and format != name.removeprefix("call, "):
                continue
            made = tool_format(format, tokenizer)
            more.append(show(name, format, costs.of(partial(made.parser, TOOLS)), bare))
            with_thinking = partial(thinking_too, thinks, made)
            more.append(show(name, f"{format} and thinking", costs.of(with_thinking), bare))
    thinking = Costs(tokenizer, PROSE, args.rounds, args.repeats)
    more.append(show("thinking", "thinking", thinking.of(lambda: thinks.parser(True)), thinking.of(None)))
    print(f"\nmore than without a parser, as events: median {median(more):.2f} us, most {max(more):.2f} us")


def thinking_too(thinks: Reasoner, format: ToolFormat) -> OutputParser:
    return thinks.parser(False, format.parser(TOOLS))


def show(name: str, parser: str, cost: tuple[float, float], bare: tuple[float, float]) -> float:
    """Prints a line; returns what the parser adds to the cost of an event."""
    added = [with_parser - without for with_parser, without in zip(cost, bare, strict=True)]
    print(f"{name:<22}{parser:<24}{cost[0]:>9.2f}{added[0]:>7.2f}{cost[1]:>10.2f}{added[1]:>7.2f}", flush=True)
    return added[1]


if __name__ == "__main__":
    main()
