"""Entry point of `roseinfer` and `python -m roseinfer.cli`."""

import sys


def run() -> int:
    """Run the command line. Ctrl+C ends it without a traceback, also while its modules are imported."""
    try:
        from roseinfer.cli.main import main

        return main()
    except KeyboardInterrupt:
        return 130  # as shells report a program that Ctrl+C has ended


if __name__ == "__main__":
    sys.exit(run())
