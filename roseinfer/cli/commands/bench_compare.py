"""roseinfer bench compare: compare two saved results of a load."""

from argparse import Namespace

from roseinfer.config.options import OptionSet
from roseinfer.config.parser import OptionParser
from roseinfer.core.errors import ConfigError

NAME = "bench compare"
HELP = "compare two results of `roseinfer bench serve` or `vllm bench serve`"
OPTIONS = OptionSet(config_file=False)


def configure(parser: OptionParser) -> None:
    parser.usage = f"{parser.prog} A.json B.json"
    parser.add_argument("before", metavar="A.json", help="a saved result (--save-result, --json, vllm bench serve)")
    parser.add_argument("after", metavar="B.json", help="another one")


def run(args: Namespace) -> int:
    from roseinfer.bench.compare import changes, read_figures
    from roseinfer.bench.report import table

    rows = changes(read_figures(args.before), read_figures(args.after))
    if not rows:
        raise ConfigError("the two results have no figure in common")
    print(f"A: {args.before}\nB: {args.after}")
    print(table(rows))
    return 0
