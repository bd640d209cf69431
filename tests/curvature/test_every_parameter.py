"""Parameters of any kind: their curvature is that of dense Jacobians, by plain autograd."""

import oracle
import pytest
import torch
import unusual_parameters

from laplace_debias import Laplace
from laplace_debias.curvature import KFAC

NETWORKS = list(unusual_parameters.NETWORKS)


FAST_NETWORKS = ("class token", "tied layers", "LSTM, time first", "relative positions")
SLOW = pytest.mark.slow
OTHERS_SLOW = [n if n in FAST_NETWORKS else pytest.param(n, marks=SLOW) for n in NETWORKS]
KINDS = [
    pytest.param(n, c, marks=() if c == "diag" or n in FAST_NETWORKS else SLOW)
    for n in NETWORKS
    for c in ("kfac", "ekfac", "diag", "full")
]


@pytest.mark.parametrize(("name", "curvature"), KINDS)
def test_curvature_and_functional_covariance_are_the_dense_ones(name, curvature):
    model, x, y = unusual_parameters.network(name)
    batches = [(x[:4], y[:4]), (x[4:], y[4:])]
    la = Laplace(model, curvature=curvature, prior_precision=0.7).fit(batches)
    names = la.param_names
    assert names == [n for n, _ in model.named_parameters()]
    J = oracle.flat_jacobian(model, x, names)
    exact = oracle.ggn(model, x, "classification", names)
    actual = (la.posterior.precision.to_dense() - 0.7 * torch.eye(len(exact)).double()) / len(x)
    if curvature == "full":
        torch.testing.assert_close(actual, exact)
    if curvature in ("diag", "ekfac"):
        torch.testing.assert_close(actual.trace(), exact.trace())
    if curvature == "diag":
        torch.testing.assert_close(actual.diagonal(), exact.diagonal())
    sizes = [model.get_parameter(n).numel() for n in names]
    positions = dict(zip(names, torch.arange(len(exact)).split(sizes), strict=True))
    measured = [b for b in la._parameters.blocks if b.rule.is_generic]
    assert measured or name in ("weight standardisation",)
    if curvature in ("kfac", "ekfac"):
        for block in measured:
            entries = positions[block.name]
            torch.testing.assert_close(actual[entries][:, entries], exact[entries][:, entries])
    dense = J @ la.posterior.covariance.to_dense() @ J.mT
    torch.testing.assert_close(la.functional(x)[1], dense)
    variances = la.functional(x, diagonal=True)[1]
    torch.testing.assert_close(variances, dense.diagonal(dim1=1, dim2=2))


