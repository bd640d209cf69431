"""Outputs with further positions, ignored targets, and models with several or named inputs."""

import oracle
import pytest
import torch
import torch.nn.functional as F
from cases import one_axis_at_a_time
from networks import dense_ggn
from torch import nn

from laplace_debias import Laplace
from laplace_debias.curvature.losses.likelihoods import Categorical, Gaussian

VOCABULARY = 5
WIDTH = 4
LENGTH = 3
BATCH = 4


class Decoder(nn.Module):
    """Tokens → logits of the next token, `[B, T, V]`, with a mean over the past in between."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        self.hidden = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        h = torch.tanh(self.hidden(self.table(tokens)))
        steps = torch.arange(1, tokens.shape[1] + 1, dtype=h.dtype).view(1, -1, 1)
        return self.head(h.cumsum(1) / steps)


@pytest.fixture
def decoder():
    torch.manual_seed(0)
    return Decoder().double().eval()


@pytest.fixture
def data():
    torch.manual_seed(1)
    x = torch.randint(VOCABULARY, (BATCH, LENGTH))
    y = torch.randint(VOCABULARY, (BATCH, LENGTH))
    y[0, 1] = -100
    y[2, 0] = -100
    y[2, 2] = -100
    return x, y


def summed_loss(outputs, y):
    return F.cross_entropy(outputs.flatten(0, 1), y.flatten(), reduction="sum")


def test_the_loss_of_an_example_is_the_sum_over_its_counted_positions(decoder, data):
    x, y = data
    la = Laplace(decoder, curvature="diag").fit_batches([data])
    ggn = dense_ggn(decoder, summed_loss, x, y, la.param_names)
    actual = la.posterior.precision.to_dense()  # The model's order: a table's entries are permuted.
    expected = ggn.diagonal() + 1.0
    torch.testing.assert_close(actual.diagonal(), expected, rtol=1e-9, atol=1e-12)
    nll = summed_loss(decoder(x), y)
    assert la.fitted.nll == pytest.approx(nll.item(), rel=1e-12)


@pytest.mark.slow
def test_monte_carlo_labels_of_all_positions_make_one_column(decoder, data):
    """Unbiased: the mean over many labels is within four standard errors of the exact trace."""
    exact = Laplace(decoder, curvature="diag").fit_batches([data])
    traces = []
    for seed in range(200):
        la = Laplace(decoder, curvature="diag", fisher="mc")
        la.fit_batches([data], generator=torch.Generator().manual_seed(seed))
        traces.append(la.posterior.curvature.blocks["head.weight"].magnitudes.sum())
    traces = torch.stack(traces)
    error = traces.mean() - exact.posterior.curvature.blocks["head.weight"].magnitudes.sum()
    assert error.abs() < 4 * traces.std() / len(traces) ** 0.5
    assert traces.std() > 0


def test_the_empirical_fisher_squares_the_gradient_of_whole_examples(decoder, data):
    x, y = data
    la = Laplace(decoder, curvature="diag", fisher="empirical").fit_batches([data])
    squares = []
    for n in range(BATCH):
        loss = F.cross_entropy(decoder(x[n : n + 1])[0], y[n], reduction="sum")
        grads = torch.autograd.grad(loss, list(decoder.parameters()))
        squares.append(torch.cat([g.flatten() for g in grads]).square())
    expected = torch.stack(squares).sum(0) + 1.0
    actual = la.posterior.precision.to_dense().diagonal()
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("curvature", ["kfac", "ekfac", "diag"])
def test_functional_covariance_covers_all_positions(decoder, data, curvature):
    x, _ = data
    la = Laplace(decoder, curvature=curvature, prior_precision=0.4).fit_batches([data])
    J = oracle.flat_jacobian(decoder, x, la.param_names)
    expected = J @ torch.linalg.inv(la.posterior.precision.to_dense()) @ J.mT
    mean, covariance = la.functional(x)
    torch.testing.assert_close(mean, decoder(x).detach())
    torch.testing.assert_close(covariance, expected, rtol=1e-8, atol=1e-12)
    variances = la.functional(x, diagonal=True)[1]
    assert variances.shape == (BATCH, LENGTH, VOCABULARY)
    torch.testing.assert_close(variances.flatten(1), expected.diagonal(dim1=1, dim2=2))
    top_mean, top = la.functional(x, diagonal=True, outputs=2)
    best = mean.flatten(1).topk(2)
    torch.testing.assert_close(top_mean, best.values)
    torch.testing.assert_close(top, variances.flatten(1).gather(1, best.indices))


def test_predict_tune_and_evaluate_score_the_counted_positions(decoder, data):
    x, y = data
    la = Laplace(decoder).fit_batches([data])
    predictive = la.predict(x)
    assert predictive.batch_shape == (BATCH, LENGTH)
    counted = y != -100
    expected = -predictive.logits[counted].log_softmax(-1).gather(1, y[counted][:, None]).mean()
    assert la.evaluate([data])["nll"] == pytest.approx(expected.item(), rel=1e-6)
    tuning = la.tune([data], grid=[1.0, 10.0])
    assert tuning.table[0]["nll"] == pytest.approx(expected.item(), rel=1e-6)
    for method in ("glm", "glm-mc", "nn", "map"):
        samples = None if method == "map" else 4
        assert la.predict(x, method, samples=samples).batch_shape == (BATCH, LENGTH)


def test_sequences_of_regression_targets(data):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double().eval()
    x = torch.randn(5, 3, 3).double()
    y = torch.randn(5, 3, 2).double()
    la = Laplace(model, Gaussian(0.5), curvature="ekfac").fit_batches([(x, y)])
    _, covariance = la.functional(x)
    predictive = la.predict(x)
    assert predictive.batch_shape == (5, 3)
    noise = 0.25 * torch.eye(2).double()
    for t in range(3):
        block = covariance[:, 2 * t : 2 * t + 2, 2 * t : 2 * t + 2] + noise
        torch.testing.assert_close(predictive.covariance_matrix[:, t], block)


# ----------------------------------------------------------------------------------- inputs


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.left = nn.Linear(3, 4)
        self.right = nn.Linear(2, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, left, right, flag=None):
        h = torch.tanh(self.left(left) * self.right(right))
        return {"yes": self.head(h), None: self.head(h)}[flag]


class Output:
    def __init__(self, logits):
        self.logits = logits


class Wrapped(TwoInputs):
    def forward(self, left, right, flag=None):
        return Output(super().forward(left, right, flag))


@pytest.mark.parametrize(
    ("kind", "form", "mode"),
    one_axis_at_a_time(
        [TwoInputs, Wrapped], ["tuple", "mapping"], ["crossfit", "full", "mini", "debiased"]
    ),
)
def test_several_and_named_inputs(form, kind, mode):
    torch.manual_seed(0)
    model = kind().double().eval()
    left = torch.randn(8, 3).double()
    right = torch.randn(8, 2).double()
    y = torch.randint(3, (8,))

    def inputs(rows):
        if form == "tuple":
            return left[rows], right[rows]
        return {"left": left[rows], "right": right[rows], "flag": "yes"}

    def merged_inputs(rows):
        return torch.cat([left[rows], right[rows]], dim=1)

    class Merged(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, x):
            outputs = self.inner(x[:, :3], x[:, 3:])
            return getattr(outputs, "logits", outputs)

    halves = [slice(0, 4), slice(4, 8)]
    precisions = []
    moments = []
    for network, inputs_of_rows in ((model, inputs), (Merged().eval(), merged_inputs)):
        x = inputs_of_rows(slice(0, 8))
        batches = [(inputs_of_rows(rows), y[rows]) for rows in halves]
        if mode == "crossfit":
            batches = [(x, y)]
        la = Laplace(network, memory_bound=4096).fit(batches, mode=mode, num_data=8)
        precisions.append(la.posterior.precision.to_dense())
        moments.append(la.functional(x))
        la.predict(x, "nn", 2)
    assert torch.equal(precisions[0], precisions[1])
    for actual, expected in zip(moments[0], moments[1], strict=True):
        torch.testing.assert_close(actual, expected)


def test_inputs_that_do_not_belong_together_are_refused(unchecked):
    torch.manual_seed(0)
    model = TwoInputs().eval()
    y = torch.randint(3, (4,))
    with pytest.raises(ValueError, match="the same number in every tensor"):
        Laplace(model).fit_batches([((torch.randn(4, 3), torch.randn(3, 2)), y)])
    with pytest.raises(TypeError, match="a tuple or mapping of tensors"):
        Laplace(model).fit_batches([("text", y)])
    with pytest.raises(TypeError, match=r"float64.*float32"):
        Laplace(model).fit_batches([((torch.randn(4, 3), torch.randn(4, 2).double()), y)])


def test_another_ignore_index_survives_saving(decoder, data, tmp_path):
    x, y = data
    la = Laplace(decoder, Categorical(ignore_index=1), joint=True, sharing={"hidden": "reduce"})
    la.fit_batches([(x, y.clamp_min(1))])
    la.save(tmp_path / "posterior.safetensors")
    loaded = Laplace.load(tmp_path / "posterior.safetensors", decoder)
    assert loaded.likelihood.ignore_index == 1
    for actual, expected in zip(loaded.functional(x), la.functional(x), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    actual = loaded.sample(3, torch.Generator().manual_seed(0))
    expected = la.sample(3, torch.Generator().manual_seed(0))
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


class Sets(nn.Module):
    """Sets of vectors, `[B, n, 3]`, to logits; a batch may have empty sets."""

    def __init__(self):
        super().__init__()
        self.elements = nn.Linear(3, 5)
        self.head = nn.Linear(5, 3)

    def forward(self, x):
        """Shape `[B, 3]`."""
        return self.head(torch.tanh(self.elements(x)).sum(1))


@pytest.mark.parametrize("curvature", ["kfac", "ekfac", "full", "diag"])
@pytest.mark.parametrize("sizes", [(2, 0), (0, 2)])
def test_a_batch_may_have_no_positions(curvature, sizes):
    torch.manual_seed(0)
    model = Sets().double().eval()
    data = [(torch.randn(4, n, 3, dtype=torch.float64), torch.randint(3, (4,))) for n in sizes]
    options = {"curvature": curvature, "params": ["elements.weight"]}
    la = Laplace(model, **options).fit(data)
    filled = Laplace(model, **options).fit([data[sizes.index(2)]])
    # Empty sets add nothing to the curvature, and count among the examples.
    torch.testing.assert_close(
        la.posterior.curvature.to_dense(), 0.5 * filled.posterior.curvature.to_dense()
    )
