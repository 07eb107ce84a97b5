"""roseinfer chat: a conversation in the terminal."""

from argparse import Namespace

from roseinfer.cli.commands import asking
from roseinfer.cli.commands.groups import ENGINE
from roseinfer.cli.terminal.config import AskConfig, ChatConfig
from roseinfer.cli.terminal.objectives import parse_objectives
from roseinfer.config.options import Group, OptionSet
from roseinfer.config.parser import OptionParser
from roseinfer.core.errors import ConfigError

NAME = "chat"
HELP = "talk to a model in the terminal; MODEL may be the URL of a server"
COMMON = ("system_prompt", "quick", "max_tokens", "temperature", "slo", "url", "api_key", "dtype", "max_model_len")
EXAMPLES = (
    "roseinfer chat                                  the embedded model",
    "roseinfer chat http://127.0.0.1:8000            a running server",
    'roseinfer chat model.gguf -q "What is a heap?"  one question',
)
OPTIONS = OptionSet(Group(ChatConfig, "conversation"), asking.ANSWERS, asking.SERVER, *ENGINE)


def configure(parser: OptionParser) -> None:
    asking.add_quick(parser, "ask this, print the answer and leave; else standard input is asked if it is no terminal")


def run(args: Namespace) -> int:
    given = asking.read(OPTIONS, args)
    config, answers = OPTIONS.build(ChatConfig, given), OPTIONS.build(AskConfig, given)

    from roseinfer.cli.terminal.chat import Chat, piped
    from roseinfer.cli.terminal.conversation import Conversation
    from roseinfer.cli.terminal.sampling import model_of, shown_params
    from roseinfer.cli.terminal.screen import Screen

    question = args.quick if args.quick is not None else piped()
    if question is not None and not question.strip():
        raise ConfigError("no question: -q or standard input is empty")
    screen = Screen()
    stats = screen.stats_wanted(answers.stats)
    with asking.server(OPTIONS, given) as (remote, own):
        model, sampling = model_of(remote, given.get("model_name"))
        conversation = Conversation(
            model,
            system=config.system_prompt,
            slo=parse_objectives(answers.slo or ""),
            params={**sampling, **answers.fields},
        )
        chat = Chat(remote, conversation, screen, stats=stats)
        if question is not None:
            return 0 if chat.ask(question, once=True) else 1
        screen.note(_welcome(model, None if own is not None else remote.url))
        sampled = shown_params(conversation.params) or "sampling as the server decides"
        screen.note(f"{sampled}; /params sets these, /help lists all, Ctrl+D quits")
        chat.converse(own.check if own is not None else lambda lost: None)
    return 0


def _welcome(model: str, url: str | None) -> str:
    where = "in this terminal" if url is None else f"on {url}"
    embedded = " (the embedded model; it writes something like Python)" if model == "tiny" else ""
    return f"{model} {where}{embedded}"
