"""The last stage of a run: metrics, differences and the conclusion."""

from laplace_debias.assessment.conclusion import conclude
from laplace_debias.assessment.examples import write_examples
from laplace_debias.assessment.measures import Comparison
from laplace_debias.assessment.run_folder import read_json, read_table, write_json
from laplace_debias.assessment.run_state import Run


def measure(run: Run) -> None:
    """Measure what is written, choose the examples to look at, and mark the run complete.

    Args:
        run: The run, with all its tables of predictions.
    """
    with run.stage("measure"):
        tables = {
            (method.key, part.name): read_table(run.path(method, part))
            for method in run.methods
            for part in run.sets
        }
        network = run.methods[0].key
        scaled = [m for m in run.methods if m.posterior is None and m.has_temperature]
        compared = Comparison(
            tables,
            {part.name: part.role for part in run.sets},
            [network, *(method.key for method in scaled[:1])],
            run.loaded.task,
            run.identity["num_resamples"],
            run.seed,
        )
        found = {"rows": compared.rows(), "differences": compared.differences()}
        write_json(run.folder.path / "metrics.json", found)
        of_test = {method.key: tables[method.key, "test"] for method in run.methods}
        write_examples(run.folder, run.loaded, of_test, network)
        for method in run.methods:
            told = [run.told(method, part) for part in run.sets]
            seconds = sum(part["seconds"] for part in told)
            entry = run.entry(method.key)
            entry["seconds"]["predict"] = seconds
            entry["seconds_per_example"] = seconds / sum(part["num_examples"] for part in told)
    run.said["conclusion"] = conclude(run.said, read_json(run.folder.path / "metrics.json"))
    run.said["status"] = "complete"
    run.write()
    run.folder.remove_states()
