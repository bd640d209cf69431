"""A single output: `[B]` and `[B, 1]` mean the same, for outputs and for targets."""

from functools import partial

import numpy as np
import oracle
import pytest
import torch
import user_files
from oracle import close
from torch import nn

from laplace_debias import Bernoulli, Gaussian, HeteroscedasticGaussian, Laplace, MultiLabel
from laplace_debias.cli import main
from laplace_debias.curvature import GGN, KFAC, EmpiricalFisher, Fisher, Hessian, Jacobian
from laplace_debias.quadratic import Quadratic

N = 10
DELTA = 0.7
SIGMA = 0.5


class Squeezed(nn.Module):
    """A regressor that returns `[B]`."""

    def __init__(self, columns):
        super().__init__()
        self.columns = columns

    def forward(self, x):
        return self.columns(x).squeeze(-1)


def columns():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double().eval()


def flattened():
    """A sequential network that returns `[B]`, which BackPACK takes."""
    return nn.Sequential(*columns(), nn.Flatten(0)).eval()


MODELS = {
    "[B, 1]": columns,
    "[B]": lambda: Squeezed(columns()),
    "[B] of a sequence": flattened,
}
SHAPES = ("[B]", "[B, 1]")


def examples(shape, is_label=False):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(N, 3, generator=generator, dtype=torch.float64)
    y = torch.randn(N, generator=generator, dtype=torch.float64)
    if is_label:
        y = (y > 0).double()
    if shape == "[B, 1]":
        y = y[:, None]
    return x, y


def every_name(model):
    return [name for name, _ in model.named_parameters()]


