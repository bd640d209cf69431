"""Layers that only some batches call: a mixture of experts, an early exit, a second head.

A layer that is not called has the Jacobian zero. The reference runs one example after the other.
"""

import warnings

import pytest
import torch
from oracle import close, flat_jacobian, loss_hessian
from torch import nn

from laplace_debias import Laplace
from laplace_debias.curvature import EKFAC, GGN, KFAC, EmpiricalFisher

pytestmark = pytest.mark.filterwarnings("error:.*do not depend on.*")


class Experts(nn.Module):
    """A mixture of experts, each called only if an example of the batch takes it.

    An expert sees all examples, or only those that take it.
    """

    def __init__(self, num_experts=3, sees_all=True):
        super().__init__()
        self.e = nn.ModuleList(nn.Linear(4, 3) for _ in range(num_experts))
        self.head = nn.Linear(4, 3)
        self.sees_all = sees_all

    def forward(self, x):
        choice = x[:, 0].long()
        outputs = self.head(x)
        for number, expert in enumerate(self.e):
            takes = choice == number
            if not takes.any():
                continue
            if self.sees_all:
                outputs = outputs + takes.unsqueeze(1) * expert(x).tanh()
            else:
                rows = takes.nonzero().flatten()
                outputs = outputs.index_add(0, rows, expert(x[rows]).tanh())
        return outputs


