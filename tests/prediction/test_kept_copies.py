"""Predictions keep their working copy of the model, and notice every change of the modules."""

import copy
import pickle
import threading
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from laplace_debias import Laplace
from laplace_debias.laplace.state import model_spec


class Scaled(nn.Module):
    """A network whose forward pass depends on attributes and on a buffer that no file holds."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.activation = nn.Tanh()
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 3)
        self.scale = 1.0
        self.shifts = [0.0, [1.0]]
        self.register_buffer("offset", torch.zeros(6), persistent=False)

    def forward(self, x):
        """Shape `[B, 3]`."""
        hidden = self.norm(self.activation(self.first(x))) * self.scale + self.offset
        return self.head(hidden + self.shifts[0] + self.shifts[1][0])


class WithOptions(Scaled):
    """A network that also depends on an object, whose changes leave no trace."""

    def __init__(self):
        super().__init__()
        self.options = SimpleNamespace(factor=1.0)

    def forward(self, x):
        """Shape `[B, 3]`."""
        return super().forward(x * self.options.factor)


def fitted(kind=Scaled, params="all"):
    torch.manual_seed(0)
    model = kind().double().eval()
    x = torch.randn(20, 4, dtype=torch.float64)
    la = Laplace(model, params=params).fit_batches([(x, torch.randint(3, (20,)))], num_data=20)
    return la, x


def second_probs(la, x):
    """The probabilities of a second prediction, which uses the copy that the first one kept."""
    la.predict(x)
    return la.predict(x).probs


@pytest.fixture
def num_copies(monkeypatch):
    """How often a model has been copied."""
    calls = []
    copy_model = model_spec.shared_copy

    def counted(model):
        calls.append(model)
        return copy_model(model)

    monkeypatch.setattr(model_spec, "shared_copy", counted)
    return lambda: len(calls)


@pytest.mark.parametrize("params", ["all", "last_layer"])
def test_the_model_is_copied_once_for_several_predictions(params, num_copies):
    la, x = fitted(params=params)
    first = la.predict(x).probs
    num_copies_before = num_copies()
    for size in (20, 1, 7):
        assert torch.equal(la.predict(x[:size]).probs, la.predict(x[:size]).probs)
    la.prior_precision = 3.0
    changed = la.predict(x).probs
    assert num_copies() == num_copies_before
    assert not torch.equal(first, changed)


def scale(model):
    model.scale = 2.0


def integer_scale(model):
    model.scale = 2


def element(model):
    model.shifts[0] = 0.5


def inner_element(model):
    model.shifts[1][0] = 0.5


def buffer_in_place(model):
    model.offset.add_(1)


def buffer_through_data(model):
    model.offset.data.add_(1)


def buffer_assigned(model):
    model.offset = torch.ones_like(model.offset)


def hook(model):
    model.activation.register_forward_hook(lambda module, x, y: 2 * y)


def pre_hook(model):
    model.head.register_forward_pre_hook(lambda module, x: (2 * x[0],))


def submodule(model):
    model.activation = nn.Sigmoid()


def method(model):
    model.activation.forward = torch.sigmoid


def class_of_module(model):
    model.activation.__class__ = nn.Sigmoid


def epsilon(model):
    model.norm.eps = 1.0


CHANGES = [
    scale,
    integer_scale,
    element,
    inner_element,
    buffer_in_place,
    buffer_through_data,
    buffer_assigned,
    hook,
    pre_hook,
    submodule,
    method,
    class_of_module,
    epsilon,
]


@pytest.mark.parametrize("params", ["all", "last_layer"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_the_modules_is_noticed(change, params):
    """A copy of the object has no working copy yet, and predicts with the model as it is now."""
    la, x = fitted(params=params)
    probs_before = second_probs(la, x)
    change(la.model)
    expected = copy.deepcopy(la).predict(x).probs
    assert torch.equal(la.predict(x).probs, expected)
    assert not torch.allclose(expected, probs_before)


def test_a_change_within_an_object_is_noticed():
    la, x = fitted(WithOptions)
    probs_before = second_probs(la, x)
    la.model.options.factor = 2.0
    expected = copy.deepcopy(la).predict(x).probs
    assert torch.equal(la.predict(x).probs, expected)
    assert not torch.allclose(expected, probs_before)


def same_values_elsewhere(model):
    model.first.weight.data = model.first.weight.data.clone()


def new_parameter(model):
    model.first.weight = nn.Parameter(model.first.weight.detach().clone())


def training_and_back(model):
    model.train()
    model.eval()


def reloaded(model):
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)


@pytest.mark.parametrize(
    "change", [same_values_elsewhere, new_parameter, training_and_back, reloaded]
)
@pytest.mark.parametrize("params", ["all", "last_layer"])
def test_equal_values_elsewhere_give_the_same_prediction_and_later_changes_raise(change, params):
    la, x = fitted(params=params)
    probs_before = second_probs(la, x)
    change(la.model)
    assert torch.equal(la.predict(x).probs, probs_before)
    with torch.no_grad():
        la.model.first.weight.mul_(2)
    with pytest.raises(RuntimeError, match="changed since the fit"):
        la.predict(x)


class Counting(Scaled):
    """A forward pass that counts its calls in an attribute and a buffer, once `counts` is set."""

    def __init__(self):
        super().__init__()
        self.counts = False
        self.num_calls = [[0]]
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, x):
        """Shape `[B, 3]`."""
        outputs = super().forward(x)
        if not self.counts:
            return outputs
        outputs = outputs * (1 + self.calls) + self.num_calls[0][0] * x[:, :3]
        self.calls += 1
        self.num_calls[0][0] += 1
        return outputs


def test_a_prediction_does_not_depend_on_the_ones_before():
    la, x = fitted(Counting)
    la.model.counts = True
    predictions = [la.predict(x).probs for _ in range(3)]
    assert all(torch.equal(predictions[0], prediction) for prediction in predictions)
    assert la.model.num_calls == [[0]]
    assert float(la.model.calls) == 0


class Remembering(Scaled):
    """A forward pass that remembers its inputs in an attribute, and depends on the ones before."""

    def __init__(self):
        super().__init__()
        self.remembers = False
        self.shift = 0.0

    def forward(self, x):
        """Shape `[B, 3]`."""
        outputs = super().forward(x) + self.shift
        if self.remembers:
            self.shift = float(x.mean())
        return outputs


@pytest.mark.parametrize("params", ["all", "last_layer"])
def test_attributes_that_a_pass_sets_are_restored_in_the_copy_that_is_kept(params, num_copies):
    la, x = fitted(Remembering, params)
    expected = la.functional(x)[0]
    la.model.remembers = True
    assert torch.equal(la.functional(x)[0], expected)
    num_copies_before = num_copies()
    for size in (20, 1, 7):
        torch.testing.assert_close(la.functional(x[:size])[0], expected[:size])
    assert num_copies() == num_copies_before
    assert la.model.shift == 0


def test_an_error_within_a_pass_leaves_nothing_behind():
    la, x = fitted()
    probs_before = second_probs(la, x)
    with pytest.raises(ValueError, match="NaN"):
        la.predict(torch.full_like(x, torch.nan))
    assert torch.equal(la.predict(x).probs, probs_before)


def test_copies_and_pickles_keep_no_working_copy():
    la, x = fitted()
    expected = la.predict(x).probs
    for la_copy in (copy.deepcopy(la), pickle.loads(pickle.dumps(la))):
        assert not la_copy._state.fitted_model.prediction_cache._idle
        assert torch.equal(la_copy.predict(x).probs, expected)


def test_inputs_of_a_last_layer_of_many_classes_run_together():
    """Variances need no output gradients, so the number of classes does not split a batch."""
    torch.manual_seed(0)
    sizes = []
    head = nn.Linear(4, 1000)
    head.register_forward_pre_hook(lambda module, inputs: sizes.append(len(inputs[0])))
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), head).double()
    x = torch.randn(12, 3, dtype=torch.float64)
    la = Laplace(model, params="last_layer", curvature="diag", fisher="empirical")
    la.fit_batches([(x, torch.randint(1000, (12,)))], num_data=12)
    sizes.clear()
    mean, variances = la.functional(x, diagonal=True)
    assert max(sizes) == 12
    by_example = [la.functional(x[i : i + 1], diagonal=True) for i in range(12)]
    torch.testing.assert_close(mean, torch.cat([m for m, _ in by_example]))
    torch.testing.assert_close(variances, torch.cat([v for _, v in by_example]))


def fresh_probs(la, x):
    """A posterior with the same numbers that has predicted nothing yet."""
    return copy.deepcopy(la).predict(x).probs


def set_prior_precision(la):
    la.prior_precision = 0.01


def set_prior_precision_per_block(la):
    la.prior_precision = torch.linspace(0.01, 0.05, len(la.block_names), dtype=torch.float64)


@torch.no_grad()
def prior_precision_in_place(la):
    la.posterior.prior.precision.mul_(0.01)


def set_temperature(la):
    la.temperature = 0.01


@torch.no_grad()
def magnitudes_in_place(la):
    for block in la.posterior.curvature.blocks.values():
        block.magnitudes.mul_(0.01)


def magnitudes_assigned(la):
    for block in la.posterior.curvature.blocks.values():
        block.magnitudes = block.magnitudes * 0.01


@torch.inference_mode()
def magnitudes_in_inference_mode(la):
    """torch does not count the changes of tensors from inference mode."""
    x = torch.randn(1, 4, dtype=torch.float64)
    for block in la.posterior.curvature.blocks.values():
        block.magnitudes = block.magnitudes.clone()
    la.predict(x)
    for block in la.posterior.curvature.blocks.values():
        block.magnitudes.mul_(0.01)


def tune(la):
    torch.manual_seed(1)
    batch = (torch.randn(20, 4, dtype=torch.float64), torch.randint(3, (20,)))
    la.tune([batch], grid=torch.tensor([0.01, 0.02]))


def thin(la):
    la.prior_precision = 0.01
    la.thin(torch.randn(8, 4, dtype=torch.float64))


POSTERIOR_CHANGES = [
    set_prior_precision,
    set_prior_precision_per_block,
    prior_precision_in_place,
    set_temperature,
    magnitudes_in_place,
    magnitudes_assigned,
    magnitudes_in_inference_mode,
    tune,
    thin,
]


@pytest.mark.parametrize("params", ["all", "last_layer"])
@pytest.mark.parametrize("change", POSTERIOR_CHANGES)
def test_a_change_of_the_posterior_is_noticed(change, params):
    """Values kept from an earlier prediction are those of the posterior as it is now."""
    la, x = fitted(params=params)
    probs_before = second_probs(la, x)
    change(la)
    expected = fresh_probs(la, x)
    assert torch.equal(la.predict(x).probs, expected)
    assert not torch.allclose(expected, probs_before, rtol=1e-3)


@pytest.mark.parametrize("change", [set_prior_precision, prior_precision_in_place])
@pytest.mark.parametrize("curvature", ["diag", "lowrank", "full"])
def test_a_change_of_the_prior_is_noticed_under_every_curvature(change, curvature):
    torch.manual_seed(0)
    model = Scaled().double().eval()
    x = torch.randn(20, 4, dtype=torch.float64)
    la = Laplace(model, curvature=curvature).fit_batches([(x, torch.randint(3, (20,)))])
    probs_before = second_probs(la, x)
    change(la)
    expected = fresh_probs(la, x)
    assert torch.equal(la.predict(x).probs, expected)
    assert not torch.allclose(expected, probs_before, rtol=1e-3)


def test_a_change_of_the_noise_is_noticed():
    torch.manual_seed(0)
    model = Scaled().double().eval()
    x = torch.randn(20, 4, dtype=torch.float64)
    la = Laplace(model, "regression", sigma=1.0)
    la.fit_batches([(x, torch.randn(20, 3, dtype=torch.float64))])
    la.predict(x)
    covariance_before = la.predict(x).covariance_matrix
    la.tune_evidence(sigma=True)
    expected = copy.deepcopy(la).predict(x).covariance_matrix
    assert torch.equal(la.predict(x).covariance_matrix, expected)
    assert not torch.allclose(expected, covariance_before, rtol=1e-3)


def test_threads_that_predict_and_set_the_prior_get_the_numbers_of_one_prior_or_the_other():
    la, x = fitted()
    expected = []
    for prior_precision in (0.1, 10.0):
        la.prior_precision = prior_precision
        expected.append(fresh_probs(la, x))
    wrong = []

    def predict():
        for _ in range(20):
            probs = la.predict(x).probs
            if not any(torch.equal(probs, values) for values in expected):
                wrong.append(probs)

    threads = [threading.Thread(target=predict) for _ in range(2)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        la.prior_precision = 0.1
        la.prior_precision = 10.0
    for thread in threads:
        thread.join()
    assert not wrong


def test_inputs_of_several_shapes_have_chunks_of_their_own():
    """The size of a chunk is kept for inputs of one shape, not for others."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(2, 3, 3), nn.AdaptiveAvgPool1d(1), nn.Flatten()).double()
    x = torch.randn(6, 2, 9, dtype=torch.float64)
    la = Laplace(model).fit_batches([(x, torch.randint(3, (6,)))])
    for length in (9, 40, 9, 5):
        inputs = torch.randn(7, 2, length, dtype=torch.float64)
        assert torch.equal(la.predict(inputs).probs, fresh_probs(la, inputs))


