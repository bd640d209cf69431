"""The front-end's contract: predictives, tuning, files, bad input, and the model left alone."""

import pytest
import torch
from cases import one_axis_at_a_time
from conformance import fingerprint, is_same
from torch import nn
from torch.distributions import Bernoulli, Categorical, MultivariateNormal
from torch.utils.data import DataLoader, TensorDataset

from laplace_debias import Laplace


def network(inplace=False):
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.ReLU(inplace=inplace),
        nn.Conv2d(4, 6, 3, stride=2),
        nn.GELU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, 3),
    ).eval()


@pytest.fixture
def model():
    return network()


@pytest.fixture
def loader():
    data = TensorDataset(torch.randn(24, 1, 8, 8), torch.randint(3, (24,)))
    return DataLoader(data, batch_size=8)


@pytest.fixture
def fitted(model, loader):
    return Laplace(model).fit(loader, mode="debiased")


def snapshot(model):
    """Everything about a model that must not change."""
    state = fingerprint(model)
    for path, module in model.named_modules():
        state["inplace", path] = getattr(module, "inplace", None)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        state["version", name] = tensor.data_ptr(), tensor._version, sorted(vars(tensor))
    return state


# ------------------------------------------------------------------ the model is left alone


@pytest.mark.parametrize(
    ("backend", "curvature"), one_axis_at_a_time(["backpack", "hooks"], ["kfac", "ekfac"])
)
def test_the_model_and_its_inputs_are_untouched(loader, backend, curvature):
    model = nn.Sequential(nn.SiLU(inplace=True), *network(inplace=True))
    model[1].weight.requires_grad_(False)
    model(torch.randn(2, 1, 8, 8)).sum().backward()
    if backend == "hooks":
        model[7].register_forward_hook(lambda *_: None)
    state_before = snapshot(model)
    la = Laplace(model, curvature=curvature, backend=backend)
    for mode in ("full", "mini", "debiased", "crossfit"):
        la.fit(loader, mode=mode)
    x = torch.randn(4, 1, 8, 8)
    for method in ("glm", "glm-mc", "nn", "map"):
        la.predict(x, method=method, samples=None if method == "map" else 3)
    la.tune(loader, grid=torch.tensor([0.1, 1.0]))
    la.tune(method="marglik")
    la.evaluate(loader, ood={"noise": loader})
    assert (is_same(snapshot(model), state_before), x._version) == (True, 0)


@pytest.mark.parametrize("backend", ["backpack", "hooks"])
def test_the_model_and_the_old_fit_survive_an_exception(model, loader, backend):
    la = Laplace(model, backend=backend).fit(loader)
    state_before = snapshot(model)
    posterior = la.posterior
    good = next(iter(loader))
    for bad in (
        (good[0], torch.full((8,), 3)),
        (good[0] * float("nan"), good[1]),
        (torch.randn(8, 2, 8, 8), good[1]),
    ):
        with pytest.raises((ValueError, RuntimeError)):
            la.fit_batches([good, bad], num_data=24)
        with pytest.raises((ValueError, RuntimeError)):
            la.fit_batches([good], [bad], num_data=24)
        assert is_same(snapshot(model), state_before)
        assert la.posterior is posterior
    with pytest.raises(ValueError, match="NaN"):
        la.predict(good[0] * float("nan"))
    assert is_same(snapshot(model), state_before)


def test_backpack_keeps_no_trace(model, loader):
    from backpack.context import CTX

    hooks_before = (len(CTX.hook_handles), CTX.get_active_exts())
    la = Laplace(model, backend="backpack").fit(loader)
    with pytest.raises(ValueError, match="labels"):
        la.fit_batches([(torch.randn(2, 1, 8, 8), torch.tensor([0, 9]))])
    assert (len(CTX.hook_handles), CTX.get_active_exts()) == hooks_before


# -------------------------------------------------------------------------- predictives


