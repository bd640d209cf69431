"""Entry point of the command line and of `python -m laplace_debias`."""

import sys


def main() -> int:
    """Run the command line, and return its exit status, also after Ctrl-C during its import."""
    try:
        from laplace_debias import cli
    except KeyboardInterrupt:
        sys.stderr.write("\nlaplace-debias: stopped: Run the same command again.\n")
        return 130
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
