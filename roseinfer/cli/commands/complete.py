"""roseinfer complete: continue a text through a server's API."""

from argparse import Namespace

from roseinfer.cli.commands import asking
from roseinfer.cli.commands.groups import ENGINE
from roseinfer.cli.terminal.config import AskConfig
from roseinfer.cli.terminal.objectives import parse_objectives
from roseinfer.config.options import OptionSet
from roseinfer.config.parser import OptionParser
from roseinfer.core.errors import ConfigError

NAME = "complete"
HELP = "continue a text; MODEL may be the URL of a server"
MAX_TOKENS = 128  # the API's 16 are a sentence
OPTIONS = OptionSet(asking.ANSWERS, asking.SERVER, *ENGINE)


def configure(parser: OptionParser) -> None:
    asking.add_quick(parser, "go on with this text; without it with standard input")


def run(args: Namespace) -> int:
    given = asking.read(OPTIONS, args)
    answers = OPTIONS.build(AskConfig, given)

    from roseinfer.cli.terminal.answer import AnswerStream
    from roseinfer.cli.terminal.chat import explain, read_all, show_figures, stream_to
    from roseinfer.cli.terminal.conversation import slo_fields
    from roseinfer.cli.terminal.sampling import model_of
    from roseinfer.cli.terminal.screen import Screen

    prompt = args.quick if args.quick is not None else read_all()
    if not prompt:
        raise ConfigError("no text: -q or standard input is empty")
    screen = Screen()
    slo = parse_objectives(answers.slo or "")
    with asking.server(OPTIONS, given) as (remote, _):
        model, sampling = model_of(remote, given.get("model_name"))
        body = {"model": model, "prompt": prompt, "max_tokens": MAX_TOKENS, **sampling, **answers.fields}
        reply = AnswerStream(remote, "/v1/completions", {**body, **slo_fields(slo)})
        outcome = stream_to(screen, reply)
    if not outcome.nothing:
        show_figures(screen, reply.answer, slo, stats=screen.stats_wanted(answers.stats))
    explain(screen, outcome, once=True)
    return 0 if outcome.error is None else 1
