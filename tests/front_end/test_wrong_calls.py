"""Arguments of a wrong type or out of range: one door names the argument and what it takes."""

import inspect
import re
import sys
import warnings
from importlib import import_module

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from laplace_debias import Categorical, Laplace, Mixture
from laplace_debias.curvature import KFAC, Fisher
from laplace_debias.laplace.fitting.schemes import Split
from laplace_debias.laplace.wrong_names import EQUIVALENTS, OTHER_NAMES, SETTABLE
from laplace_debias.linalg import cg, inverse, trace
from laplace_debias.operators import Dense, Diagonal

X = torch.randn(10, 3, generator=torch.Generator().manual_seed(0))
Y = torch.arange(10) % 2
DATA = [(X, Y)]
BEYOND = 10**400
EYE = Dense(torch.eye(3))
MODEL = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).eval()


pytestmark = pytest.mark.usefixtures("unchecked")


@pytest.fixture(scope="module")
def la():
    return Laplace(MODEL).fit(DATA)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"sharing": 3}, TypeError),
        ({"joint": "x"}, TypeError),
        ({"rank": float("inf"), "curvature": "lowrank"}, TypeError),
        ({"rank": BEYOND, "curvature": "lowrank"}, ValueError),
        ({"rank": 3, "curvature": "diag"}, ValueError),
        ({"mc_samples": "x"}, TypeError),
        ({"mc_samples": 2.0, "fisher": "mc"}, TypeError),
        ({"memory_bound": BEYOND}, ValueError),
        ({"class_dim": BEYOND}, ValueError),
        ({"prior_precision": BEYOND}, ValueError),
        ({"prior_precision": "x"}, TypeError),
        ({"prior_mean": BEYOND}, ValueError),
        ({"temperature": BEYOND}, ValueError),
        ({"sigma": BEYOND, "likelihood": "regression"}, ValueError),
        ({"sigma": 1j, "likelihood": "regression"}, TypeError),
        ({"sigma": torch.tensor(1j), "likelihood": "regression"}, TypeError),
        ({"sigma": True, "likelihood": "regression"}, TypeError),
        ({"sigma": [1.0, "x"], "likelihood": "regression"}, TypeError),
        ({"likelihood": []}, ValueError),
    ],
)
def test_what_is_fitted(options, error):
    with pytest.raises(error, match=f"(?i){next(iter(options))}"):
        Laplace(MODEL, **options)


class FirstBatchOnly:
    def __iter__(self):
        yield X, Y
        pytest.fail("the fit reads all data before it checks its arguments")


@pytest.mark.parametrize("option", ["prior_precision", "prior_mean"])
@pytest.mark.parametrize("curvature", ["kfac", "diag", "full", "gp"])
def test_the_prior_of_a_last_layer_is_checked_before_the_data_are_read(curvature, option):
    la = Laplace(MODEL, curvature=curvature, params="last_layer", **{option: torch.ones(7)})
    with pytest.raises(ValueError, match=r"has shape \(7,\)"):
        la.fit(FirstBatchOnly())


@pytest.mark.parametrize(
    ("call", "error", "named"),
    [
        (lambda la: Laplace(MODEL).fit(DATA, generator=0), TypeError, "generator"),
        (lambda la: Laplace(MODEL).fit_batches(DATA, generator=0), TypeError, "generator"),
        (lambda la: Laplace(MODEL).fit(DATA, num_data=BEYOND), ValueError, "num_data"),
        (lambda la: Laplace(MODEL).fit(DATA, "crossfit", 10, folds="x"), TypeError, "folds"),
        (lambda la: Laplace(MODEL).fit(DATA, "crossfit", 10, folds=1), ValueError, "folds"),
        (lambda la: la.predict(X, generator=0), TypeError, "generator"),
        (lambda la: la.predict(X, samples=2.5), TypeError, "samples"),
        (lambda la: la.uncertainty(X, generator=0), TypeError, "generator"),
        (lambda la: la.sample(2**70), ValueError, "number of samples"),
        (lambda la: la.sample(2, generator=0), TypeError, "generator"),
        (lambda la: la.tune(DATA, generator=0), TypeError, "generator"),
        (lambda la: la.tune(DATA, grid=[BEYOND]), ValueError, "grid"),
        (lambda la: la.tune([(X, Y[:, None])]), ValueError, r"one class label.*squeeze\(1\)"),
        (lambda la: la.evaluate(DATA, generator=0), TypeError, "generator"),
        (lambda la: la.evaluate(DATA, ood=[DATA]), TypeError, r"ood.*\{'other': loader\}"),
        (lambda la: la.predict(X.numpy()), TypeError, r"got ndarray.*torch\.as_tensor"),
        (lambda la: la.predict(DATA), TypeError, "inputs of one batch instead of a loader"),
        (lambda la: la.evaluate(DATA, level="x"), TypeError, "level"),
        (lambda la: la.log_marginal_likelihood(BEYOND), ValueError, "prior_precision"),
        (lambda la: Dense(None), TypeError, "matrix"),
        (lambda la: Diagonal([1.0]), TypeError, "values"),
        (lambda la: trace(EYE, generator=0), TypeError, "generator"),
        (lambda la: cg(EYE, torch.ones(3), tol=BEYOND), ValueError, "tol"),
        (
            lambda la: Fisher(MODEL, nn.CrossEntropyLoss(), DATA, fisher="mc", mc_samples="x"),
            TypeError,
            "mc_samples",
        ),
    ],
)
def test_what_is_called(la, call, error, named):
    with pytest.raises(error, match=named):
        call(la)


