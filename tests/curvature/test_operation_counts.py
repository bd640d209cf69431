"""How many operations of torch a batch of a fit and a prediction take; views are not counted.

The number does not depend on the machine. It is the overhead of small networks on a processor, and
of all networks on a GPU.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from laplace_debias import Laplace

# The operations of every batch are counted, not those of several that are run together.
pytestmark = pytest.mark.usefixtures("batches_apart")


class Count(TorchDispatchMode):
    """Counts the operations that are not views."""

    def __init__(self):
        super().__init__()
        self.operations = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run the operation and count it."""
        self.operations += not func.is_view
        return func(*args, **(kwargs or {}))


def num_operations(work):
    with Count() as count:
        work()
    return count.operations


@pytest.fixture(scope="module")
def network():
    """An All-CNN-C with 8 channels: a network whose operations take little time themselves."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.ReLU()]
    for stride in (1, 2, 1, 1, 2, 1):
        layers += [nn.Conv2d(8, 8, 3, stride, 1), nn.ReLU()]
    layers += [nn.Conv2d(8, 10, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers).eval()


def batches(number, size=4):
    torch.manual_seed(0)
    return [(torch.randn(size, 3, 32, 32), torch.randint(10, (size,))) for _ in range(number)]


def operations_of_gradient(network):
    ((x, y),) = batches(1)
    parameters = list(network.parameters())

    def compute_gradient():
        torch.autograd.grad(F.cross_entropy(network(x), y), parameters)

    return num_operations(compute_gradient)


def operations_of_further_batch(network, curvature, fisher, size=4):
    data = batches(3, size)

    def fit(number):
        la = Laplace(network, params="weights", curvature=curvature, fisher=fisher)
        la.fit_batches(data[:number], num_data=size * number)

    fit(1)
    return num_operations(lambda: fit(3)) - num_operations(lambda: fit(2))


@pytest.mark.parametrize(
    ("curvature", "fisher", "max_ratio"),
    [
        ("kfac", "mc", 4.8),
        ("kfac", "empirical", 4.4),
        ("diag", "mc", 3.0),
        ("diag", "empirical", 3.0),
    ],
)
def test_a_further_batch_of_a_fit_takes_few_times_the_operations_of_a_gradient(
    network, curvature, fisher, max_ratio
):
    operations = operations_of_further_batch(network, curvature, fisher)
    assert 0 < operations <= max_ratio * operations_of_gradient(network)


def test_the_operations_of_a_batch_do_not_depend_on_its_number_of_examples(network):
    few = operations_of_further_batch(network, "diag", "empirical", size=4)
    many = operations_of_further_batch(network, "diag", "empirical", size=8)
    assert few == many


def test_a_prediction_of_eight_images_takes_a_bounded_number_of_operations(network):
    la = Laplace(network, params="weights", curvature="kfac", fisher="mc")
    la.fit_batches(batches(1), num_data=4)
    x = torch.randn(8, 3, 32, 32)
    la.predict(x)
    assert num_operations(lambda: la.predict(x).probs) <= 370


def test_a_last_layers_prediction_of_one_input_takes_few_operations_besides_the_network():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(8, 50), nn.ReLU(), nn.Linear(50, 2)).eval()
    la = Laplace(network, params="last_layer")
    la.fit_batches([(torch.randn(64, 8), torch.randint(2, (64,)))], num_data=64)
    x = torch.randn(1, 8)
    la.predict(x)
    besides = num_operations(lambda: la.predict(x).probs) - num_operations(lambda: network(x))
    assert besides <= 30


def test_a_perceptrons_prediction_of_one_input_takes_a_bounded_number_of_operations():
    torch.manual_seed(0)
    layers = [nn.Linear(20, 50), nn.ReLU(), nn.Linear(50, 50), nn.ReLU(), nn.Linear(50, 3)]
    network = nn.Sequential(*layers).eval()
    la = Laplace(network)
    la.fit_batches([(torch.randn(64, 20), torch.randint(3, (64,)))], num_data=64)
    x = torch.randn(1, 20)
    la.predict(x)
    assert num_operations(lambda: la.predict(x).probs) <= 90


class WithToken(nn.Module):
    """Appends a learned token, with respect to which its calls are run again."""

    num_calls = 0

    def __init__(self):
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 4))

    def forward(self, x):
        type(self).num_calls += 1
        return torch.cat([self.token.expand(len(x), -1, -1), x], 1)


def test_a_call_is_run_again_once_for_all_columns_also_in_networks_with_convolutions():
    def num_calls(num_classes):
        torch.manual_seed(0)
        patches = nn.Sequential(nn.Conv2d(3, 4, 2, stride=2), nn.Flatten(2))
        head = nn.Sequential(nn.Linear(4, 4), nn.Flatten(), nn.Linear(20, num_classes))
        network = nn.Sequential(patches, WithToken(), head)
        WithToken.num_calls = 0
        Laplace(network).fit_batches([(torch.randn(8, 3, 4, 4), torch.arange(8) % num_classes)])
        return WithToken.num_calls

    assert num_calls(3) == num_calls(8)
