"""`python -m laplace_debias` is the command line."""

import sys

from laplace_debias.cli import main

if __name__ == "__main__":
    sys.exit(main())
