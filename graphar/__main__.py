"""Entry point of `python -m graphar`; graphar.cli.main has the commands."""

import sys

from graphar.cli.main import main

if __name__ == "__main__":
    sys.exit(main(prog="python -m graphar"))
