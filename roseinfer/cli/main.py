"""Entry point of the command line: parse arguments, run one command, report its error in one line."""

import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from functools import partial
from io import TextIOWrapper

from roseinfer import __version__
from roseinfer.cli.commands import COMMANDS, Command, add_arguments
from roseinfer.cli.commands.progress import shown
from roseinfer.config.parser import OptionParser
from roseinfer.core import standard_streams
from roseinfer.core.cpu_settings import prepare_cpu_libraries
from roseinfer.core.errors import ConfigError, InvalidRequestError, RoseinferError
from roseinfer.core.support import system_error

DESCRIPTION = "An LLM inference engine and OpenAI-compatible server."
# Commands that run a model themselves. `chat` and `complete` start `serve`, or ask a server elsewhere.
MODEL_COMMANDS = frozenset(
    {"serve", "engine", "deploy", "generate", "calibrate", "bench latency", "bench throughput", "bench streaming"}
)
EXAMPLES = (
    "roseinfer serve                                     the embedded model on http://127.0.0.1:8000",
    "roseinfer serve Qwen/Qwen3-0.6B --max-model-len 8k  a model of the Hugging Face hub",
    "roseinfer demo                                      a minute of promises that are kept, late and rejected",
    "roseinfer chat model.Q4_K_M.gguf                    a conversation in the terminal",
    "roseinfer top                                       promises, engines and slow requests of a server",
    "roseinfer COMMAND --help                            options of a command",
)
EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0, 1 if it failed, 2 for wrong arguments.

    Errors that the user can fix are reported in one line. A traceback means a bug in roseinfer.
    """
    standard_streams.open_missing()
    prepare_cpu_libraries()
    _replace_unencodable()
    parser = OptionParser(prog="roseinfer", description=DESCRIPTION, examples=EXAMPLES)
    parser.add_argument("--version", action="version", version=f"roseinfer {__version__}")
    _add_commands(parser, COMMANDS)
    args = parser.parse_args(argv)
    if args.command is None:
        args.parser.print_help(sys.stderr)
        args.parser.exit(EXIT_USAGE)
    return _run(args.command, args, args.parser)


def _replace_unencodable() -> None:
    """Replace characters that the terminal cannot encode by question marks instead of raising."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")


def run_alone(command: Command, prog: str, argv: Sequence[str] | None = None) -> int:
    """Run a command that is a program of its own, for example one of `benchmarks/`. Returns what `main` returns."""
    prepare_cpu_libraries()
    parser = _described(OptionParser, command, prog)
    return _run(command, parser.parse_args(argv), parser)


def _add_commands(parser: OptionParser, commands: Sequence[Command]) -> None:
    """Add a parser per command; commands of two words get a parser for the first word too.

    `parser` in the namespace is the parser to ask for help if the command is missing.
    """
    parser.set_defaults(command=None, parser=parser)
    parents = {"": parser.add_subparsers(title="commands", metavar="COMMAND")}
    for command in commands:
        group, _, name = command.NAME.rpartition(" ")
        if group not in parents:
            names = [other.NAME.split()[-1] for other in commands if other.NAME.startswith(f"{group} ")]
            group_parser = parents[""].add_parser(group, help=" | ".join(names))
            group_parser.set_defaults(parser=group_parser)
            parents[group] = group_parser.add_subparsers(title="commands", metavar="COMMAND")
        add_parser = partial(parents[group].add_parser, name, help=command.HELP)
        own = _described(add_parser, command, f"roseinfer {command.NAME}")
        own.set_defaults(command=command, parser=own)


def _described(make: Callable[..., OptionParser], command: Command, prog: str) -> OptionParser:
    """Make a parser with the command's usage and description, which adds the options when it is used."""
    positionals = [group.positional for group in command.OPTIONS.groups if group.positional]
    several = "" if command.OPTIONS.tables is None else " ..."
    usage = " ".join([prog, *(f"[{name.upper()}{several}]" for name in positionals), "[options]"])
    common, examples = getattr(command, "COMMON", ()), getattr(command, "EXAMPLES", ())
    described = f"{command.HELP[0].upper()}{command.HELP[1:]}."
    parser = make(usage=usage, description=described, common=common, examples=examples)
    parser.later.append(partial(add_arguments, command))
    return parser


def _run(command: Command, args: Namespace, parser: OptionParser) -> int:
    error = system_error(sys.platform) if command.NAME in MODEL_COMMANDS else None
    if error is not None:
        return _fail(error, EXIT_FAILED)
    try:
        with shown():
            return command.run(args)
    except (ConfigError, InvalidRequestError) as error:
        parser.print_usage(sys.stderr)
        return _fail(command.OPTIONS.with_flags(str(error)), EXIT_USAGE)
    except RoseinferError as error:
        return _fail(str(error) or type(error).__name__, EXIT_FAILED)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        standard_streams.discard_stdout()  # its reader has left
        return EXIT_FAILED


def _fail(message: str, status: int) -> int:
    print(f"roseinfer: error: {' '.join(message.split())}", file=sys.stderr)
    return status