class ScaledForLargeInputs(nn.Module):
    """A network that ends in its head for small inputs, and behind it for large ones."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        """Shape `[B, 3]`."""
        outputs = self.head(torch.tanh(self.first(x)))
        return outputs if x.abs().max() < 10 else outputs * 2


@pytest.mark.parametrize("diagonal", [False, True])
def test_inputs_for_which_the_last_layer_is_not_the_last_operation_are_differentiated(diagonal):
    """The first inputs of a shape need no graph; later ones of the same shape may need one."""
    la, x = fitted(ScaledForLargeInputs, params=["head.weight", "head.bias"])
    la.functional(x, diagonal=diagonal)
    mean, covariance = la.functional(100 * x, diagonal=diagonal)
    hidden = torch.tanh(la.model.first(100 * x)).detach()
    torch.testing.assert_close(mean, 2 * la.model.head(hidden).detach())
    ones = torch.ones(len(x), 1, dtype=torch.float64)
    phi = torch.cat([hidden, ones], 1)
    J = torch.einsum("cd,bi->bcdi", 2 * torch.eye(3, dtype=torch.float64), phi)
    posterior = la.posterior.covariance.to_dense()
    weights = torch.arange(18).view(3, 6)
    biases = 18 + torch.arange(3).view(3, 1)
    order = torch.cat([weights, biases], 1).flatten()
    rows = J.flatten(2)
    expected = rows @ posterior[order][:, order] @ rows.mT
    if diagonal:
        expected = expected.diagonal(dim1=1, dim2=2)
    torch.testing.assert_close(covariance, expected)
    assert torch.equal(mean, la.functional(100 * x)[0])


class Preallocated(nn.Module):
    """A regression that writes its outputs into a tensor of its own."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.register_buffer("out", torch.zeros(5, 2), persistent=False)

    def forward(self, x):
        """Shape `[B, 2]`."""
        outputs = self.layer(x)
        if torch.is_grad_enabled():
            return outputs
        return self.out[: len(x)].copy_(outputs)


def test_a_later_prediction_does_not_change_an_earlier_one():
    torch.manual_seed(0)
    model = Preallocated().eval()
    x = torch.randn(10, 4)
    la = Laplace(model, "regression", sigma=1.0).fit([(x, torch.randn(10, 2))])
    first = la.predict(x[:5], method="map").mean
    first_before = first.clone()
    la.predict(x[5:], method="map")
    assert first.equal(first_before)
    assert first.equal(model.layer(x[:5]))
