"""Marginal-likelihood training, against its steps written out and against exact optima."""

import copy
import math

import oracle
import pytest
import torch
from scipy.optimize import minimize
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from laplace_debias import Gaussian, Laplace
from laplace_debias.training import marginal_likelihood_training

N = 24
BLOCKS = ("0.weight", "0.bias", "2.weight", "2.bias")


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 1)).double()


def sine(num_examples=N):
    g = torch.Generator().manual_seed(1)
    x = 2 * torch.randn(num_examples, 2, generator=g, dtype=torch.float64)
    noise = 0.2 * torch.randn(num_examples, 1, generator=g, dtype=torch.float64)
    return x, x[:, :1].sin() + noise


def batches(x, y, size=8):
    return list(zip(x.split(size), y.split(size), strict=True))


def run(model, data, likelihood="regression", lr=0.05, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    return marginal_likelihood_training(model, data, likelihood, optimizer=optimizer, **options)


def dense_curvature(model, x):
    """K-FAC of the mean squared error with unit noise, block by block."""
    blocks = []
    for layer in ("0", "2"):
        factors = oracle.kfac_factors(model, x, "regression", layer, sigma=1.0)
        blocks += [torch.kron(factors["G"], factors["A"]), factors["bias"]]
    return blocks


def evidence(model, x, y, blocks, deltas, sigma, temperature):
    """The Laplace approximation of log p(D), block by block."""
    nll = oracle.nll("regression", model(x).detach(), y, sigma).sum()
    value = -nll / temperature
    for C, delta, name in zip(blocks, deltas, BLOCKS, strict=True):
        theta = model.get_parameter(name).detach()
        P = len(x) / (temperature * sigma**2) * C + delta * torch.eye(len(C), dtype=C.dtype)
        value = value + 0.5 * (len(C) * delta.log() - delta * theta.square().sum())
        value = value - 0.5 * torch.logdet(P)
    return value


@pytest.mark.parametrize("per", [None, "block"])
def test_an_epoch_and_the_steps_after_it_are_those_written_out(per):
    temperature = 0.8
    lr = 0.05
    delta = 0.5
    sigma = 1.0
    x, y = sine()
    model = network()
    expected = network()
    result = run(
        model,
        batches(x, y),
        epochs=1,
        steps=4,
        learning_rate=0.2,
        prior_precision=delta,
        temperature=temperature,
        per=per,
    )
    for x_batch, y_batch in batches(x, y):
        nll = oracle.nll("regression", expected(x_batch), y_batch, sigma).mean() / temperature
        squares = sum(p.square().sum() for p in expected.parameters())
        loss = nll + 0.5 * delta * squares / N
        for p, g in zip(
            expected.parameters(), torch.autograd.grad(loss, expected.parameters()), strict=True
        ):
            p.data -= lr * g
    blocks = dense_curvature(expected, x)
    size = 4 if per == "block" else 1
    log_deltas = torch.full((size,), math.log(delta), dtype=torch.float64, requires_grad=True)
    log_sigma = torch.zeros((), dtype=torch.float64, requires_grad=True)
    adam = torch.optim.Adam([log_deltas, log_sigma], lr=0.2)
    for _ in range(4):
        adam.zero_grad()
        deltas = log_deltas.exp().expand(4)
        sigma_optimised = log_sigma.exp()
        (-evidence(expected, x, y, blocks, deltas, sigma_optimised, temperature)).backward()
        adam.step()
    deltas = log_deltas.detach().exp().expand(4)
    sigma_optimised = log_sigma.detach().exp()
    (row,) = result.history
    for p, q in zip(model.parameters(), expected.parameters(), strict=True):
        oracle.close(p.detach(), q.detach())
    oracle.close(torch.tensor(row["prior_precision"], dtype=torch.float64), deltas, 1e-7)
    assert row["sigma"] == pytest.approx(float(sigma_optimised), rel=1e-6)
    value = float(evidence(expected, x, y, blocks, deltas, sigma_optimised, temperature))
    assert row["log_marginal_likelihood"] == pytest.approx(value, rel=1e-6)
    assert float(result.laplace.log_marginal_likelihood()) == pytest.approx(value, rel=1e-6)
    assert float(result.laplace.sigma) == pytest.approx(float(sigma_optimised), rel=1e-6)


def test_a_linear_model_ends_at_the_largest_evidence():
    """Its marginal likelihood is exact: y is normal with covariance σ² I + X Xᵀ/δ."""
    g = torch.Generator().manual_seed(2)
    x = torch.randn(40, 3, generator=g, dtype=torch.float64)
    w = torch.tensor([[1.0, -2.0, 0.5]], dtype=torch.float64)
    y = x @ w.T + 0.4 * torch.randn(40, 1, generator=g, dtype=torch.float64)

    def exact(logs):
        delta = math.exp(logs[0])
        sigma = math.exp(logs[1])
        covariance = sigma**2 * torch.eye(40, dtype=torch.float64) + x @ x.T / delta
        normal = torch.distributions.MultivariateNormal(torch.zeros_like(y[:, 0]), covariance)
        return -float(normal.log_prob(y[:, 0]))

    best = minimize(exact, [0.0, 0.0], method="Nelder-Mead", options={"xatol": 1e-8})
    model = nn.Linear(3, 1, bias=False).double()
    result = run(model, [(x, y)], lr=0.1, epochs=60, steps=20, per=None, curvature="full")
    la = result.laplace
    assert float(la.prior_precision) == pytest.approx(math.exp(best.x[0]), rel=2e-3)
    assert float(la.sigma) == pytest.approx(math.exp(best.x[1]), rel=2e-3)
    assert float(la.log_marginal_likelihood()) == pytest.approx(-best.fun, rel=1e-5)


def classification():
    torch.manual_seed(0)
    layers = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3)
    x = torch.randn(60, 4)
    y = torch.randint(3, (60,))
    return nn.Sequential(*layers), DataLoader(TensorDataset(x, y), 20, shuffle=True)