class EarlyExit(nn.Module):
    """A network that leaves out its second half if the whole batch is easy."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 5)
        self.exit = nn.Linear(5, 3)
        self.further = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 3))

    def forward(self, x):
        h = self.first(x).tanh()
        outputs = self.exit(h)
        is_hard = x[:, :1] > 0
        if is_hard.any():
            outputs = outputs + is_hard * self.further(h)
        return outputs


class ExitWithoutHead(EarlyExit):
    """An `EarlyExit` in which only easy examples use the exit, and use nothing else."""

    def forward(self, x):
        h = self.first(x).tanh()
        is_hard = x[:, :1] > 0
        if not is_hard.any():
            return self.exit(h)
        if is_hard.all():
            return self.further(h)
        return torch.where(is_hard, self.further(h), self.exit(h))


def examples(choices):
    """Inputs whose first number is the expert that they take; from 1 on they are hard."""
    x = torch.randn(len(choices), 4, dtype=torch.float64)
    x[:, 0] = torch.tensor(choices, dtype=torch.float64)
    return x, torch.randint(3, (len(choices),))


MODELS = {
    "experts": Experts,
    "experts of some rows": lambda: Experts(sees_all=False),
    "early exit": EarlyExit,
    "one of two heads": ExitWithoutHead,
}
# Choices of each batch: the first has all experts, the others only some.
CHOICES = [[0, 1, 0, 2, 1, 0], [0, 0, 0], [1, 1], [0], [2, 1, 2, 2]]


def case(name, first=0):
    """A model, its batches with batch `first` moved to the front, and all examples."""
    torch.manual_seed(0)
    model = MODELS[name]().double().eval()
    batches = [examples(choices) for choices in CHOICES]
    batches = [batches[first], *batches[:first], *batches[first + 1 :]]
    x = torch.cat([x for x, _ in batches])
    return model, batches, x, torch.cat([y for _, y in batches])


def dense_curvature(model, x, names):
    """The GGN of the mean loss, `(1/N) Σ_n J_nᵀ H_n J_n`, one example at a time."""
    J = flat_jacobian(model, x, names)
    outputs = torch.cat([model(x[n : n + 1]) for n in range(len(x))])
    H = loss_hessian("classification", outputs)
    return sum(J[n].T @ H[n] @ J[n] for n in range(len(x))) / len(x)


@pytest.mark.parametrize("first", range(len(CHOICES)))
@pytest.mark.parametrize("name", MODELS)
def test_a_fit_has_the_dense_curvature(name, first):
    model, batches, x, _ = case(name, first)
    la = Laplace(model, curvature="full").fit_batches(batches)
    assert la.param_names == [name for name, _ in model.named_parameters()]
    expected = dense_curvature(model, x, la.param_names)
    close(la.posterior.curvature.to_dense(), expected)


@pytest.mark.parametrize("first", [0, 3])
@pytest.mark.parametrize("name", MODELS)
def test_the_diagonal_is_exact(name, first):
    model, batches, x, _ = case(name, first)
    la = Laplace(model, curvature="diag").fit_batches(batches)
    expected = dense_curvature(model, x, la.param_names).diagonal()
    close(la.posterior.curvature.to_dense().diagonal(), expected)


@pytest.mark.parametrize("first", [0, 3])
@pytest.mark.parametrize("name", MODELS)
def test_ekfac_measures_exactly_along_its_directions(name, first):
    model, batches, x, _ = case(name, first)
    la = Laplace(model, curvature="ekfac").fit_batches(batches)
    exact = dense_curvature(model, x, la.param_names)
    # The trace does not depend on the directions.
    close(la.posterior.curvature.to_dense().trace(), exact.trace())


@pytest.mark.parametrize("curvature", ["kfac", "ekfac"])
@pytest.mark.parametrize("name", MODELS)
def test_kfac_does_not_depend_on_how_examples_are_batched(name, curvature):
    """Whether a layer is called for an example that does not take it depends on the batch."""
    model, _, x, y = case(name)
    one_batch = Laplace(model, curvature=curvature).fit_batches([(x, y)])
    expected = one_batch.posterior.curvature.to_dense()
    for size in (1, 2, 5):
        batches = list(zip(x.split(size), y.split(size), strict=True))
        la = Laplace(model, curvature=curvature).fit_batches(batches)
        close(la.posterior.curvature.to_dense(), expected, 1e-8)
    la = Laplace(model, curvature=curvature, memory_bound=2000).fit_batches([(x, y)])
    close(la.posterior.curvature.to_dense(), expected, 1e-8)


@pytest.mark.parametrize("curvature", ["kfac", "ekfac", "diag", "full", "lowrank"])
@pytest.mark.parametrize("name", MODELS)
def test_predictions_of_single_inputs_have_the_dense_covariance(name, curvature):
    model, batches, x, _ = case(name)
    la = Laplace(model, curvature=curvature).fit_batches(batches)
    J = flat_jacobian(model, x, la.param_names)
    covariance = la.posterior.covariance.to_dense()
    for n in range(len(x)):
        mean, functional_covariance = la.functional(x[n : n + 1])
        torch.testing.assert_close(mean, model(x[n : n + 1]))
        close(functional_covariance[0], J[n] @ covariance @ J[n].T, 1e-8)
    close(la.functional(x)[1], J @ covariance @ J.mT, 1e-8)
    assert la.predict(x[:1]).probs.isfinite().all()
    joint = la.functional(x[:4], joint=True)[1]
    rows = J[:4].flatten(0, 1)
    close(joint.flatten(0, 1).flatten(1), rows @ covariance @ rows.T, 1e-8)


@pytest.mark.parametrize("mode", ["mini", "debiased", "crossfit", "full"])
@pytest.mark.parametrize("curvature", ["kfac", "ekfac", "diag", "full", "lowrank"])
@pytest.mark.parametrize("first", [0, 3])
def test_every_mode_fits(first, curvature, mode):
    if (first, mode) == (3, "crossfit"):
        pytest.skip("one example makes no folds")
    model, batches, x, _ = case("experts", first)
    with warnings.catch_warnings():
        # A single batch may not use all experts.
        warnings.simplefilter("ignore")
        la = Laplace(model, curvature=curvature).fit(batches, mode=mode, num_data=len(x))
    J = flat_jacobian(model, x, la.param_names)
    expected = J @ la.posterior.covariance.to_dense() @ J.mT
    close(la.functional(x)[1], expected, 1e-8)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("first", [0, 3])
def test_operators_have_the_dense_curvature(name, first):
    model, batches, x, y = case(name, first)
    names = [name for name, _ in model.named_parameters()]
    exact = dense_curvature(model, x, names)
    close(GGN(model, nn.CrossEntropyLoss(), batches).to_dense(), exact)
    close(EKFAC(model, nn.CrossEntropyLoss(), batches).to_dense().trace(), exact.trace())
    J = flat_jacobian(model, x, names)
    outputs = torch.cat([model(x[n : n + 1]) for n in range(len(x))])
    residuals = outputs.softmax(1) - torch.eye(3, dtype=torch.float64)[y]
    gradients = torch.einsum("nc,ncd->nd", residuals, J)
    expected = gradients.T @ gradients / len(x)
    close(EmpiricalFisher(model, nn.CrossEntropyLoss(), batches).to_dense(), expected)
    assert KFAC(model, nn.CrossEntropyLoss(), batches).to_dense().isfinite().all()


def rare(num_batches, size, takes_rare):
    """Batches whose examples take two of three experts; those in `takes_rare` take the third."""
    batches = []
    for number in range(num_batches):
        choices = [k % 2 for k in range(size)]
        for index in takes_rare.get(number, ()):
            choices[index] = 2
        batches.append(examples(choices))
    return batches


@pytest.mark.parametrize("sees_all", [True, False])
@pytest.mark.parametrize("curvature", ["kfac", "diag", "full"])
@pytest.mark.parametrize(
    "takes_rare",
    [{0: [17]}, pytest.param({0: [139]}, marks=pytest.mark.slow), {2: [5, 7]}, {3: [18]}],
    ids=str,
)
def test_experts_that_the_first_examples_miss_are_part_of_the_posterior(
    takes_rare, curvature, sees_all
):
    torch.manual_seed(0)
    model = Experts(sees_all=sees_all).double().eval()
    batches = rare(4, 140 if 139 in takes_rare.get(0, ()) else 20, takes_rare)
    la = Laplace(model, curvature=curvature).fit(batches)
    assert la.param_names == [name for name, _ in model.named_parameters()]
    x = torch.cat([x for x, _ in batches])
    exact = dense_curvature(model, x, la.param_names)
    if curvature == "full":
        close(la.posterior.curvature.to_dense(), exact)
    if curvature == "diag":
        close(la.posterior.curvature.to_dense().diagonal(), exact.diagonal())
    J = flat_jacobian(model, x[:8], la.param_names)
    close(la.functional(x[:8])[1], J @ la.posterior.covariance.to_dense() @ J.mT, 1e-8)
    if sees_all and curvature == "kfac":
        assert la.posterior.curvature.blocks["e.2.weight"].magnitudes.shape == (3, 4)


def test_the_other_batches_of_a_debiased_fit_show_experts_too():
    torch.manual_seed(0)
    model = Experts().double().eval()
    la = Laplace(model).fit(rare(2, 20, {1: [3]}), mode="debiased", num_data=40)
    assert "e.2.weight" in la.param_names


def test_kfac_of_a_loss_looks_through_the_data():
    torch.manual_seed(0)
    model = Experts().double().eval()
    batches = rare(3, 20, {2: [9]})
    x = torch.cat([x for x, _ in batches])
    names = [name for name, _ in model.named_parameters()]
    exact = dense_curvature(model, x, names)
    close(EKFAC(model, nn.CrossEntropyLoss(), batches).to_dense().trace(), exact.trace())


def test_an_expert_that_no_example_takes_is_left_out():
    torch.manual_seed(0)
    model = Experts().double().eval()
    batches = rare(3, 20, {})
    message = r"do not depend on \['e\.2\.weight', 'e\.2\.bias'\]"
    with pytest.warns(UserWarning, match=message):
        la = Laplace(model).fit(batches)
    assert not [name for name in la.param_names if name.startswith("e.2")]
    with pytest.raises(ValueError, match=message):
        KFAC(model, nn.CrossEntropyLoss(), batches)


def test_data_that_can_be_read_once_is_not_read_for_it():
    torch.manual_seed(0)
    model = Experts().double().eval()
    batches = rare(3, 20, {2: [9]})
    with pytest.warns(UserWarning, match=r"outputs of the first batch do not depend on"):
        la = Laplace(model).fit_batches(iter(batches), num_data=60)
    assert la.num_data == 60


class SometimesByWeight(nn.Module):
    """A layer that is called for some batches; for others the forward pass reads its weight."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        if (x[:, 0] > 0).any():
            return self.head(self.layer(x).tanh())
        return self.head((x @ self.layer.weight.T + self.layer.bias).tanh())


@pytest.mark.usefixtures("batches_apart")
def test_a_weight_that_is_read_without_a_call_is_refused():
    torch.manual_seed(0)
    model = SometimesByWeight().double().eval()
    batches = [examples([1, 1, 1]), examples([0, 0])]
    with pytest.raises(NotImplementedError, match=r"does not call layer for these examples"):
        Laplace(model).fit_batches(batches)
    la = Laplace(model).fit_batches(batches[:1])
    with pytest.raises(NotImplementedError, match=r"depend on \['layer\.weight', 'layer\.bias'\]"):
        la.predict(batches[1][0])
