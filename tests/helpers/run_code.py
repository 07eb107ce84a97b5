"""Program that runs its first argument as `python -c` does, from a fork where `helpers.forked_starts` is installed."""

import sys

if __name__ == "__main__":
    exec(compile(sys.argv.pop(1), "<code>", "exec"), {"__name__": "__main__"})