def test_the_inverse_of_nothing_is_nothing():
    assert inverse(Dense(torch.zeros(0, 0))).shape == (0, 0)


def test_names_that_nobody_has_are_pythons_errors(la):
    with pytest.raises(AttributeError, match="object has no attribute 'no_such'"):
        _ = la.no_such
    with pytest.raises(TypeError, match="unexpected keyword argument 'no_such'"):
        Laplace(MODEL, no_such=1)


@pytest.mark.parametrize(
    ("call", "error", "ours"),
    [
        (lambda la: Laplace(MODEL, subset_of_weights="all"), TypeError, "params=.*last_layer"),
        (lambda la: Laplace(MODEL, hessian_structure="kron"), TypeError, 'curvature="kfac"'),
        (lambda la: Laplace(MODEL, curvature="kron"), ValueError, 'Use `curvature="kfac'),
        (lambda la: Laplace(MODEL, "regression", sigma_noise=1.0), TypeError, "sigma="),
        (lambda la: la.predict(X, pred_type="nn"), TypeError, 'method="glm" or "nn"'),
        (lambda la: la.predict(X, link_approx="probit"), TypeError, 'link="probit"'),
        (lambda la: la.predict(X, n_samples=10), TypeError, "Use samples="),
        (lambda la: la.fit(DATA, progress_bar=True), TypeError, "Use progress="),
        (lambda la: la(X), TypeError, r"Use la\.predict\(x\)"),
        (lambda la: la(X, pred_type="glm"), TypeError, r"Use la\.predict\(x\)"),
        (lambda la: la.optimize_prior_precision(), AttributeError, r"Use la\.tune\("),
        (lambda la: la.H, AttributeError, r"Use la\.posterior\.precision"),
        (lambda la: la.log_likelihood, AttributeError, r"la\.evaluate.*times -la\.num_data"),
        (lambda la: Laplace(MODEL, n_subset=10), TypeError, "inducing="),
        (lambda la: la.posterior_precision, AttributeError, r"Use la\.posterior\.precision"),
        (lambda la: la.state_dict(), AttributeError, r"Use la\.save\(path\)"),
        (lambda la: la.functional_variance(X), AttributeError, r"Use la\.functional\(x\)"),
        (lambda la: la.sigma_noise, AttributeError, r"la\.sigma"),
    ],
)
def test_names_of_laplace_torch_get_ours(la, call, error, ours):
    with pytest.raises(error, match=f"laplace-torch.*{ours}"):
        call(la)


def test_names_of_scikit_learn_get_ours(la):
    with pytest.raises(AttributeError, match=r"no predict_proba\. Use la\.predict\(x\)\.probs"):
        la.predict_proba(X)
    with pytest.raises(AttributeError, match=r"no predict_interval\. Use la\.marginals\(x\)\.icdf"):
        la.predict_interval(X)
    with pytest.raises(TypeError, match=r"'return_std'.*Use la\.predict\(x\)\.stddev"):
        la.predict(X, return_std=True)
    with pytest.raises(TypeError, match=r"'sample_weight'.*Use batches \(x, y, weights\)"):
        la.fit(DATA, sample_weight=torch.ones(len(X)))
    with pytest.raises(TypeError, match=r"'class_weights'.*Categorical\(class_weights=\.\.\.\)"):
        Laplace(MODEL, class_weights=torch.ones(3))