def test_predictives_of_each_likelihood(loader):
    x = torch.randn(5, 1, 8, 8)
    cases = [
        ("classification", 3, torch.randint(3, (24,)), Categorical),
        ("binary", 1, torch.randint(2, (24,)), Bernoulli),
        ("regression", 2, torch.randn(24, 2), MultivariateNormal),
    ]
    for likelihood, outputs, y, kind in cases:
        model = network()
        model[6] = nn.Linear(6, outputs)
        data = [(torch.randn(24, 1, 8, 8), y)]
        la = Laplace(model, likelihood).fit_batches(data)
        for method in ("glm", "glm-mc", "nn", "map"):
            predicted = la.predict(x, method=method)
            assert isinstance(predicted, kind)
            assert predicted.batch_shape == (5,)
            assert predicted.log_prob(predicted.sample()).isfinite().all()
            assert predicted.entropy().shape == (5,)
        certain = la.predict(x, "map").entropy()
        uncertain = la.predict(x).entropy()
        assert (uncertain >= certain - 1e-6).all()
        assert uncertain.sum() > certain.sum()


def test_a_huge_prior_precision_gives_the_trained_network(fitted):
    x = torch.randn(4, 1, 8, 8)
    fitted.prior_precision = 1e12
    torch.testing.assert_close(
        fitted.predict(x).probs, fitted.predict(x, "map").probs, atol=1e-5, rtol=0
    )


def test_prior_precisions_by_block_match_the_scalar_and_act_on_their_block(fitted):
    x = torch.randn(4, 1, 8, 8)
    _, scalar = fitted.functional(x)
    fitted.prior_precision = torch.ones(len(fitted.block_names))
    torch.testing.assert_close(fitted.functional(x)[1], scalar)
    deltas = torch.ones(len(fitted.block_names))
    deltas[-1] = 1e12
    fitted.prior_precision = deltas
    assert fitted.sample(50)[:, -3:].std(0).max() < 1e-4
    assert (
        fitted.functional(x)[1].diagonal(dim1=1, dim2=2) < scalar.diagonal(dim1=1, dim2=2)
    ).all()


# ----------------------------------------------------------------- tuning and evaluation


# ------------------------------------------------------------------------------- on disk


def test_a_saved_file_is_as_readable_as_any_other(fitted, tmp_path):
    (tmp_path / "any").touch()
    fitted.save(tmp_path / "posterior")
    assert (tmp_path / "posterior").stat().st_mode == (tmp_path / "any").stat().st_mode
    fitted.save(tmp_path / "posterior")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["any", "posterior"]


@pytest.mark.parametrize("mode", ["full", "mini", "debiased", "crossfit"])
@pytest.mark.parametrize("curvature", ["kfac", "ekfac", "diag", "lowrank", "full"])
def test_a_loaded_posterior_gives_the_bits_of_the_one_in_memory(
    curvature, mode, model, loader, tmp_path
):
    la = Laplace(model, curvature=curvature).fit(loader, mode=mode)
    la.save(tmp_path / "posterior")
    loaded = Laplace.load(tmp_path / "posterior", model)
    x = torch.randn(4, 1, 8, 8)
    samples = [
        posterior.sample(2, generator=torch.Generator().manual_seed(0))
        for posterior in (la, loaded)
    ]
    assert torch.equal(loaded.predict(x).probs, la.predict(x).probs)
    assert torch.equal(loaded.log_marginal_likelihood(), la.log_marginal_likelihood())
    assert torch.equal(*samples)


def test_files_of_other_models_are_refused(fitted, model, tmp_path):
    path = tmp_path / "la"
    fitted.save(path)
    with pytest.raises(FileNotFoundError):
        Laplace.load(tmp_path / "nothing", model)
    other_model = network()
    with pytest.raises(ValueError, match="since the fit: its parameters differ"):
        Laplace.load(path, other_model)
    other_model[6] = nn.Linear(6, 4)
    with pytest.raises(ValueError, match=r"283 parameters, but .* of the model have 290"):
        Laplace.load(path, other_model)
    with pytest.raises(ValueError, match=r"but the model does not have them\. Its parameters are"):
        Laplace.load(path, nn.Sequential(nn.Linear(3, 3)).eval())
    with pytest.raises(ValueError, match=r"in torch\.float32, but the model is in torch\.float64"):
        Laplace.load(path, model.double())


# ------------------------------------------------------------------------------ bad input

pytest_unchecked = pytest.mark.usefixtures("unchecked")


