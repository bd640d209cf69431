"""The commands, one file each, with `Settings` and a function `run`.

`run(settings)` prints what it does and its results.
`as_json(settings, result)` returns the object that `--json` prints instead.

A command's file imports what needs torch within its functions, so that its options are read before
that. A new command is a file here and a line in `COMMANDS`.
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