def test_the_equivalents_of_laplace_torch_exist(la):
    """The attributes and arguments that messages advise are there."""
    parameters = {
        name
        for function in (Laplace, Categorical, la.fit, la.predict, la.functional, la.tune_evidence)
        for name in inspect.signature(function).parameters
    }
    for advice in (*EQUIVALENTS.values(), *OTHER_NAMES.values()):
        for name in re.findall(r"(\w+)=", advice):
            assert name in parameters
        for name in re.findall(r"\bla\.(\w+)", advice):
            assert name == "sigma" or hasattr(la, name)


@pytest.mark.parametrize(
    "use",
    [
        lambda source: Laplace(MODEL).fit(source),
        lambda source: Laplace(MODEL).fit_batches(source),
        lambda source: Laplace(MODEL).fit(DATA).update(source),
        lambda source: Laplace(MODEL).plan(source),
        lambda source: Laplace(MODEL).fit(DATA).tune(source),
        lambda source: Laplace(MODEL).fit(DATA).evaluate(source),
        lambda source: Laplace(MODEL).fit(DATA).evaluate(DATA, {"other": source}),
        lambda source: Laplace(MODEL).fit(Split(DATA, source)),
        lambda source: Fisher(MODEL, nn.CrossEntropyLoss(), source),
        lambda source: KFAC(MODEL, nn.CrossEntropyLoss(), source),
    ],
)
@pytest.mark.parametrize(
    ("source", "advice"),
    [
        (X, r"a Tensor of shape .*DataLoader\(TensorDataset\(x, y\)"),
        (X.numpy(), r"a ndarray of shape .*\[\(x, y\)\]"),
        (TensorDataset(X, Y), r"yields single examples\. Pass .*DataLoader\(dataset, batch_size="),
    ],
    ids=["tensor", "array", "dataset"],
)
def test_examples_instead_of_batches(use, source, advice):
    with pytest.raises(TypeError, match=f"Data must be batches.*{advice}"):
        use(source)


def test_examples_and_targets_instead_of_batches():
    with pytest.raises(TypeError, match=r"Data must be batches .*\[\(x, y\)\]"):
        Laplace(MODEL).fit(X, Y)


@pytest.mark.parametrize(
    ("package", "extra", "use"),
    [
        ("pandas", "cli", lambda la: la.evaluate(DATA).to_frame()),
        ("matplotlib", "cli", lambda _: import_module("laplace_debias.report")),
        *(
            (
                extra,
                extra,
                lambda _, extra=extra: import_module(f"laplace_debias.integrations.{extra}"),
            )
            for extra in ("botorch", "lightning", "sklearn", "transformers")
        ),
    ],
)
def test_what_an_extra_installs_is_asked_for_by_its_name(la, monkeypatch, package, extra, use):
    for module in ("report", f"integrations.{extra}"):
        monkeypatch.delitem(sys.modules, f"laplace_debias.{module}", raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    expected = f"{package} is not installed. Run pip install 'laplace-debias[{extra}]'"
    with pytest.raises(ImportError, match=re.escape(expected)):
        use(la)


def test_the_exact_fisher_of_many_tokens_tells_of_a_cheaper_one():
    model = nn.Sequential(nn.Embedding(200, 2), nn.Linear(2, 200)).eval()
    tokens = torch.arange(12).reshape(2, 6)
    with pytest.warns(UserWarning, match=r"1,200 backward passes .*\"mc\""):
        Laplace(model).fit([(tokens, tokens)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Laplace(model, fisher="mc").fit([(tokens, tokens)])
        Laplace(model).fit([(tokens[:, :5], tokens[:, :5])])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("prior_prec", "Did you mean 'prior_precision'"),
        ("temprature", "Did you mean 'temperature'"),
        ("sigma_noise", "is a name of laplace-torch"),
        ("subset_of_weights", "is a name of laplace-torch"),
    ],
)
def test_a_misspelt_attribute_is_not_set(name, message):
    la = Laplace(nn.Linear(2, 3).eval())
    with pytest.raises(AttributeError, match=message):
        setattr(la, name, 0.5)
    la.note = "of the user"


def test_what_members_own_is_not_set_on_a_mixture():
    data = [(torch.randn(8, 2), torch.randint(3, (8,)))]
    mixture = Mixture([Laplace(nn.Linear(2, 3).eval()).fit(data)])
    with pytest.raises(AttributeError, match="Set `link` of each of its `members`"):
        mixture.link = "probit"


def test_the_settable_attributes_are_those_with_a_setter():
    settable = [name for name, value in vars(Laplace).items() if getattr(value, "fset", None)]
    assert sorted(SETTABLE) == sorted(settable)
