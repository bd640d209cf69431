"""The dimension of the outputs that has the classes (`class_dim`), and outputs without logits."""

import itertools
import warnings

import oracle
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.functional import hessian
from torch.utils.data import DataLoader, TensorDataset

from laplace_debias import Gaussian, Laplace

B = 6
C = 5
L = 5
DELTA = 0.8


def build(classes=C):
    torch.manual_seed(0)
    layers = nn.Conv1d(3, 4, 1), nn.Tanh(), nn.Conv1d(4, classes, 3)
    return nn.Sequential(*layers).double().eval()


def inputs(n=B):
    return torch.randn(n, 3, L + 2, generator=torch.Generator().manual_seed(1)).double()


def labels(n=B):
    return torch.randint(C, (n, L), generator=torch.Generator().manual_seed(2))


class Moved(nn.Module):
    """The same network with the classes last, as the package documents outputs."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(x).movedim(1, -1)


def posterior(la):
    return la.posterior.precision.to_dense()


def same(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12)


# ------------------------------------------------------------------------------------- asking


def test_where_both_readings_fit_the_user_is_asked():
    with pytest.raises(
        ValueError, match=r"class_dim=-1` to Laplace for .* `class_dim=1` for"
    ) as caught:
        Laplace(build()).fit_batches([(inputs(), labels())])
    assert "(6, 5, 5)" in str(caught.value)
    assert "(6, 5)" in str(caught.value)


def test_a_first_batch_of_another_length_tells_for_all():
    """Sequences of as many positions as classes come as a later batch."""
    model = Moved(build())
    x = inputs()
    y = labels()
    batches = [(x[:3, :, :-1], y[:3, :-1]), (x[3:], y[3:])]
    la = Laplace(model).fit_batches(batches)
    same(posterior(la), posterior(Laplace(model, class_dim=-1).fit_batches(batches)))
    Laplace(model).fit_batches(*[[batch] for batch in batches])
    with pytest.raises(ValueError, match="class_dim"):
        Laplace(model).fit_batches(batches[::-1])


def test_nobody_is_asked_where_one_reading_fits():
    x = inputs()[..., :-1]
    y = labels()[:, :-1]  # Four positions of five classes.
    Laplace(Moved(build())).fit_batches([(x, y)])
    with pytest.raises(ValueError, match="use class_dim=1"):
        Laplace(build()).fit_batches([(x, y)])
    Laplace(build(), class_dim=1).fit_batches([(x, y)])
    # An entry for every output: no softmax, and so no dimension of it.
    Laplace(build(), "regression").fit_batches([(inputs(), inputs()[:, :1, 2:].expand(B, C, L))])
    Laplace(build(1), "binary", class_dim=1).fit_batches([(inputs()[..., :3], labels()[:, :1] % 2)])
    images = nn.Sequential(nn.Conv2d(3, 4, 1)).double().eval()
    x = torch.randn(2, 3, 4, 4).double()
    with pytest.raises(ValueError, match="class_dim"):
        Laplace(images).fit_batches([(x, torch.randint(4, (2, 4, 4)))])
    with pytest.raises(ValueError, match="do not match"):
        Laplace(images).fit_batches([(x[..., :3], torch.randint(4, (2, 4, 3)))])


# --------------------------------------------------------------------------------- oracles


def dense_ggn(model, x, loss):
    """Σ_n Jᵀ ∇² ℓ_n J from torch's own channel-first loss, one example at a time, `[D, D]`."""
    f = model(x).detach()
    H = [hessian(lambda o, n=n: loss(o, n), f[n : n + 1]) for n in range(len(x))]
    J = oracle.flat_jacobian(model, x, [name for name, _ in model.named_parameters()])
    return torch.einsum("nid,nij,nje->de", J, torch.stack(H).view(len(x), J.shape[1], -1), J)


@pytest.mark.parametrize("curvature", ["full", "diag"])
def test_a_channel_first_fit_is_the_ggn_of_the_channel_first_loss(curvature):
    model = build()
    x = inputs()
    y = labels()
    y[0, 2] = -100
    y[3, 4] = -100
    la = Laplace(model, curvature=curvature, class_dim=1, prior_precision=DELTA)
    la.fit_batches([(x[:4], y[:4]), (x[4:], y[4:])])
    C_sum = dense_ggn(model, x, lambda f, n: F.cross_entropy(f, y[n : n + 1], reduction="sum"))
    expected = C_sum + DELTA * torch.eye(len(C_sum)).double()
    actual = posterior(la)
    if curvature == "diag":
        actual = actual.diagonal()
        expected = expected.diagonal()
    same(actual, expected)
    nll = F.cross_entropy(model(x), y, reduction="sum").item()
    assert la.fitted.nll == pytest.approx(nll, rel=1e-12)


