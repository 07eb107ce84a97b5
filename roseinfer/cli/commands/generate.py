"""roseinfer generate: complete a prompt in this process, without a server."""

import argparse
import sys
from argparse import Namespace
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from roseinfer.cli.commands.groups import ENGINE
from roseinfer.config.options import Group, OptionSet
from roseinfer.config.parser import OptionParser
from roseinfer.core.errors import ConfigError, RequestFailedError
from roseinfer.core.generation_config import AUTO, given_document
from roseinfer.core.outputs import FinishReason
from roseinfer.core.request import Prompt
from roseinfer.core.sampling import SequenceParams

if TYPE_CHECKING:
    from roseinfer.engine.api import SequenceChunk
    from roseinfer.engine.local import LocalEngine

NAME = "generate"
HELP = "complete a prompt and print the text"
MAX_TOKENS = 128
SAMPLING_HELP = {
    "max_tokens": "tokens to generate at most",
    "min_tokens": "tokens to generate before the model may end",
    "temperature": "0 = greedy",
    "top_k": "sample among the k most likely tokens; 0 or -1 = off",
    "top_p": "sample among the most likely tokens with this total probability",
    "min_p": "sample among tokens at least this likely relative to the likeliest",
    "repetition_penalty": "above 1 makes tokens of prompt and output less likely",
    "presence_penalty": "subtracted for tokens that the output holds",
    "frequency_penalty": "subtracted once per occurrence in the output",
    "logit_bias": "added to the logit of a token; may be given several times",
    "stop": "text to stop at; may be given several times",
    "stop_token_ids": "token id to stop at; may be given several times",
    "include_stop_str_in_output": "print the stop text too",
    "ignore_eos": "go on after the model's end token",
    "skip_special_tokens": "do not print special tokens",
    "bad_words": "text that the output must not hold, as the tokenizer writes it; may be given several times",
}
# `seed` is the model's option of that name; log probabilities cannot be shown in printed text; lists of token ids and
# truncated prompts are for programs.
SAMPLING = Group(
    SequenceParams,
    "sampling",
    skip=frozenset(
        {"seed", "logprobs", "prompt_logprobs", "bad_token_ids", "allowed_token_ids", "truncate_prompt_tokens"}
    ),
    help=SAMPLING_HELP,
    defaults={"max_tokens": MAX_TOKENS},
)
OPTIONS = OptionSet(SAMPLING, *ENGINE)


def configure(parser: OptionParser) -> None:
    parser.add_argument("--prompt", required=True, metavar="TEXT", help="text to complete; - reads standard input")
    parser.add_argument("--chat", action="store_true", help="treat the prompt as a user message of a chat")
    parser.add_argument("--system", metavar="TEXT", help="with --chat: system message")
    parser.add_argument(
        "--stream",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="print text while it is generated",
    )


def run(args: Namespace) -> int:
    given = OPTIONS.read(args)
    OPTIONS.build(SequenceParams, given)  # report a wrong value before the model is loaded
    given_document(given.get("generation_config", AUTO))
    if args.system is not None and not args.chat:
        raise ConfigError("--system needs --chat")
    text = sys.stdin.read() if args.prompt == "-" else args.prompt

    from roseinfer.engine.api import GenerateRequest
    from roseinfer.engine.local import LocalEngine
    from roseinfer.engine.options import make_engine_config

    engine_options = {option.name for group in ENGINE for option in group.options()}
    config = make_engine_config(**{name: value for name, value in given.items() if name in engine_options})
    with LocalEngine(config) as engine:
        prompt_ids = _chat_ids(engine, text, args.system) if args.chat else engine.tokenizer.encode(text)
        prompt = Prompt(prompt_ids, _params(engine, given, len(prompt_ids)))
        steps = engine.run([GenerateRequest(request_id="0", prompt=prompt)])
        _print((chunk for chunks in steps for _, chunk in chunks), at_once=not args.stream)
    return 0


def _chat_ids(engine: "LocalEngine", text: str, system: str | None) -> list[int]:
    from roseinfer.text.template_check import trusted_template

    template = trusted_template(engine.tokenizer)
    if template is None:
        raise ConfigError(f"--chat: {engine.info.model} has no chat template")
    messages = [] if system is None else [{"role": "system", "content": system}]
    return template.encode([*messages, {"role": "user", "content": text}])


def _params(engine: "LocalEngine", given: dict[str, Any], prompt_tokens: int) -> SequenceParams:
    """Return sampling parameters: flags override the model's generation_config, which overrides the defaults. The
    default length fits the context.
    """
    room = max(engine.info.facts.max_model_len - prompt_tokens, 1)
    values = {"max_tokens": min(MAX_TOKENS, room), **engine.info.facts.default_sampling, **given}
    return OPTIONS.build(SequenceParams, values)


def _print(chunks: "Iterable[SequenceChunk]", at_once: bool) -> None:
    texts = []
    for chunk in chunks:
        if chunk.finish_reason is FinishReason.ERROR:
            raise RequestFailedError(str(chunk.stop_reason))
        if at_once:
            texts.append(chunk.text)
        else:
            print(chunk.text, end="", flush=True)
    print("".join(texts))