@pytest.mark.parametrize("name", OTHERS_SLOW)
def test_a_loaded_posterior_predicts_the_same_whatever_the_batch(name, tmp_path):
    model, x, y = unusual_parameters.network(name)
    la = Laplace(model, fisher="mc").fit([(x, y)], generator=torch.Generator().manual_seed(0))
    la.save(tmp_path / "posterior")
    loaded = Laplace.load(tmp_path / "posterior", model)
    probs = la.predict(x).probs
    assert torch.equal(loaded.predict(x).probs, probs)
    torch.testing.assert_close(torch.cat([la.predict(x[:3]).probs, la.predict(x[3:]).probs]), probs)
    small = Laplace(model, fisher="mc", memory_bound=4000)
    small.fit([(x[:1], y[:1]), (x[1:], y[1:])], generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(small.predict(x).probs, probs)


@pytest.mark.parametrize(
    ("name", "by_calls"),
    [
        ("class token", {"token"}),
        ("custom norm", set()),
        ("layer scale", set()),
        ("permuted norm", set()),
        ("parameter list", {"temperature"}),
        ("branch on the data", set()),
    ],
)
def test_what_is_multiplied_by_or_added_takes_no_second_run(name, by_calls):
    model, x, y = unusual_parameters.network(name)
    la = Laplace(model).fit([(x, y)])
    measured = [b for b in la._parameters.blocks if b.rule.is_generic]
    assert {b.name for b in measured if b.calls} == by_calls
    assert by_calls < {b.name for b in measured}


@pytest.mark.parametrize("name", ["tied layers", "custom norm", "class token"])
def test_the_operator_takes_them_too(name):
    model, x, y = unusual_parameters.network(name)
    K = KFAC(model, torch.nn.CrossEntropyLoss(), [(x, y)])
    la = Laplace(model).fit([(x, y)])
    C = la.posterior.precision.to_dense() - torch.eye(K.shape[0]).double()
    torch.testing.assert_close(K.to_dense(), C / len(x))


@pytest.mark.parametrize("method", ["glm-mc", "nn"])
def test_recurrent_layers_are_sampled(method):
    model, x, y = unusual_parameters.network("LSTM")
    model, x = model.float(), x.float()
    la = Laplace(model, prior_precision=1e6).fit([(x, y)])
    exact = la.predict(x).probs
    torch.testing.assert_close(la.predict(x, method=method).probs, exact, atol=1e-3, rtol=0)


def test_supported_parameters_are_those_that_their_layers_tell():
    model, x, y = unusual_parameters.network("class token")
    la = Laplace(model, params="supported").fit([(x, y)])
    assert la.param_names == ["embed.weight", "embed.bias", "head.weight", "head.bias"]


def test_backpack_alone_refuses_what_it_has_no_layer_for():
    model, x, y = unusual_parameters.network("weight standardisation")
    with pytest.raises(NotImplementedError, match="BackPACK does not support this model"):
        Laplace(model, backend="backpack").fit([(x, y)])


class Windows(torch.nn.Module):
    """Layers on windows that are merged into the examples, more of them in longer sequences."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 4)
        self.norm = torch.nn.LayerNorm(4)
        self.gamma = torch.nn.Parameter(torch.randn(4))
        self.head = torch.nn.Linear(4, 3)

    def forward(self, x):
        windows = x.reshape(-1, 2, 3)
        h = self.norm(torch.tanh(self.layer(windows))) * self.gamma
        return self.head(h.view(len(x), -1, 4).mean(1))


def test_windows_are_followed_whatever_their_number():
    torch.manual_seed(0)
    model = Windows().double().eval()
    batches = [(torch.randn(b, t, 3).double(), torch.randint(3, (b,))) for b, t in ((3, 4), (5, 8))]
    la = Laplace(model, curvature="full").fit(batches)
    assert {b.name for b in la._parameters.blocks if b.calls} == {"gamma"}
    exact = sum(len(x) * oracle.ggn(model, x, "classification", la.param_names) for x, _ in batches)
    torch.testing.assert_close(la.posterior.precision.to_dense() - torch.eye(len(exact)), exact)


class Auxiliary(torch.nn.Module):
    """A network with a branch that is used only in training, and a parameter that is never used."""

    def __init__(self):
        super().__init__()
        self.body = torch.nn.Linear(3, 4)
        self.head = torch.nn.Linear(4, 3)
        self.auxiliary = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 3))
        self.mask_token = torch.nn.Parameter(torch.zeros(4))

    def forward(self, x):
        return self.head(torch.tanh(self.body(x)))


def test_the_warning_of_unused_parameters_says_what_to_type():
    model = Auxiliary().eval()
    x = torch.randn(6, 3)
    y = torch.randint(3, (6,))
    with pytest.warns(UserWarning, match="excluded from the posterior") as warned:
        la = Laplace(model).fit([(x, y)])
    (text,) = [str(w.message) for w in warned if "excluded" in str(w.message)]
    assert text.count("auxiliary.") == 8  # Four names, each in the text and in the expression.
    expression = text.partition("params=")[2].partition("`, or freeze")[0]
    # The expression that a user would copy from the warning.
    typed = Laplace(model, params=eval(expression)).fit([(x, y)])
    assert typed.param_names == la.param_names
    assert torch.equal(typed.predict(x).probs, la.predict(x).probs)


class Cell(torch.nn.Module):
    """A layer with a scale of its own; one of its outputs is computed from the other one."""

    def __init__(self, weight):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.randn(4).double())
        self.weight = weight

    def forward(self, x):
        state = (self.scale.roll(1) * x).tanh()
        return self.scale.roll(2) * x.sin() + self.weight * state, state


class TwoCells(torch.nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.first = Cell(weight)
        self.second = Cell(weight)
        self.last = torch.nn.Linear(4, 3).double()

    def forward(self, x):
        value, _ = self.first(x)
        value, state = self.second(value)
        return self.last(value + state.square())


@pytest.mark.parametrize("weight", [3e-3, 1.0])
def test_one_output_of_a_call_may_be_computed_from_another_output(weight):
    torch.manual_seed(0)
    model = TwoCells(weight)
    x, y = torch.randn(5, 4).double(), torch.randint(3, (5,))
    la = Laplace(model, curvature="diag", prior_precision=0.7).fit([(x, y)])
    exact = oracle.ggn(model, x, "classification", la.param_names).diagonal()
    torch.testing.assert_close(la.posterior.curvature.to_dense().diagonal(), exact)
    assert {b.calls for b in la._parameters.blocks if b.calls} == {("first",), ("second",)}
