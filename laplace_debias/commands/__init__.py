"""The commands; each has a file with a class `Settings` and two functions.

`run(settings)` prints what it does and its results.
`as_json(settings, result)` returns the object that `--json` prints instead.

The file of a command imports modules that need torch only within functions, so that options are
read before torch is imported. A new command needs a file in this package and a line in `COMMANDS`.
"""

COMMANDS = {
    "fit": "Fit the posterior of a trained network and save it.",
    "tune": "Choose the prior precision, link and temperature of a saved posterior.",
    "predict": "Predict with a saved posterior and write a table.",
    "evaluate": "Compare saved posteriors with the network and with temperature scaling.",
    "report": "Compare methods and write a one-page report on a network's uncertainty.",
    "spectrum": "Measure leading eigenpairs, trace and density of a network's curvature.",
}
"""Each command's purpose in one line; a command is imported when it is chosen."""
