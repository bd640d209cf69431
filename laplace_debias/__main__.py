"""Entry point of `python -m laplace_debias`, which runs the command line."""

import sys

from laplace_debias.cli import main

if __name__ == "__main__":
    sys.exit(main())