def test_the_epoch_with_the_largest_evidence_is_kept(tmp_path):
    model, loader = classification()
    result = run(model, loader, "classification", lr=0.5, epochs=12, every=2, burn_in=3)
    values = [row["log_marginal_likelihood"] for row in result.history]
    epochs = [row["epoch"] for row in result.history]
    assert epochs == [5, 7, 9, 11, 12]
    assert result.epoch == epochs[values.index(max(values))]
    la = result.laplace
    assert la.model is model
    assert not model.training
    x = loader.dataset.tensors[0]
    fitted = Laplace(model, prior_precision=la.prior_precision).fit(loader)
    assert float(fitted.log_marginal_likelihood()) == pytest.approx(max(values), rel=1e-5)
    la.save(tmp_path / "posterior.safetensors")
    loaded = Laplace.load(tmp_path / "posterior.safetensors", model)
    assert torch.equal(loaded.predict(x).probs, la.predict(x).probs)


class Counting(nn.Linear):
    """A layer whose state includes an object that is not a tensor."""

    num_passes = 0

    def forward(self, x):
        self.num_passes += self.training
        return super().forward(x)

    def get_extra_state(self):
        return {"num_passes": self.num_passes}

    def set_extra_state(self, state):
        self.num_passes = state["num_passes"]


def test_a_state_of_other_objects_than_tensors_is_that_of_the_epoch_which_is_kept():
    _, loader = classification()
    model = Counting(4, 3)
    result = run(model, loader, "classification", lr=5.0, epochs=50, steps=1, patience=2)
    assert result.epoch < len(result.history)
    assert model.num_passes == result.epoch * len(loader)


def test_without_improvement_it_stops():
    model, loader = classification()
    worse = run(model, loader, "classification", lr=5.0, epochs=50, steps=1, patience=2)
    assert len(worse.history) < 50
    assert worse.epoch == len(worse.history) - 2


def test_a_prior_precision_for_each_kind_of_layer():
    model, loader = classification()
    result = run(model, loader, "classification", epochs=1, per="kind")
    names = result.laplace.block_names
    by_block = dict(zip(names, result.laplace.prior_precision.tolist(), strict=True))
    assert by_block["0.weight"] == by_block["4.weight"]
    assert by_block["0.bias"] == by_block["4.bias"]
    assert by_block["1.weight"] == by_block["1.bias"]
    assert len(set(by_block.values())) == 3


@pytest.mark.parametrize("options", [{"sigma": 0.3}, {"likelihood": Gaussian(0.3)}])
def test_noise_that_was_passed_stays(options):
    result = run(network(), batches(*sine()), epochs=2, **options)
    assert float(result.laplace.sigma) == 0.3


