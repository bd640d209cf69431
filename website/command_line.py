"""The page of the command line: the help of every command, as the terminal prints it."""

import contextlib
import io
import os

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from laplace_debias.cli import main
from laplace_debias.commands import COMMANDS

PAGE = "reference/command-line.md"
_WIDTH = "100"
_INTRODUCTION = """# Command line

The commands are installed by `pip install '.[cli]'`. The options of each command are listed below,
as `laplace-debias COMMAND --help` prints them. [Use the command line](../how-to/command-line.md)
shows examples, and [the run folder](../run-folder.md) describes the files that are written.
"""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the page."""
    sections = [_INTRODUCTION]
    for name, purpose in COMMANDS.items():
        sections.append(f"## {name}\n\n{purpose}\n\n```text\n{command_help(name)}```\n")
    files.append(File.generated(config, PAGE, content="\n".join(sections)))
    return files


def command_help(command: str) -> str:
    """Return the text that `laplace-debias COMMAND --help` prints, 100 columns wide.

    Args:
        command: The name of a command.
    """
    printed = io.StringIO()
    columns = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = _WIDTH
    try:
        with contextlib.redirect_stdout(printed):
            main([command, "--help"])
    finally:
        if columns is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = columns
    return printed.getvalue()
