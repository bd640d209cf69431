"""The commands, one file each, with `Settings` and a function `run` that takes them.

`run(settings)` prints what it does and finds.
`as_json(settings, result)` gives the object that `--json` prints instead.
"""

COMMANDS = {
    "fit": "Fit the posterior of a trained network and save it.",
    "tune": "Tune a saved posterior's prior precision.",
    "predict": "Predict with a saved posterior, into a table.",
    "evaluate": "Compare saved posteriors with the network and its temperature, as a table.",
    "report": "Judge a network's uncertainty: methods compared, in one page.",
    "spectrum": "Measure leading eigenpairs, trace and density of a network's curvature.",
}
"""Each command's purpose in one line; none is imported before it is chosen."""
