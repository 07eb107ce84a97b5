"""Entry point of `python -m roseinfer.cli`."""

import sys

from roseinfer.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
