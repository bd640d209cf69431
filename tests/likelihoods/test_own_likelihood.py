"""A likelihood of the user's own in a posterior file: its import path, and no import."""

import sys

import pytest
import torch
from torch import nn
from torch.distributions import Poisson as PoissonDistribution

from laplace_debias import Bernoulli, Categorical, Laplace, Likelihood, MultiLabel, Ordinal


class Poisson(Likelihood):
    """Counts, of one rate exp(f) times the exposure."""

    def __init__(self, exposure=1.0):
        self.exposure = exposure

    def check(self, outputs, targets):
        if targets.shape != outputs.shape:
            raise ValueError("one count an output")

    def nll(self, outputs, targets):
        rates = self.exposure * outputs.exp()
        return -PoissonDistribution(rates).log_prob(targets).sum(-1)

    def hessian_root(self, outputs):
        return torch.diag_embed((self.exposure * outputs.exp()).sqrt()).movedim(-1, 0)

    def sample(self, outputs, uniforms):
        raise NotImplementedError

    def predictive(self, mean, covariance):
        return PoissonDistribution(self.exposure * mean.exp())

    def mixture(self, samples):
        raise NotImplementedError

    def options(self):
        return {"exposure": self.exposure}


class Silent(Poisson):
    def options(self):
        return {}


class Odd(Poisson):
    def options(self):
        return {"exposure": torch.ones(1)}


class Misshapen(Poisson):
    """A wrong shape for each method: one loss for all examples, or losses broadcast to [B, B]."""

    def __init__(self, wrong):
        self.wrong = wrong

    @property
    def exposure(self):
        return 1.0

    def nll(self, outputs, targets):
        losses = super().nll(outputs, targets)
        return {"mean": losses.mean(), "pairs": losses + losses[:, None]}.get(self.wrong, losses)

    def hessian_root(self, outputs):
        columns = super().hessian_root(outputs)
        return {"vector": columns[..., 0], "turned": columns.movedim(0, 1)}.get(self.wrong, columns)


def fitted(likelihood):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2)).double().eval()
    x = torch.randn(8, 3).double()
    y = torch.randint(4, (8, 2)).double()
    return Laplace(model, likelihood).fit_batches([(x, y)]), x


def test_it_is_saved_on_request_and_loaded_with_an_instance(tmp_path):
    la, x = fitted(Poisson(2.0))
    path = tmp_path / "own.safetensors"
    with pytest.raises(ValueError, match=r"Poisson cannot be written.*own_likelihood=True"):
        la.save(path)
    assert not path.exists()
    la.save(path, own_likelihood=True)
    likelihood = Poisson(2.0)
    loaded = Laplace.load(path, la.model, likelihood=likelihood)
    assert loaded.likelihood is likelihood
    torch.testing.assert_close(loaded.predict(x).mean, la.predict(x).mean)
    torch.testing.assert_close(loaded.functional(x)[1], la.functional(x)[1])
    assert loaded.log_marginal_likelihood() == la.log_marginal_likelihood()


@pytest.mark.parametrize(
    ("likelihood", "says"),
    [
        (None, r"fitted with the likelihood '.*:Poisson'.*likelihood=Poisson\(\.\.\.\)"),
        (Silent(), "Pass an instance of that class"),
        (Categorical(), "Pass an instance of that class"),
        (Poisson(3.0), r"options \{'exposure': 2.0\}.*\{'exposure': 3.0\}"),
    ],
)
def test_another_one_is_refused(likelihood, says, tmp_path):
    la, _ = fitted(Poisson(2.0))
    la.save(tmp_path / "own.safetensors", own_likelihood=True)
    with pytest.raises(ValueError, match=says):
        Laplace.load(tmp_path / "own.safetensors", la.model, likelihood=likelihood)


def test_no_module_is_imported_for_a_file(tmp_path, monkeypatch):
    (tmp_path / "trap.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(Poisson, "__module__", "trap")
    la, _ = fitted(Poisson())
    la.save(tmp_path / "own.safetensors", own_likelihood=True)
    monkeypatch.undo()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="'trap:Poisson'"):
        Laplace.load(tmp_path / "own.safetensors", la.model)
    Laplace.load(tmp_path / "own.safetensors", la.model, likelihood=Poisson())
    assert "trap" not in sys.modules


def test_a_class_of_a_script_is_the_same_where_the_script_is_imported(tmp_path, monkeypatch):
    la, _ = fitted(Poisson())
    with monkeypatch.context() as patch:
        patch.setattr(Poisson, "__module__", "__main__")
        la.save(tmp_path / "own.safetensors", own_likelihood=True)
    Laplace.load(tmp_path / "own.safetensors", la.model, likelihood=Poisson())


def test_one_of_the_package_needs_no_instance(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2)).eval()
    la = Laplace(model).fit_batches([(torch.randn(4, 3), torch.tensor([0, 1, 1, 0]))])
    la.save(tmp_path / "a.safetensors")
    la.save(tmp_path / "b.safetensors", own_likelihood=True)
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()
    with pytest.raises(ValueError, match=r"contains the likelihood 'classification'"):
        Laplace.load(tmp_path / "a.safetensors", model, likelihood=Categorical())


def test_options_must_be_plain_data(tmp_path):
    la, _ = fitted(Odd())
    with pytest.raises(ValueError, match=r"options of Odd .* cannot be saved"):
        la.save(tmp_path / "odd.safetensors", own_likelihood=True)