def test_runs_with_the_same_seed_are_equal():
    x, y = sine()
    loader = DataLoader(TensorDataset(x, y), 8, shuffle=True)
    ends = []
    for _ in range(2):
        g = torch.Generator().manual_seed(7)
        result = run(network(), loader, epochs=3, fisher="mc", generator=g)
        ends.append((result.laplace.mean, result.laplace.prior_precision))
    assert torch.equal(ends[0][0], ends[1][0])
    assert torch.equal(ends[0][1], ends[1][1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epochs": 0}, "epochs must be"),
        ({"every": 0}, "every must be"),
        ({"steps": 0}, "steps must be"),
        ({"patience": 0}, "patience must be"),
        ({"burn_in": 2}, "`burn_in=2`, no fit takes place within 2 epochs"),
        ({"learning_rate": -1.0}, "`learning_rate` must be positive and finite, got -1.0"),
        ({"per": "layer"}, "Unknown per='layer'"),
        ({"prior_precision": 0.0}, "prior precision must be positive"),
        ({"curvature": "full"}, "`curvature='full'` treats all parameters as one block"),
        ({"fisher": "empirical"}, "noise cannot be optimised"),
    ],
)
def test_bad_options_are_refused_before_training(options, message):
    model = network()
    state_before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=message):
        run(model, batches(*sine()), **{"epochs": 2, **options})
    assert all(torch.equal(value, state_before[name]) for name, value in model.state_dict().items())


def test_a_weight_decay_or_parameters_of_another_model_are_refused():
    model = network()
    data = batches(*sine())
    decayed = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=1e-4)
    foreign = torch.optim.SGD(network().parameters(), lr=0.1)
    for optimizer, message in ((decayed, "weight_decay=0.0001"), (foreign, "none of the model's")):
        with pytest.raises(ValueError, match=message):
            marginal_likelihood_training(model, data, "regression", optimizer=optimizer, epochs=1)


def schedule(optimizer, name):
    return {"scheduler": getattr(torch.optim.lr_scheduler, name)(optimizer)}


@pytest.mark.parametrize(
    ("optimizer_cls", "options", "message"),
    [
        (torch.optim.LBFGS, lambda optimizer: {}, "step of LBFGS needs the argument `closure`"),
        (
            torch.optim.SGD,
            lambda optimizer: schedule(optimizer, "ReduceLROnPlateau"),
            "step of ReduceLROnPlateau needs the argument `metrics`",
        ),
    ],
)
def test_steps_that_need_an_argument_are_refused_before_training(optimizer_cls, options, message):
    model = network()
    state_before = copy.deepcopy(model.state_dict())
    optimizer = optimizer_cls(model.parameters(), lr=0.05)
    with pytest.raises(ValueError, match=message):
        marginal_likelihood_training(
            model,
            batches(*sine()),
            "regression",
            optimizer=optimizer,
            epochs=1,
            **options(optimizer),
        )
    assert all(torch.equal(value, state_before[name]) for name, value in model.state_dict().items())


def test_a_schedule_of_the_number_of_steps_is_followed():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    marginal_likelihood_training(
        model,
        batches(*sine()),
        "regression",
        optimizer=optimizer,
        epochs=2,
        scheduler=scheduler,
    )
    assert scheduler.get_last_lr() == [pytest.approx(0.05 * 0.5**6)]


def dropping_loader():
    """Three batches of seven of the 24 examples; the last three are in none."""
    return DataLoader(TensorDataset(*sine()), 7, drop_last=True)


