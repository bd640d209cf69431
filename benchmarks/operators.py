"""Products with curvature operators, compared with curvlinops on the same problem.

    python benchmarks/operators.py --network all_cnn_c --operator GGN

Network, data and vectors are the same. Runs of the two libraries alternate, so that a busy machine
slows both. Times are medians, and ratios are ratios of these medians. Needs
`curvlinops-for-pytorch`.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import curvlinops
import torch
from torch import Tensor, nn

from examples.paper.networks import all_cnn_c
from laplace_debias.curvature import GGN, Hessian

BATCH = 64
# The classes of this package and of curvlinops.
OPERATORS = {
    "GGN": (GGN, curvlinops.GGNLinearOperator),
    "Hessian": (Hessian, curvlinops.HessianLinearOperator),
}


def problem(name: str) -> tuple[nn.Module, Tensor]:
    """Return a network in eval mode and a batch of inputs."""
    if name == "all_cnn_c":
        return all_cnn_c().eval(), torch.randn(BATCH, 3, 32, 32)
    mlp = nn.Sequential(
        nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10)
    )
    return mlp.eval(), torch.randn(BATCH, 64)


def interleaved(functions: dict[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    """Return median seconds of functions that are called in turn for about `seconds` in total."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for function in functions.values():  # linearise and warm up
        function()
    num_rounds = 0
    start = time.perf_counter()
    while time.perf_counter() - start < seconds or num_rounds < 3:
        for name, function in functions.items():
            call_start = time.perf_counter()
            function()
            times[name].append(time.perf_counter() - call_start)
        num_rounds += 1
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    """Measure, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--network", choices=("all_cnn_c", "mlp"), default="all_cnn_c")
    parser.add_argument("--operator", choices=OPERATORS, default="GGN")
    parser.add_argument("--columns", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=60.0)
    arguments = parser.parse_args()

    torch.manual_seed(0)
    model, inputs = problem(arguments.network)
    targets = torch.randint(0, 10, (BATCH,))
    loss = nn.CrossEntropyLoss()
    parameters = list(model.parameters())
    data = [(inputs, targets)]
    size = sum(parameter.numel() for parameter in parameters)
    vector = torch.randn(size)
    matrix = torch.randn(size, arguments.columns)

    our_class, peer_class = OPERATORS[arguments.operator]
    start = time.perf_counter()
    ours = our_class(model, loss, data)
    product = ours @ vector
    set_up_seconds = time.perf_counter() - start
    peer = peer_class(model, loss, parameters, data, check_deterministic=False)
    torch.testing.assert_close(product, peer @ vector, rtol=1e-3, atol=1e-4)
    functions: dict[str, Callable[[], object]] = {
        "gradient": lambda: torch.autograd.grad(loss(model(inputs), targets), parameters),
        "@ v": lambda: ours @ vector,
        "@ v, curvlinops": lambda: peer @ vector,
        "@ V": lambda: ours @ matrix,
        "@ V, curvlinops": lambda: peer @ matrix,
    }
    print(
        f"{arguments.operator} of {arguments.network}, {size:,} parameters, batch {BATCH}, "
        f"{arguments.columns} columns, {torch.get_num_threads()} threads; set-up and first product "
        f"{set_up_seconds:.1f} s, kept {ours.num_bytes_kept / 2**20:.1f} MiB"
    )
    medians = interleaved(functions, arguments.seconds)
    for name, seconds in medians.items():
        line = f"{name:28s} {1e3 * seconds:10.3f} ms {seconds / medians['gradient']:7.2f} gradients"
        if f"{name}, curvlinops" in medians:
            line += f"   {medians[f'{name}, curvlinops'] / seconds:5.2f} x faster"
        print(line)


if __name__ == "__main__":
    main()