@pytest_unchecked
@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"likelihood": "gamma"}, ValueError, "'classification', 'regression', 'heteroscedastic'"),
        ({"curvature": "kfra"}, ValueError, "kfac, ekfac"),
        ({"params": "biases"}, ValueError, "'all', 'weights', 'supported', 'last_layer'"),
        ({"params": ["9.weight"]}, ValueError, "0.weight"),
        ({"params": lambda name, p: False}, ValueError, "selects no parameter"),
        ({"params": 3}, TypeError, "`params` must be"),
        ({"params": nn.Linear(2, 2)}, TypeError, r"got a module \(Linear\). Pass the names"),
        ({"backend": "autograd"}, ValueError, "'auto', 'backpack' or 'hooks'"),
        ({"fisher": "true"}, ValueError, "exact, mc, signs, empirical"),
        ({"fisher": "mc", "mc_samples": 0}, ValueError, "at least 1"),
        ({"mc_samples": 4}, ValueError, 'applies only to `fisher="mc"`'),
        ({"prior_precision": 0.0}, ValueError, "positive"),
        ({"prior_precision": -1.0}, ValueError, "positive"),
        ({"prior_precision": float("nan")}, ValueError, "positive"),
        ({"prior_precision": torch.ones(2)}, ValueError, "6 blocks"),
        ({"sigma": 1.0}, ValueError, 'applies only to `likelihood="regression"'),
        ({"factor_dtype": torch.int32}, ValueError, "float64"),
        ({"memory_bound": 0}, ValueError, "at least 1"),
    ],
)
def test_unknown_options_are_refused_at_once(model, options, error, says):
    with pytest.raises(error, match=says):
        Laplace(model, **options)


@pytest_unchecked
@pytest.mark.parametrize(
    ("layer", "error", "says"),
    [
        (nn.Dropout(0.1).train(), ValueError, r"7 \(Dropout\).*eval mode"),
        (nn.BatchNorm1d(3).train(), ValueError, r"7 \(BatchNorm1d\).*eval mode"),
        (nn.BatchNorm1d(3, track_running_stats=False), ValueError, "track_running_stats"),
    ],
)
def test_layers_that_cannot_be_handled_are_named(model, layer, error, says):
    model.append(layer)
    with pytest.raises(error, match=says):
        Laplace(model)


def test_frozen_layers_of_any_kind_are_passed_through(model, loader):
    model.append(nn.PReLU().requires_grad_(False).eval())
    for backend in ("backpack", "hooks"):
        la = Laplace(model, backend=backend).fit(loader)
        assert la.param_names[-1] == "6.bias"


def test_backpack_refuses_what_it_would_get_wrong():
    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x):
            return x + self.layer(x)

    model = nn.Sequential(Residual(), nn.Linear(3, 2)).eval()
    with pytest.raises(NotImplementedError, match=r"0 \(Residual\) has its own forward pass"):
        Laplace(model, backend="backpack")
    x = torch.randn(4, 3)
    y = torch.randint(2, (4,))
    la = Laplace(model).fit_batches([(x, y)])
    assert la.block_names == ["0.layer.weight", "0.layer.bias", "1.weight", "1.bias"]


def test_nan_parameters_are_refused_by_name(model, loader):
    la = Laplace(model)
    with torch.no_grad():
        model[2].bias[0] = torch.nan
    with pytest.raises(ValueError, match=r"2\.bias contains NaN"):
        la.fit(loader)
    with pytest.raises(ValueError, match=r"2\.bias contains NaN"):
        Laplace(model)


@pytest_unchecked
@pytest.mark.parametrize(
    ("batches", "error", "says"),
    [
        ([], ValueError, "no example"),
        ([(torch.randn(4, 1, 8, 8), torch.tensor([0, 1, 2, 3]))], ValueError, "between 0 and 2"),
        ([(torch.randn(4, 1, 8, 8), torch.rand(4))], TypeError, "integers"),
        ([(torch.randn(4, 1, 8, 8), torch.zeros(3, dtype=torch.long))], ValueError, "4 inputs"),
        ([torch.randn(4, 1, 8, 8)], TypeError, "pairs"),
        ([(torch.randn(4, 1, 8, 8), [0, 1, 2, 0])], TypeError, r"got list\. .*as_tensor"),
        ([(torch.randn(1, 8, 8), 2)], TypeError, r"one number, 2, .* Pass a DataLoader"),
        ([(torch.randn(4, 1, 8, 8).double(), torch.zeros(4).long())], TypeError, "float64"),
        ([(torch.full((4, 1, 8, 8), torch.inf), torch.zeros(4).long())], ValueError, "NaN or Inf"),
    ],
)
def test_bad_batches_are_refused(model, batches, error, says):
    la = Laplace(model)
    with pytest.raises(error, match=says):
        la.fit_batches(batches, num_data=10)
    with pytest.raises(RuntimeError, match="not fitted"):
        la.posterior