def test_a_loader_that_leaves_out_examples_needs_their_number():
    model = network()
    state_before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r"leaves out 3 of its 24 examples .*`num_data=24`"):
        run(model, dropping_loader(), epochs=1)
    assert all(torch.equal(value, state_before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("num_data", [N, 1000])
def test_the_posterior_has_the_precision_of_the_number_that_is_passed(num_data):
    sigma = 0.4
    temperature = 0.8
    lr = 0.05
    delta = 0.5
    model = network()
    expected = network()
    result = run(
        model,
        dropping_loader(),
        epochs=1,
        num_data=num_data,
        sigma=sigma,
        temperature=temperature,
        prior_precision=delta,
        lr=lr,
    )
    for x, y in dropping_loader():
        nll = oracle.nll("regression", expected(x), y, sigma).mean() / temperature
        squares = sum(p.square().sum() for p in expected.parameters())
        loss = nll + 0.5 * delta * squares / num_data
        gradients = torch.autograd.grad(loss, expected.parameters())
        for p, g in zip(expected.parameters(), gradients, strict=True):
            p.data -= lr * g
    oracle.close(result.laplace.mean, torch.cat([p.detach().flatten() for p in model.parameters()]))
    for p, q in zip(model.parameters(), expected.parameters(), strict=True):
        oracle.close(p.detach(), q.detach())
    x, y = (values[:21] for values in sine())
    blocks = dense_curvature(expected, x)
    deltas = result.laplace.prior_precision
    precisions = [
        num_data / (temperature * sigma**2) * C + d * torch.eye(len(C), dtype=C.dtype)
        for C, d in zip(blocks, deltas, strict=True)
    ]
    oracle.close(result.laplace.posterior.precision.to_dense(), torch.block_diag(*precisions))
    nll = oracle.nll("regression", expected(x).detach(), y, sigma).mean() * num_data
    value = -nll / temperature
    for P, d, name in zip(precisions, deltas, BLOCKS, strict=True):
        theta = expected.get_parameter(name).detach()
        value = value + 0.5 * (len(P) * d.log() - d * theta.square().sum() - torch.logdet(P))
    assert float(result.laplace.log_marginal_likelihood()) == pytest.approx(float(value), rel=1e-6)


def test_a_loss_that_diverges_is_an_error():
    with pytest.raises(FloatingPointError, match="Use a smaller learning rate"):
        run(network(), batches(*sine()), lr=1e200, epochs=3)


def test_data_that_can_be_read_once_is_refused_with_the_remedy():
    model = network()
    data = (batch for batch in batches(*sine()))
    optimizer = torch.optim.Adam(model.parameters())
    with pytest.raises(ValueError, match="no batches in an epoch"):
        marginal_likelihood_training(model, data, "regression", optimizer=optimizer, epochs=3)


def test_examples_with_weights_train_as_repeated_ones_do():
    x, y = sine(8)
    weights = torch.tensor([1.0, 2, 1, 3, 1, 1, 2, 1])
    repeated = [(x.repeat_interleave(weights.long(), 0), y.repeat_interleave(weights.long(), 0))]
    model = network()
    expected_model = network()
    expected = run(expected_model, repeated, epochs=6, every=2)
    result = run(model, [(x, y, weights)], epochs=6, every=2, num_data=int(weights.sum()))
    for parameter, expected_parameter in zip(
        model.parameters(), expected_model.parameters(), strict=True
    ):
        torch.testing.assert_close(parameter, expected_parameter, rtol=1e-10, atol=1e-12)
    deltas = result.laplace.prior_precision
    expected_deltas = expected.laplace.prior_precision
    torch.testing.assert_close(deltas, expected_deltas, rtol=1e-9, atol=0)
    for row, expected_row in zip(result.history, expected.history, strict=True):
        assert row["loss"] == pytest.approx(expected_row["loss"], rel=1e-10)


def test_batches_whose_weights_are_all_zero_are_left_out():
    x, y = sine()
    model = network()
    expected_model = network()
    expected = run(expected_model, [(x, y)], epochs=3)
    weights = torch.ones(len(x))
    with_padding = [(x, y, weights), (x + 1, y, 0 * weights)]
    result = run(model, with_padding, epochs=3, num_data=len(x))
    for parameter, expected_parameter in zip(
        model.parameters(), expected_model.parameters(), strict=True
    ):
        torch.testing.assert_close(parameter, expected_parameter, rtol=1e-10, atol=1e-12)
    for row, expected_row in zip(result.history, expected.history, strict=True):
        assert row["loss"] == pytest.approx(expected_row["loss"], rel=1e-10)


def test_training_records_gradients_where_a_caller_has_turned_them_off():
    x, y = sine()
    model = network()
    expected_model = network()
    expected = run(expected_model, batches(x, y), epochs=2)
    with torch.no_grad():
        result = run(model, batches(x, y), epochs=2)
    assert result.history == expected.history


def test_a_function_reads_the_batches():
    x, y = sine()
    pairs = batches(x, y)
    named = [{"position": inputs, "height": targets} for inputs, targets in pairs]

    def read(batch):
        return batch["position"], batch["height"]

    expected = run(network(), pairs, epochs=3)
    result = run(network(), named, epochs=3, batch=read)
    assert result.history == expected.history
    # The posterior reads further batches in the same way.
    expected.laplace.update(pairs)
    result.laplace.update(named)
    moments = zip(result.laplace.functional(x), expected.laplace.functional(x), strict=True)
    for actual, moment in moments:
        assert torch.equal(actual, moment)