@pytest.mark.parametrize("curvature", ["full", "kfac", "ekfac", "diag", "lowrank"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("model", MODELS)
def test_a_regression_is_the_dense_one(model, shape, curvature):
    network = MODELS[model]()
    x, y = examples(shape)
    options = {"rank": 30} if curvature == "lowrank" else {}
    la = Laplace(
        network, "regression", curvature, sigma=SIGMA, prior_precision=DELTA, **options
    ).fit_batches([(x[:4], y[:4]), (x[4:], y[4:])])
    # The same network with outputs [B, 1], and targets [B, 1], by the equations.
    plain = columns()
    names = every_name(columns())
    residuals = (plain(x)[:, 0] - y.reshape(-1)).detach()
    nll = (0.5 * (residuals / SIGMA) ** 2 + np.log(SIGMA) + 0.5 * np.log(2 * np.pi)).sum()
    theta = oracle.flat_parameters(plain, names)
    P = la.posterior.precision.to_dense()
    evidence = oracle.log_marginal_likelihood(nll, theta, P, torch.full_like(theta, DELTA))
    close(la.log_marginal_likelihood(), evidence)
    J = oracle.flat_jacobian(plain, x, names)
    if curvature in ("full", "lowrank"):
        C = oracle.ggn(plain, x, "regression", names, SIGMA)
        close(P, N * C + DELTA * torch.eye(len(C)).double())
    mean, covariance = la.functional(x)
    close(mean, plain(x).detach())
    close(covariance, oracle.functional_covariance(J, torch.linalg.inv(P)))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("method", ["glm", "glm-mc", "nn", "map"])
def test_predictions_and_metrics_do_not_depend_on_the_shape(model, shape, method):
    x, y = examples(shape)
    samples = None if method in ("glm", "map") else 20
    results = []
    for network, targets in ((columns(), y.reshape(-1, 1)), (MODELS[model](), y)):
        la = Laplace(network, "regression", sigma=SIGMA).fit_batches([(x, targets)])
        generator = torch.Generator().manual_seed(2)
        predictive = la.predict(x, method, samples, generator)
        report = la.evaluate([(x, targets)], None, method, samples, generator.manual_seed(2))
        results.append((predictive.mean, predictive.variance, dict(report)))
    mean, variance, report = results[0]
    actual_mean, actual_variance, actual_report = results[1]
    assert actual_mean.shape == (N, 1)
    close(actual_mean, mean)
    close(actual_variance, variance)
    assert actual_report == pytest.approx(report, rel=1e-9)
    assert abs(report["rmse"] - (mean - y.reshape(-1, 1)).square().mean().sqrt()) < 1e-12


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    "likelihood", [Bernoulli(2.0), MultiLabel(), MultiLabel(-1, [0.5], 2.0)], ids=str
)
def test_single_labels(model, shape, likelihood):
    x, y = examples(shape, is_label=True)
    la = Laplace(MODELS[model](), likelihood, "full", prior_precision=DELTA)
    la.fit_batches([(x, y)])
    plain = columns()
    labels = y.reshape(-1)
    p = plain(x)[:, 0].sigmoid().detach()
    if isinstance(likelihood, Bernoulli):
        omega = 1 + labels
    elif likelihood.label_weights is None:
        omega = torch.ones_like(labels)
    else:
        omega = 0.5 * (1 + labels)
    J = oracle.flat_jacobian(plain, x, every_name(plain))[:, 0]
    C = torch.einsum("n,ni,nj->ij", omega * p * (1 - p), J, J)
    close(la.posterior.precision.to_dense(), C + DELTA * torch.eye(len(C)).double())
    report = la.evaluate([(x, y)])
    probs = la.predict(x).mean.reshape(-1)
    nll = -torch.where(labels == 1, probs, 1 - probs).log().mean()
    assert float(report["nll"]) == pytest.approx(float(nll), rel=1e-9)
    assert 0 < la.tune([(x, y)]).value < nll + 1


def test_labels_of_a_single_output_can_be_ignored():
    x, y = examples("[B]", is_label=True)
    ignored = torch.cat([y, torch.full((3,), -1.0).double()])
    x_with_ignored = torch.cat([x, x[:3]])
    las = [
        Laplace(Squeezed(columns()), MultiLabel(-1), "full").fit_batches([data], num_data=N)
        for data in ((x, y), (x_with_ignored, ignored))
    ]
    C, C_with_ignored = (la.posterior.curvature.to_dense() for la in las)
    close(C_with_ignored * (N + 3), C * N)


def test_positions_with_a_single_output():
    torch.manual_seed(0)
    layer = nn.Linear(3, 1).double()
    x = torch.randn(5, 4, 3).double()
    y = torch.randn(5, 4).double()
    precisions = [
        Laplace(layer, "regression", "full", sigma=SIGMA)
        .fit_batches([(x, targets)])
        .posterior.precision.to_dense()
        for targets in (y, y[..., None])
    ]
    J = torch.cat([x, torch.ones(5, 4, 1).double()], -1).flatten(0, 1)
    close(precisions[0], J.mT @ J / SIGMA**2 + torch.eye(4).double())
    close(precisions[0], precisions[1])


def dense_operators(x, y):
    """The matrices of torch's mean squared error, by the equations."""
    plain = columns()
    names = every_name(plain)
    J = oracle.flat_jacobian(plain, x, names)[:, 0]
    residuals = (plain(x)[:, 0] - y.reshape(-1)).detach()
    parameters = [p.detach() for p in plain.parameters()]

    def loss(*values):
        outputs = torch.func.functional_call(plain, dict(zip(names, values, strict=True)), (x,))
        return (outputs[:, 0] - y.reshape(-1)).square().mean()

    rows = torch.func.hessian(loss, tuple(range(len(parameters))))(*parameters)
    sizes = [p.numel() for p in parameters]
    hessian = torch.cat(
        [
            torch.cat([entries.reshape(size, -1) for entries in row], 1)
            for row, size in zip(rows, sizes, strict=True)
        ]
    )
    gradients = 2 * residuals[:, None] * J
    return {
        Hessian: hessian,
        GGN: 2 * J.mT @ J / N,
        Fisher: 2 * J.mT @ J / N,
        EmpiricalFisher: gradients.mT @ gradients / N,
    }


@pytest.mark.parametrize("operator", [Hessian, GGN, Fisher, EmpiricalFisher])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("model", MODELS)
def test_matrix_free_operators(model, shape, operator):
    x, y = examples(shape)
    expected = dense_operators(x, y)[operator]
    network = MODELS[model]()
    data = [(x[:4], y[:4]), (x[4:], y[4:])]
    close(operator(network, nn.MSELoss(), data).to_dense(), expected)
    # −log p of variance ½ is the squared error, and its curvature that of the loss.
    close(operator(network, Gaussian(0.5**0.5), data).to_dense(), expected)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("model", MODELS)
def test_the_jacobian_and_a_quadratic(model, shape):
    x, y = examples(shape)
    network = MODELS[model]()
    plain = columns()
    J = oracle.flat_jacobian(plain, x, every_name(plain))[:, 0]
    close(Jacobian(network, [(x, y)]).to_dense(), J)
    quadratic = Quadratic.from_data(network, nn.MSELoss(), [(x, y)])
    residuals = (plain(x)[:, 0] - y.reshape(-1)).detach()
    close(quadratic.gradient, 2 * residuals @ J / N)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("model", MODELS)
def test_binary_cross_entropy(model, shape):
    x, y = examples(shape, is_label=True)
    plain = columns()
    p = plain(x)[:, 0].sigmoid().detach()
    J = oracle.flat_jacobian(plain, x, every_name(plain))[:, 0]
    expected = torch.einsum("n,ni,nj->ij", p * (1 - p) / N, J, J)
    close(GGN(MODELS[model](), nn.BCEWithLogitsLoss(), [(x, y)]).to_dense(), expected)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("fisher", ["exact", "empirical"])
def test_kfac_of_one_example_is_the_block_diagonal_ggn(model, shape, fisher):
    x, y = (tensor[:1] for tensor in examples(shape))
    plain = columns()
    K = KFAC(MODELS[model](), nn.MSELoss(), [(x, y)], fisher=fisher).to_dense()
    residual = (plain(x)[0, 0] - y.reshape(-1)[0]).detach()
    J = oracle.flat_jacobian(plain, x, every_name(plain))[0, 0]
    scale = 2 if fisher == "exact" else 4 * residual**2
    start = 0
    expected = torch.zeros(len(J), len(J)).double()
    for parameter in plain.parameters():
        block = slice(start, start + parameter.numel())
        expected[block, block] = scale * torch.outer(J[block], J[block])
        start = block.stop
    close(K, expected)


def test_a_loss_of_a_users_own_gets_the_outputs_as_the_model_returns_them():
    x, y = examples("[B]")

    def loss(outputs, targets):
        assert outputs.shape == targets.shape
        return (outputs - targets).square().mean()

    expected = dense_operators(x, y)
    squeezed = Squeezed(columns())
    for operator in (Hessian, GGN, EmpiricalFisher):
        actual = operator(squeezed, loss, [(x, y)], reduction="mean").to_dense()
        close(actual, expected[operator])
        actual = operator(columns(), loss, [(x, y[:, None])], reduction="mean").to_dense()
        close(actual, expected[operator])
    kfac = KFAC(squeezed, loss, [(x, y)], reduction="mean", fisher="empirical").to_dense()
    close(kfac, KFAC(columns(), nn.MSELoss(), [(x, y)], fisher="empirical").to_dense())


@pytest.mark.parametrize("shape", SHAPES)
def test_batches_with_names(shape):
    """Hugging Face's heads with `num_labels=1` have logits `[B, 1]` and labels `[B]`."""

    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = columns()

        def forward(self, features):
            return {"logits": self.layers(features)}

    x, y = examples(shape)
    la = Laplace(Head(), "regression", "full", sigma=SIGMA, prior_precision=DELTA)
    la.fit_batches([{"features": x, "labels": y}])
    plain = columns()
    C = oracle.ggn(plain, x, "regression", every_name(plain), SIGMA)
    close(la.posterior.precision.to_dense(), N * C + DELTA * torch.eye(len(C)).double())
    report = la.evaluate([{"features": x, "labels": y}])
    rmse = (plain(x)[:, 0] - y.reshape(-1)).square().mean().sqrt()
    assert float(report["rmse"]) == pytest.approx(float(rmse.detach()), rel=1e-9)


@pytest.mark.parametrize(
    ("likelihood", "outputs", "targets"),
    [
        (Gaussian(), 2, (N,)),
        (Gaussian(), 1, (N, 2)),
        (HeteroscedasticGaussian(), 2, (N, 2)),
        (Bernoulli(), 1, (N, 2)),
        (MultiLabel(), 2, (N,)),
        (nn.MSELoss(), 2, (N,)),
    ],
    ids=lambda value: str(value).replace("()", ""),
)
def test_other_targets_are_an_error_that_names_the_hook(likelihood, outputs, targets):
    model = nn.Linear(3, outputs)
    x = torch.randn(N, 3)
    data = [(x, torch.zeros(targets))]
    if isinstance(likelihood, nn.Module):
        use = partial(GGN, model, likelihood)
    else:
        use = Laplace(model, likelihood).fit_batches
    with pytest.raises(ValueError, match="Reshape the targets in the data, or pass `batch=`"):
        use(data)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("task", ["regression", "binary"])
def test_the_command_line(shape, task, tmp_path, monkeypatch, capsys):
    user_files.networks(tmp_path, monkeypatch)
    (tmp_path / "single.py").write_text(
        "import torch\n"
        "from torch import nn\n"
        "class Squeezed(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        torch.manual_seed(0)\n"
        "        self.layer = nn.Linear(3, 1)\n"
        "    def forward(self, x):\n"
        "        return self.layer(x).squeeze(-1)\n"
    )
    x, y = examples(shape, is_label=task == "binary")
    y = y.numpy().astype(np.float32 if task == "regression" else np.int64)
    x = x.numpy().astype(np.float32)
    np.savez("single.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    common = ["--model=single:Squeezed", "--data=single.npz", "--device=cpu", "--progress=false"]
    assert main(["fit", *common, f"--task={task}", "--output=p.safetensors"]) == 0
    commands = ["--posterior=p.safetensors", f"--task={task}"]
    assert main(["predict", *common, *commands, "--output=p.csv"]) == 0
    assert main(["evaluate", *common, *commands]) == 0
    assert ("rmse" if task == "regression" else "accuracy") in capsys.readouterr().out


def test_the_export_of_a_squeezed_output_is_refused_with_the_remedy(tmp_path):
    data = [examples("[B]")]
    la = Laplace(Squeezed(columns()), "regression", params="last_layer", sigma=SIGMA)
    la.fit_batches(data)
    with pytest.raises(
        NotImplementedError, match=r"as \[B\], which cannot be exported. Return it as"
    ):
        la.export(tmp_path / "squeezed.pt2", data[0][0])
    assert not (tmp_path / "squeezed.pt2").exists()