def test_predictions_have_the_classes_last():
    """Mean, covariance and the probit predictive by dense Jacobians, written out."""
    model = build()
    x = inputs()
    y = labels()
    la = Laplace(model, curvature="full", class_dim=1, prior_precision=DELTA)
    la.fit_batches([(x, y)])
    f = model(x).detach().transpose(1, 2)
    names = [f"model.{name}" for name, _ in model.named_parameters()]
    J = oracle.flat_jacobian(Moved(model), x, names)
    covariance = J @ torch.linalg.inv(posterior(la)) @ J.mT
    same(la.functional(x)[0], f)
    same(la.functional(x)[1], covariance)
    variances = covariance.diagonal(dim1=1, dim2=2).view(B, L, C)
    same(la.functional(x, diagonal=True)[1], variances)
    probs = (f / (1 + torch.pi / 8 * variances).sqrt()).softmax(-1)
    same(la.predict(x).probs, probs)
    same(la.predict(x, method="map").probs, model(x).detach().softmax(1).transpose(1, 2))
    nll = -probs.log().gather(-1, y[..., None]).mean().item()
    assert la.evaluate([(x, y)])["nll"] == pytest.approx(nll, rel=1e-6)


@pytest.mark.parametrize(
    ("curvature", "mode"),
    [
        *itertools.product(("kfac", "ekfac", "lowrank"), ("full", "mini", "debiased")),
        ("kfac", "crossfit"),
    ],
)
def test_everything_is_as_if_the_model_moved_them(curvature, mode):
    model = build()
    data = TensorDataset(inputs(16), labels(16))
    loader = DataLoader(data, batch_size=8)
    first = Laplace(model, curvature=curvature, class_dim=1).fit(loader, mode=mode)
    last = Laplace(Moved(model), curvature=curvature, class_dim=-1).fit(loader, mode=mode)
    same(posterior(first), posterior(last))
    same(first.log_marginal_likelihood(), last.log_marginal_likelihood())
    x = inputs(3)
    for actual, expected in zip(first.functional(x), last.functional(x), strict=True):
        same(actual, expected)


@pytest.mark.parametrize("method", ["glm", "glm-mc", "nn", "map"])
def test_every_prediction_is_as_if_the_model_moved_them(method):
    model = build()
    x = inputs()
    first = Laplace(model, class_dim=1).fit_batches([(inputs(), labels())])
    last = Laplace(Moved(model), class_dim=-1).fit_batches([(inputs(), labels())])
    for samples in (None,) if method == "map" else (None, 7):
        draws = [
            la.predict(x, method, samples, torch.Generator().manual_seed(3)).probs
            for la in (first, last)
        ]
        assert draws[0].shape == (B, L, C)
        same(*draws)
    same(first.functional(x, outputs=3)[1], last.functional(x, outputs=3)[1])


def test_tuning_evaluation_and_files_are_too(tmp_path):
    model = build()
    data = [(inputs(), labels())]
    first = Laplace(model, class_dim=1).fit_batches(data)
    last = Laplace(Moved(model), class_dim=-1).fit_batches(data)
    same(posterior(first), posterior(last))
    held_out = [(inputs(9), labels(9))]
    for metric in ("nll", "brier"):
        tables = [la.tune(held_out, metric=metric).table for la in (first, last)]
        assert [row[metric] for row in tables[0]] == pytest.approx(
            [row[metric] for row in tables[1]], rel=1e-9
        )
    assert first.evaluate(held_out) == pytest.approx(last.evaluate(held_out), rel=1e-9)
    first.save(tmp_path / "posterior.safetensors")
    loaded = Laplace.load(tmp_path / "posterior.safetensors", model)
    same(loaded.predict(inputs()).probs, last.predict(inputs()).probs)
    again = Laplace(model, class_dim=1, prior_precision=loaded.prior_precision)
    same(posterior(loaded.fit_batches(data)), posterior(again.fit_batches(data)))