class Tempered(Categorical):
    """A softmax at the temperature 2."""

    def nll(self, outputs, targets):
        return super().nll(outputs / 2, targets)

    def hessian_root(self, outputs):
        return super().hessian_root(outputs / 2) / 2

    def sample(self, outputs, uniforms):
        return super().sample(outputs / 2, uniforms)


def test_a_subclass_with_its_own_curvature_inherits_no_method_of_another_curvature():
    likelihood = Tempered()
    f = torch.tensor([[1.0, -0.5, 2.0]]).double()
    hessian = torch.func.hessian(lambda f: likelihood.nll(f, torch.tensor([0])).sum())(f)[0, :, 0]
    columns = likelihood.hessian_root(f)[:, 0]
    torch.testing.assert_close(columns.T @ columns, hessian)
    torch.testing.assert_close(likelihood.hessian_trace(f), hessian.trace().unsqueeze(0))
    signs = torch.tensor([[1.0, 1.0], [1.0, -1.0]]).double()
    sums = likelihood.signed_root(f.expand(2, 3), lambda num_columns: signs)
    torch.testing.assert_close(sums.T @ sums / 2, hessian)
    # The mean over equidistant numbers differs from the expectation by at most 1 / 10,000.
    uniforms = ((torch.arange(10_000) + 0.5) / 10_000).double().unsqueeze(1).expand(-1, 3)
    drawn = likelihood.drawn_gradient(f.expand(10_000, 3), uniforms)
    torch.testing.assert_close(drawn.T @ drawn / 10_000, hessian, rtol=0, atol=1e-4)


class OwnRoot(Bernoulli):
    def hessian_root(self, outputs):
        return super().hessian_root(outputs)


class OwnSample(MultiLabel):
    def sample(self, outputs, uniforms):
        return super().sample(outputs, uniforms)


@pytest.mark.parametrize(
    "likelihood",
    [
        Tempered(class_weights=[0.5, 1.0, 4.0]),
        Tempered(label_smoothing=0.3),
        Tempered(ignore_index=0),
        OwnRoot(positive_weight=5.0),
        OwnSample(ignore_index=0, label_weights=[2.0, 0.5], positive_weights=5.0),
    ],
)
def test_drawn_gradients_of_a_subclass_are_those_of_minus_log_p(likelihood):
    """Weights, smoothing and ignored labels belong to the loss, not to p(y | f)."""
    f = torch.tensor([[1.0, -0.5, 2.0]]).double()
    f = f[:, : {Bernoulli: 1, MultiLabel: 2}.get(type(likelihood).__base__, 3)]
    columns = likelihood.hessian_root(f)[:, 0]
    # The numbers are the centres of a grid of 300 × 300 cells.
    centres = (torch.arange(300).double() + 0.5) / 300
    uniforms = torch.cartesian_prod(centres, centres)[:, [0, 1, 1][: f.shape[1]]]
    drawn = likelihood.drawn_gradient(f.expand(len(uniforms), -1), uniforms)
    torch.testing.assert_close(drawn.T @ drawn / len(drawn), columns.T @ columns, rtol=0, atol=2e-3)


class AlwaysZero(Categorical):
    def sample(self, outputs, uniforms):
        return torch.zeros(len(outputs), dtype=torch.int64)


def test_a_subclass_draws_the_labels_of_monte_carlo_fits_by_its_own_sample():
    torch.manual_seed(0)
    model = nn.Linear(3, 4).double().eval()
    x = torch.randn(8, 3).double()
    y = torch.randint(4, (8,))
    la = Laplace(model, AlwaysZero(), curvature="diag", params=["bias"], fisher="mc")
    la.fit_batches([(x, y)])
    gradients = model(x).softmax(1) - torch.eye(4)[0]
    diagonal = la.posterior.curvature.blocks["bias"].to_dense().diagonal()
    torch.testing.assert_close(diagonal, gradients.square().mean(0).detach())


class Halved(Ordinal):
    """The loss of half of the examples."""

    def nll(self, outputs, targets):
        return super().nll(outputs, targets) / 2


def test_the_gradient_is_that_of_the_subclass_s_own_loss():
    outputs = torch.randn(5, 1).double()
    targets = torch.tensor([0, 1, 2, 1, 0])
    thresholds = [-1.0, 1.0]
    gradient = Ordinal(thresholds).gradient(outputs, targets)
    torch.testing.assert_close(Halved(thresholds).gradient(outputs, targets), gradient / 2)


def test_without_marginals_the_error_names_the_missing_methods():
    la, x = fitted(Poisson())
    with pytest.raises(TypeError, match="does not define `marginals` and `marginal_mixture`"):
        la.marginals(x)


@pytest.mark.parametrize("fisher", ["exact", "signs"])
@pytest.mark.parametrize(
    ("wrong", "method", "shape"),
    [
        ("mean", "nll", r"\(\)"),
        ("pairs", "nll", r"\(8, 8\)"),
        ("vector", "hessian_root", r"\(2, 8\)"),
        ("turned", "hessian_root", r"\(8, 2, 2\)"),
    ],
)
def test_methods_that_return_a_wrong_shape_are_named(wrong, method, shape, fisher):
    """A loss that is averaged or broadcast would lead to a wrong marginal likelihood."""
    model = nn.Linear(3, 2).double().eval()
    data = [(torch.randn(8, 3).double(), torch.randint(4, (8, 2)).double())]
    with pytest.raises(ValueError, match=rf"Misshapen.{method} returned .* {shape} for outputs"):
        Laplace(model, Misshapen(wrong), fisher=fisher).fit(
            data, generator=torch.Generator().manual_seed(0)
        )
