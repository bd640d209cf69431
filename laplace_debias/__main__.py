"""The command line, as `python -m laplace_debias`."""

import sys

from laplace_debias.cli import main

if __name__ == "__main__":
    sys.exit(main())