def test_targets_of_regression_are_moved_with_the_outputs():
    model = build(2)
    x = inputs()
    y = torch.randn(B, 2, L, generator=torch.Generator().manual_seed(5)).double()
    sigma = torch.tensor([0.5, 2.0]).double()
    la = Laplace(model, "regression", "full", sigma=sigma, class_dim=1, prior_precision=DELTA)
    la.fit_batches([(x, y)])
    noise = sigma[None, :, None]
    C_sum = dense_ggn(model, x, lambda f, n: 0.5 * ((f - y[n : n + 1]) / noise).square().sum())
    same(posterior(la), C_sum + DELTA * torch.eye(len(C_sum)).double())
    last = Laplace(Moved(model), "regression", "full", sigma=sigma, prior_precision=DELTA)
    last.fit_batches([(x, y.mT)])
    assert la.evaluate([(x, y)]) == pytest.approx(last.evaluate([(x, y.mT)]), rel=1e-9)
    assert la.tune([(x, y)]).value == pytest.approx(last.tune([(x, y.mT)]).value, rel=1e-9)


@pytest.mark.parametrize("with_channel", [True, False])
def test_a_binary_map_takes_targets_with_or_without_its_channel(with_channel):
    model = build(1)
    x = inputs()
    y = labels() % 2
    targets = y[:, None] if with_channel else y
    la = Laplace(model, "binary", "full", class_dim=1, prior_precision=DELTA)
    la.fit_batches([(x, targets)])

    def loss(f, n):
        return F.binary_cross_entropy_with_logits(f[:, 0], y[n : n + 1].double(), reduction="sum")

    C_sum = dense_ggn(model, x, loss)
    same(posterior(la), C_sum + DELTA * torch.eye(len(C_sum)).double())
    assert la.predict(x).probs.shape == (B, L)
    report = la.evaluate([(x, targets)])
    probs = la.predict(x).probs
    nll = F.binary_cross_entropy(probs, y.double()).item()
    assert report["nll"] == pytest.approx(nll, rel=1e-6)


def test_images_and_a_model_that_is_one_layer():
    torch.manual_seed(0)
    model = nn.Conv2d(3, 4, 1).double().eval()
    x = torch.randn(3, 3, 4, 4).double()
    y = torch.randint(4, (3, 4, 4))
    first = Laplace(model, class_dim=1).fit_batches([(x, y)])
    last = Laplace(Moved(model), class_dim=-1).fit_batches([(x, y)])
    same(posterior(first), posterior(last))
    assert first.predict(x).probs.shape == (3, 4, 4, 4)
    same(first.predict(x).probs, last.predict(x).probs)
    assert not model._forward_hooks
    same(posterior(Laplace(model, class_dim=-3).fit_batches([(x, y)])), posterior(first))


# ------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("class_dim", "error", "says"),
    [
        (0, ValueError, "dimension of the examples"),
        (True, TypeError, "class_dim must be a whole number"),
        ("1", TypeError, "class_dim must be a whole number"),
    ],
)
def test_what_is_no_dimension_of_classes_is_refused(class_dim, error, says, unchecked):
    with pytest.raises(error, match=says):
        Laplace(build(), class_dim=class_dim)


@pytest.mark.parametrize("class_dim", [3, -3, -4])
def test_a_dimension_that_the_outputs_do_not_have_is_refused(class_dim):
    with pytest.raises(
        ValueError, match=rf"class_dim={class_dim}` must be a dimension .* shape \[batch, 5, 5\]"
    ):
        Laplace(build(), class_dim=class_dim).fit_batches([(inputs(), labels())])


def test_backpack_and_another_layout_are_refused():
    with pytest.raises(NotImplementedError, match=r"class_dim=.* `backend=.hooks"):
        Laplace(build(), class_dim=1, backend="backpack")


# ------------------------------------------------------------------------------- probabilities


def classifier(*last):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), *last).eval()


X = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
Y = torch.arange(6) % 3
WARNING = "outputs are probabilities.*Remove the softmax.*log-probabilities"


