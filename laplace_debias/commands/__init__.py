"""The commands. Each command has its own file with a class `Settings` and two functions.

`run(settings)` prints what it does and its results, and returns the result.
`as_json(settings, result)` returns the object that `--json` prints instead.

These files import modules that need torch only within functions, so that options are read before
torch is imported. A new command needs a file in this package and a line in `COMMANDS`.
"""

COMMANDS = {
    "fit": "Fit the posterior of a trained network and save it.",
    "tune": "Choose the prior precision, link and temperature of a saved posterior.",
    "predict": "Predict with a saved posterior and write a table.",
    "evaluate": "Compare saved posteriors with the network and with temperature scaling.",
    "report": "Compare methods and write a one-page report on a network's uncertainty.",
    "spectrum": "Measure leading eigenpairs, trace and density of a network's curvature.",
}
"""One-line summary of each command. A command's module is imported only when the command is run."""