def test_outputs_of_the_wrong_rank_are_refused(loader):
    no_outputs = nn.Sequential(nn.Conv2d(1, 1, 8), nn.Flatten(0)).eval()
    with pytest.raises(ValueError, match="needs at least two outputs, but the model has one"):
        Laplace(no_outputs).fit(loader)
    channels_second = nn.Sequential(nn.Conv2d(1, 3, 3)).eval()
    with pytest.raises(ValueError, match=r"movedim\(1, -1\)"):
        Laplace(channels_second).fit(loader)


@pytest_unchecked
def test_fit_needs_what_its_mode_needs(model, loader):
    la = Laplace(model)
    one_batch = DataLoader(loader.dataset, batch_size=24)
    with pytest.raises(ValueError, match="needs 2 batches, but the loader has 1"):
        la.fit(one_batch, mode="debiased")
    with pytest.raises(ValueError, match="full, mini, debiased, crossfit"):
        la.fit(loader, mode="half")
    with pytest.raises(ValueError, match="Pass `num_data"):
        la.fit(list(loader), mode="mini")
    with pytest.raises(ValueError, match="at least 1"):
        la.fit(loader, num_data=0)
    with pytest.raises(TypeError, match="only once"):
        Laplace(model, curvature="ekfac").fit(iter(loader))
    assert la.fit(list(loader)).num_data == 24
    assert la.fit(loader, mode="mini").num_data == 24
    assert la.fit(loader, mode="mini", num_data=1000).num_data == 1000


@pytest_unchecked
def test_nothing_works_before_a_fit(model, loader):
    la = Laplace(model)
    x = torch.randn(2, 1, 8, 8)
    for call in (
        lambda: la.predict(x),
        lambda: la.functional(x),
        lambda: la.sample(1),
        lambda: la.mean,
        la.log_marginal_likelihood,
        lambda: la.tune(loader),
        lambda: la.evaluate(loader),
        lambda: la.save("nowhere"),
    ):
        with pytest.raises(RuntimeError, match="Call `fit"):
            call()


@pytest_unchecked
def test_bad_arguments_after_the_fit_change_nothing(fitted, loader):
    x = torch.randn(2, 1, 8, 8)
    for value in (0.0, -1.0, float("inf"), torch.ones(2, 2)):
        with pytest.raises(ValueError, match="prior precision"):
            fitted.prior_precision = value
    assert fitted.prior_precision.item() == 1.0
    for call, says in (
        (lambda: fitted.predict(x, "laplace"), "glm, glm-mc, nn, map"),
        (lambda: fitted.predict(x, "map", samples=3), '"map" and "temperature" use none'),
        (lambda: fitted.predict(x, samples=0), "samples must be at least 1"),
        (lambda: fitted.predict(x[:0]), "at least one example"),
        (lambda: fitted.sample(0), "at least 1"),
        (lambda: fitted.tune(loader, metric="f1"), "Use one of brier, nll"),
        (lambda: fitted.tune(loader, grid=torch.tensor([])), "grid"),
        (lambda: fitted.tune(loader, grid=torch.tensor([0.0, 1.0])), "grid"),
        (fitted.tune, "needs held-out data"),
        (lambda: fitted.tune(method="cv"), "'grid' or 'marglik'"),
        (lambda: fitted.tune(loader, method="marglik"), "does not use `loader`"),
        (lambda: fitted.tune(metric="brier", method="marglik"), "does not use `metric`"),
        (lambda: fitted.tune(progress=True, method="marglik"), "progress"),
        (lambda: fitted.tune([(loader.dataset[0][0][None], torch.tensor([7]))]), "between 0 and 2"),
        (
            lambda: fitted.evaluate([(loader.dataset[0][0][None], torch.tensor([7]))]),
            "between 0 and 2",
        ),
        (lambda: fitted.tune([]), "no batch"),
        (lambda: fitted.evaluate([]), "no batch"),
        (lambda: fitted.evaluate(loader, ood={"empty": []}), "empty"),
    ):
        with pytest.raises(ValueError, match=says):
            call()
    assert fitted.prior_precision.item() == 1.0