def test_probabilities_are_told_from_logits_at_the_fit():
    la = Laplace(classifier(nn.Softmax(1)))
    with pytest.warns(UserWarning, match=WARNING) as caught:
        la.fit_batches([(X[:3], Y[:3]), (X[3:], Y[3:])])
    assert sum("probabilities" in str(w.message) for w in caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        la.predict(X)
        la.functional(X)


def test_probabilities_in_other_layouts_and_precisions_are_told_too():
    half = classifier(nn.Softmax(1))
    half.register_forward_hook(lambda module, args, p: p.bfloat16().float())
    with pytest.warns(UserWarning, match=WARNING):
        Laplace(half).fit_batches([(X, Y)])
    with pytest.warns(UserWarning, match=WARNING):
        Laplace(build().append(nn.Softmax(1)), class_dim=1).fit_batches([(inputs(), labels())])


@pytest.mark.parametrize(
    ("likelihood", "y"), [("binary", Y % 2), ("multilabel", (Y % 2)[:, None].float())]
)
def test_a_sigmoid_before_a_likelihood_of_logits_is_told(likelihood, y):
    model = nn.Sequential(nn.Linear(4, 1), nn.Sigmoid()).eval()
    with pytest.warns(UserWarning, match=r"ends with a sigmoid.*Remove the sigmoid"):
        Laplace(model, likelihood).fit([(X, y)])
    for function in (torch.sigmoid, lambda p: p.sigmoid()[:, None].squeeze(1)):
        calls_sigmoid = nn.Sequential(nn.Linear(4, 1), Function(function)).eval()
        with pytest.warns(UserWarning, match=r"ends with a sigmoid.*Remove the sigmoid"):
            Laplace(calls_sigmoid, likelihood).fit([(X, y)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Laplace(model[:1], likelihood).fit([(X, y)])


def with_spread(function):
    """Return a function that keeps the first output, and applies a function to the second."""
    return lambda f: torch.cat([f[:, :1], function(f[:, 1:])], -1)


@pytest.mark.parametrize(
    ("likelihood", "right", "wrong"),
    [
        ("poisson", [torch.square, lambda f: f.exp().log()], [torch.exp, F.softplus]),
        (
            "heteroscedastic",
            [with_spread(torch.square), with_spread(lambda s: F.softplus(s).log())],
            [
                with_spread(F.softplus),
                with_spread(lambda s: 1e-6 + F.softplus(s)),
                lambda f: torch.stack([f[:, 0], f[:, 1].exp()], -1),
            ],
        ),
    ],
)
def test_a_positive_function_before_a_likelihood_of_logarithms_is_told(likelihood, right, wrong):
    y = Y[:, None].double().expand(-1, 2 if likelihood == "poisson" else 1)
    layer = nn.Linear(4, 2)
    for function in wrong:
        with pytest.warns(UserWarning, match=r"ends with a softplus or an exponential.*log"):
            Laplace(nn.Sequential(layer, Function(function)).eval(), likelihood).fit([(X, y)])
    for function in (lambda f: f, *right):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            Laplace(nn.Sequential(layer, Function(function)).eval(), likelihood).fit([(X, y)])


class Shift(nn.Module):
    """Numbers that sum to 1, one of them negative."""

    def forward(self, x):
        p = x.softmax(-1)
        return p + torch.tensor([-1.0, 0.5, 0.5])


class Function(nn.Module):
    """A function in the forward pass."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


class One(nn.Module):
    def forward(self, x):
        return x.sigmoid().mean(1, keepdim=True)


@pytest.mark.parametrize(
    ("model", "likelihood", "batch"),
    [
        (classifier(), "classification", (X, Y)),
        (classifier(nn.LogSoftmax(1)), "classification", (X, Y)),
        (classifier(nn.Sigmoid()), "classification", (X, Y)),
        (classifier(Shift()), "classification", (X, Y)),
        (classifier(nn.Softmax(1)), "classification", (X[:1], Y[:1])),
        (classifier(nn.Softmax(1)), Gaussian(1.0), (X, X[:, :3])),
        (classifier(One()), "binary", (X, Y % 2)),
        # A softmax over positions is none over classes.
        (build().append(nn.Softmax(2)), "classification", (inputs(), labels())),
    ],
    ids=[
        "logits",
        "log",
        "sigmoid",
        "negative",
        "one example",
        "regression",
        "binary",
        "positions",
    ],
)
def test_other_outputs_are_not_taken_for_probabilities(model, likelihood, batch):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        Laplace(model, likelihood, class_dim=1).fit_batches([batch])
