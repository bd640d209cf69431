"""Time per example of each method of a last-layer posterior, by the number of classes.

`python -m benchmarks.many_classes` prints a table of milliseconds of processor time per example:
the minimum over three calls, on one thread. `--classes` and `--verbs` select numbers of classes and
methods.
"""

import argparse
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.report import markdown_table
from laplace_debias import Laplace

NUM_FEATURES = 512
NUM_INPUTS = 32
BATCH_SIZE = 64
# For each number of classes, the number of examples for each method ("verb").
NUM_EXAMPLES = {
    10: {"tune": 256, "predict": 256, "uncertainty": 256, "evaluate": 256},
    100: {"tune": 128, "predict": 256, "uncertainty": 64, "evaluate": 256},
    1_000: {"tune": 64, "predict": 64, "uncertainty": 8, "evaluate": 64},
    10_000: {"tune": 16, "predict": 16, "uncertainty": 4, "evaluate": 16},
}
VERBS = ("tune", "predict", "uncertainty", "evaluate")
_REPETITIONS = 3


def random_data(num_classes: int, num_examples: int, seed: int) -> TensorDataset:
    """Draw inputs and labels."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_examples, NUM_INPUTS, generator=generator)
    return TensorDataset(x, torch.randint(num_classes, (num_examples,), generator=generator))


def fit(num_classes: int) -> Laplace:
    """Fit a K-FAC posterior over the last layer of an untrained network."""
    torch.manual_seed(0)
    layers = [nn.Linear(NUM_INPUTS, NUM_FEATURES), nn.ReLU(), nn.Linear(NUM_FEATURES, num_classes)]
    la = Laplace(nn.Sequential(*layers).eval(), params="last_layer", fisher="mc")
    # With fewer examples than classes, the directions would be thin.
    data = random_data(num_classes, 2048, seed=1)
    return la.fit(DataLoader(data, BATCH_SIZE), generator=torch.Generator().manual_seed(0))


def milliseconds(num_classes: int, verb: str) -> float:
    """Measure the processor time of a method per example."""
    la = fit(num_classes)
    num_examples = NUM_EXAMPLES[num_classes][verb]
    data = random_data(num_classes, num_examples, seed=2)
    loader = DataLoader(data, BATCH_SIZE)
    calls: dict[str, Callable[[], object]] = {
        "tune": lambda: la.tune(loader),
        "predict": lambda: [la.predict(x).mode for x, _ in loader],
        "uncertainty": lambda: [la.uncertainty(x) for x, _ in loader],
        "evaluate": lambda: la.evaluate(loader),
    }
    seconds = []
    for _ in range(_REPETITIONS):
        start = time.process_time()
        calls[verb]()
        seconds.append(time.process_time() - start)
    return 1e3 * min(seconds) / num_examples


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--classes", type=int, nargs="+", default=list(NUM_EXAMPLES))
    parser.add_argument("--verbs", nargs="+", choices=VERBS, default=list(VERBS))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for verb in arguments.verbs:
        row = {"verb": f"`{verb}`"}
        for num_classes in arguments.classes:
            row[f"{num_classes:,} classes"] = f"{milliseconds(num_classes, verb):.3g}"
        rows.append(row)
    print(markdown_table(rows))


if __name__ == "__main__":
    main()
