"""Curvature during training: running means as they are written out, and what a loop may rely on."""

import copy

import oracle
import pytest
import torch
from networks import dense_ggn
from torch import nn

from laplace_debias import Laplace
from laplace_debias.training import OnlineCurvature

BETA = 0.8
REFRESH = 3
SIZES = (14, 9, 12, 16, 11, 13, 10)
OPTIONS = {"decay": BETA, "refresh": REFRESH, "every": 1, "fisher": "exact"}


def convolutional(seed=0):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Conv1d(2, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(9, 3))
    return net.double()


def normalised():
    torch.manual_seed(0)
    layers = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.5), nn.Linear(6, 3)
    return nn.Sequential(*layers).double()


def batches(sizes=SIZES, shape=(2, 4), seed=1):
    g = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(size, *shape, generator=g, dtype=torch.float64),
            torch.randint(3, (size,), generator=g),
        )
        for size in sizes
    ]


def updated(model, data, **options):
    online = OnlineCurvature(model, "classification", **{**OPTIONS, **options})
    for x, y in data:
        online.update(x, y)
    return online


def dense(la):
    return la.posterior.curvature.to_dense()


def along(U, C):
    return (U.T @ C @ U).diagonal()


def projected(U_new, U_old, values):
    """Curvature along new directions of the matrix with eigenvectors U_old and these values."""
    return along(U_new, U_old @ torch.diag(values) @ U_old.T)


def running_factors(model, data, layer, number, every=1):
    """The discounted means of G and A over the measured batches before a number."""
    G = 0
    A = 0
    weight = 0
    for index, (x, _) in enumerate(data[:number]):
        G = BETA * G
        A = BETA * A
        weight = BETA * weight
        if index % every == 0:
            factors = oracle.kfac_factors(model, x, "classification", layer)
            G = G + len(x) * factors["G"]
            A = A + len(x) * factors["A"]
            weight = weight + len(x)
    return G / weight, A / weight


def refreshes(number, every=1):
    """Whether directions are new before a batch: the first ones, or a refresh since the last."""
    passed = [step for step in range(1, number + 1) if step % REFRESH == 0 or step == every]
    return bool(passed) and passed[-1] > number - every


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("layer", ["0", "3"])
def test_squares_along_earlier_directions_are_averaged(layer, every):
    model = convolutional()
    data = batches()
    U = None
    eigenvalues = 0
    weight = 0
    for number, (x, _) in enumerate(data):
        eigenvalues = BETA * eigenvalues
        weight = BETA * weight
        if number % every or number == 0:
            continue
        if refreshes(number, every):
            G, A = running_factors(model, data, layer, number, every)
            U_new = torch.kron(oracle.eigen(G)[1], oracle.eigen(A)[1])
            if U is not None:
                eigenvalues = projected(U_new, U, eigenvalues)
            U = U_new
        C = oracle.ggn_block(model, x, "classification", f"{layer}.weight")
        eigenvalues = eigenvalues + len(x) * along(U, C)
        weight = weight + len(x)
    la = updated(model, data, every=every).posterior(100)
    block = la.posterior.curvature.blocks[f"{layer}.weight"].to_dense()
    oracle.close(block, U @ torch.diag(eigenvalues / weight) @ U.T)


def test_factors_of_few_examples_are_summed_for_a_weight_and_its_bias():
    """With fewer examples than outputs, G is kept as rows until it is added to the sums."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 20), nn.Tanh(), nn.Linear(20, 3)).double()
    data = batches((6, 5, 7), (4,))
    G = 0
    A = 0
    for x, _ in data:
        factors = oracle.kfac_factors(model, x, "classification", "0")
        G = BETA * G + len(x) * factors["G"]
        A = BETA * A + len(x) * factors["A"]
    blocks = updated(model, data).state_dict()["blocks"]
    oracle.close(blocks["0.weight"]["G"], G)
    oracle.close(blocks["0.weight"]["A"], A)
    oracle.close(blocks["0.bias"]["G"], G)


@pytest.mark.parametrize("layer", ["0", "3"])
def test_curvature_of_factors_along_earlier_directions_is_averaged(layer):
    model = convolutional()
    data = batches()
    U_G = None
    U_A = None
    magnitudes_G = 0
    magnitudes_A = 0
    weight = 0
    for number, (x, _) in enumerate(data):
        if refreshes(number):
            G, A = running_factors(model, data, layer, number)
            new_G = oracle.eigen(G)[1]
            new_A = oracle.eigen(A)[1]
            if U_G is not None:
                magnitudes_G = projected(new_G, U_G, magnitudes_G)
                magnitudes_A = projected(new_A, U_A, magnitudes_A)
            U_G = new_G
            U_A = new_A
        if number > 0:
            factors = oracle.kfac_factors(model, x, "classification", layer)
            magnitudes_G = BETA * magnitudes_G + len(x) * along(U_G, factors["G"])
            magnitudes_A = BETA * magnitudes_A + len(x) * along(U_A, factors["A"])
            weight = BETA * weight + len(x)
    la = updated(model, data, curvature="kfac").posterior(100)
    G = U_G @ torch.diag(magnitudes_G / weight) @ U_G.T
    A = U_A @ torch.diag(magnitudes_A / weight) @ U_A.T
    oracle.close(la.posterior.curvature.blocks[f"{layer}.weight"].to_dense(), torch.kron(G, A))


def test_the_loss_is_the_discounted_mean_of_the_batches():
    model = convolutional()
    data = batches()
    total = 0
    weight = 0
    for x, y in data:
        total = BETA * total + oracle.nll("classification", model(x).detach(), y).sum()
        weight = BETA * weight + len(x)
    la = updated(model, data).posterior(100)
    P = la.posterior.precision.to_dense()
    D = len(P)
    theta = la.mean
    evidence = -100 * total / weight - 0.5 * theta @ theta - 0.5 * torch.logdet(P)
    assert float(la.log_marginal_likelihood()) == pytest.approx(float(evidence), rel=1e-10)
    assert sum(p.numel() for p in model.parameters()) == D


@pytest.mark.parametrize("curvature", ["kfac", "ekfac"])
def test_two_updates_are_a_debiased_fit_with_present_statistics_of_normalisations(curvature):
    model = normalised()
    data = batches((14, 9), (4,))
    online = OnlineCurvature(model, "classification", curvature=curvature, fisher="exact", every=1)
    model.train()(torch.randn(50, 4, dtype=torch.float64) * 3 + 1)
    for x, y in data:
        online.update(x, y)
    fitted = Laplace(copy.deepcopy(model).eval(), curvature=curvature)
    fitted.fit_batches(data[:1], data[1:], num_data=100)
    oracle.close(dense(online.posterior(100)), dense(fitted))


class Tempered(nn.Sequential):
    """Layers whose outputs are divided by a temperature that training lowers."""

    temperature: float

    def forward(self, x):
        return super().forward(x) / self.temperature


def test_numbers_in_the_modules_are_those_of_the_model_at_the_update():
    torch.manual_seed(0)
    model = Tempered(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    model.temperature = 1.0
    online = OnlineCurvature(model, "classification", fisher="exact", every=1)
    data = batches((14, 9), (4,))
    for (x, y), temperature in zip(data, (0.5, 0.2), strict=True):
        model.temperature = temperature
        online.update(x, y)
    # Rotations do not change the trace of the curvature of the second batch.
    expected = dense_ggn(model, nn.CrossEntropyLoss(), *data[1]).trace()
    torch.testing.assert_close(dense(online.posterior(100)).trace(), expected)


def trained(model, data, online=None):
    """The weights after a training run with dropout; updates are made if there is an object."""
    torch.manual_seed(3)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    model.train()
    for x, y in data:
        if online is not None:
            online.update(x, y)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert all(module.training for module in model.modules())
    return torch.cat([value.flatten() for value in model.state_dict().values()])


def test_training_goes_on_as_without_updates():
    data = batches(SIZES, (4,))
    plain = trained(normalised(), data)
    model = normalised()
    online = OnlineCurvature(model, generator=torch.Generator().manual_seed(0))
    assert torch.equal(trained(model, data, online), plain)


def test_a_posterior_stays_while_training_goes_on(tmp_path):
    model = normalised()
    data = batches(SIZES, (4,))
    online = OnlineCurvature(model, refresh=2, every=2)
    trained(model, data, online)
    la = online.posterior(100)
    x = data[0][0]
    probs = la.predict(x).probs
    trained(model, data, online)
    assert torch.equal(la.predict(x).probs, probs)
    la.save(tmp_path / "posterior.safetensors")
    loaded = Laplace.load(tmp_path / "posterior.safetensors", la.model)
    assert torch.equal(loaded.predict(x).probs, probs)
    assert "online" in repr(loaded)
    assert loaded.tune(data, grid=[0.1, 1.0]).prior_precision in (0.1, 1.0)


@pytest.mark.parametrize("fisher", ["mc", "empirical"])
def test_the_fisher_matrix_is_the_one_that_was_chosen(fisher):
    """Many labels approach the exact curvature; the true ones give the squares of gradients."""
    model = convolutional()
    first, second = batches((14, 400))
    samples = {"mc_samples": 64} if fisher == "mc" else {}
    online = updated(model, [first, second], fisher=fisher, **samples)
    block = online.posterior(100).posterior.curvature.blocks["3.bias"].to_dense()
    p = model(second[0]).softmax(1).detach()
    y = nn.functional.one_hot(second[1], 3)
    if fisher == "mc":
        C = (torch.diag_embed(p) - p.unsqueeze(2) * p.unsqueeze(1)).mean(0)
        tolerance = 0.03
    else:
        C = torch.einsum("ni,nj->ij", p - y, p - y) / len(p)
        tolerance = 1e-9
    U = oracle.eigen(oracle.kfac_factors(model, first[0], "classification", "3")["bias"])[1]
    if fisher == "empirical":
        p = model(first[0]).softmax(1).detach()
        y = nn.functional.one_hot(first[1], 3)
        U = oracle.eigen((p - y).T @ (p - y))[1]
        oracle.close(block, U @ torch.diag(along(U, C)) @ U.T, tolerance)
    assert float(block.trace()) == pytest.approx(float(C.trace()), rel=tolerance)


@pytest.mark.slow
def test_with_equal_weights_it_approaches_cross_fitting():
    """With fixed weights and no decay: an average of held-out curvature, as a cross-fit is."""
    model = convolutional()
    data = batches([16] * 40)
    joined = [(torch.cat([x for x, _ in data]), torch.cat([y for _, y in data]))]
    crossfit = dense(Laplace(model, curvature="ekfac").fit_batches(joined, folds=4, num_data=100))
    first = Laplace(model, curvature="ekfac").fit_batches(data[:1], num_data=100)

    def distance(curvature):
        return float((curvature - crossfit).norm() / crossfit.norm())

    few = distance(dense(updated(model, data[:4], decay=1.0, refresh=5).posterior(100)))
    many = distance(dense(updated(model, data, decay=1.0, refresh=5).posterior(100)))
    twice = distance(dense(updated(model, data * 3, decay=1.0, refresh=5).posterior(100)))
    assert many < 0.5 * few < 0.5 * distance(dense(first))
    assert twice < many < 0.06


@pytest.mark.parametrize(
    ("num_updates", "every", "fisher"),
    [(0, 1, "mc"), (1, 1, "signs"), (4, 1, "mc"), (4, 1, "signs"), (3, 2, "mc"), (4, 2, "signs")],
)
def test_a_resumed_run_ends_as_an_uninterrupted_one(num_updates, every, fisher, tmp_path):
    model = convolutional()
    data = batches()
    options = {"fisher": fisher, "every": every, "generator": torch.Generator().manual_seed(5)}
    interrupted = updated(model, data[:num_updates], **options)
    torch.save(interrupted.state_dict(), tmp_path / "online.pt")
    for x, y in data[num_updates:]:
        interrupted.update(x, y)
    resumed = OnlineCurvature(model, **{**OPTIONS, "fisher": fisher, "every": every})
    resumed.load_state_dict(torch.load(tmp_path / "online.pt"))
    assert resumed.num_updates == num_updates
    assert resumed.state_dict()["num_updates"] == num_updates
    with pytest.raises(RuntimeError, match="Call `update` before `posterior`"):
        resumed.posterior(100)
    for x, y in data[num_updates:]:
        resumed.update(x, y)
    assert resumed.num_updates == len(data)
    assert torch.equal(dense(resumed.posterior(100)), dense(interrupted.posterior(100)))


def test_a_state_of_another_model_or_run_is_refused():
    model = convolutional()
    data = batches()
    state = updated(model, data[:2]).state_dict()
    wider = nn.Sequential(nn.Conv1d(2, 4, 2), nn.Tanh(), nn.Flatten(), nn.Linear(12, 3)).double()
    with pytest.raises(ValueError, match=r"factors of '0.weight' have the shapes"):
        OnlineCurvature(wider, **OPTIONS).load_state_dict(state)
    with pytest.raises(ValueError, match=r"a block '3.weight', but this model does not"):
        OnlineCurvature(model[:1], **OPTIONS).load_state_dict(state)
    with pytest.raises(ValueError, match=r"decay=0.8, but this object has decay=0.5"):
        OnlineCurvature(model, **{**OPTIONS, "decay": 0.5}).load_state_dict(state)
    with pytest.raises(ValueError, match="lacks `options` or `blocks`"):
        OnlineCurvature(model, **OPTIONS).load_state_dict(model.state_dict())


@pytest.mark.parametrize(
    ("likelihood", "saved", "loaded", "message"),
    [
        ("classification", {}, {"sharing": "reduce"}, "sharing='expand', but .* sharing='reduce'"),
        (
            "regression",
            {"sigma": 1.0},
            {"sigma": 0.1},
            r"likelihood={'name': 'regression', 'sigma': 1.0}, but .* 'sigma': 0.1",
        ),
        ("classification", {}, {"class_dim": 1}, "class_dim=None, but this object has class_dim=1"),
        ("classification", {"params": ["3.weight"]}, {}, r"\['0.bias', .* but not of both"),
        ("classification", {}, {"params": ["3.weight"]}, "block '0.weight', but this model does"),
    ],
)
def test_a_state_with_other_options_is_refused_when_it_is_loaded(
    likelihood, saved, loaded, message
):
    model = convolutional()
    data = batches()
    if likelihood == "regression":
        data = [(x, model(x).detach() + 1) for x, _ in data]
    earlier = OnlineCurvature(model, likelihood, **OPTIONS, **saved)
    for x, y in data[:3]:
        earlier.update(x, y)
    with pytest.raises(ValueError, match=message):
        OnlineCurvature(model, likelihood, **OPTIONS, **loaded).load_state_dict(
            earlier.state_dict()
        )


def test_a_state_of_another_likelihood_is_refused():
    model = convolutional()
    data = batches()
    state = updated(model, data[:3]).state_dict()
    with pytest.raises(ValueError, match=r"likelihood=\{'name': 'classification'"):
        OnlineCurvature(model, "multilabel", **OPTIONS).load_state_dict(state)


def test_a_state_of_an_earlier_version_lacks_options_and_parameters():
    model = convolutional()
    data = batches()
    interrupted = updated(model, data[:3])
    state = interrupted.state_dict()
    del state["parameters"]
    for name in ("sharing", "likelihood", "class_dim"):
        del state["options"][name]
    resumed = OnlineCurvature(model, **OPTIONS)
    resumed.load_state_dict(state)
    for online in (interrupted, resumed):
        online.update(*data[3])
    assert torch.equal(dense(resumed.posterior(100)), dense(interrupted.posterior(100)))


def test_a_state_with_some_of_the_blocks_is_refused_by_every_update():
    """Without its parameters, the state of an earlier version cannot be refused before."""
    model = convolutional()
    data = batches()
    state = updated(model, data[:3], params=["3.weight"]).state_dict()
    del state["parameters"]
    online = OnlineCurvature(model, **OPTIONS)
    online.load_state_dict(state)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"has the blocks \['0.weight', .* the state does not"):
            online.update(*data[3])
    assert online.num_updates == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decay": 0.0}, "`decay` must be greater than 0 and at most 1, got 0.0"),
        ({"decay": 1.5}, "`decay` must be greater than 0 and at most 1, got 1.5"),
        ({"decay": float("nan")}, "`decay` must be greater than 0 and at most 1, got nan"),
        ({"refresh": 0}, "refresh must be"),
        ({"every": 0}, "every must be"),
        ({"curvature": "full"}, "`curvature='full'` does not keep running means"),
        ({"fisher": "sampled"}, "Unknown fisher='sampled'"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        OnlineCurvature(convolutional(), **options)


def test_a_batch_that_cannot_be_measured_changes_nothing():
    model = convolutional()
    data = batches()
    online = updated(model, data[:4])
    dense_before = dense(online.posterior(100))
    x, y = data[4]
    with pytest.raises(ValueError, match="Inputs must contain at least one example"):
        online.update(x[:0], y[:0])
    with pytest.raises(ValueError, match="NaN or Inf"):
        online.update(x * torch.inf, y)
    with pytest.raises(ValueError, match="11 inputs, but its targets"):
        online.update(x, y[:3])
    assert online.num_updates == 4
    assert torch.equal(dense(online.posterior(100)), dense_before)


@pytest.mark.parametrize(("count", "every"), [(0, 1), (1, 1), (3, 3)])
def test_a_posterior_needs_two_measured_batches(count, every):
    model = convolutional()
    data = batches()
    message = f"With every={every}, {count} updates are not enough for this. Call `update` "
    message += f"at least {every + 1}"
    with pytest.raises(RuntimeError, match=message):
        updated(model, data[:count], every=every).posterior(100)
    updated(model, data[: every + 1], every=every).posterior(100)


def test_a_state_without_every_is_of_a_run_that_measured_every_batch():
    model = convolutional()
    data = batches()
    state = updated(model, data[:3]).state_dict()
    del state["options"]["every"]
    with pytest.raises(ValueError, match="every=1, but this object has every=4"):
        OnlineCurvature(model, **{**OPTIONS, "every": 4}).load_state_dict(state)
    resumed = OnlineCurvature(model, **OPTIONS)
    resumed.load_state_dict(state)
    assert resumed.num_updates == 3


def single(model, data):
    return model.float(), [(x.float(), y) for x, y in data]


@pytest.mark.parametrize("curvature", ["kfac", "ekfac"])
def test_single_precision_has_the_curvature_of_double_precision(curvature):
    expected = dense(updated(convolutional(), batches(), curvature=curvature).posterior(100))
    online = updated(*single(convolutional(), batches()), curvature=curvature)
    assert all(sums[0].dtype == torch.float64 for sums in online._running.factors.parts.values())
    oracle.close(dense(online.posterior(100)).double(), expected, 1e-4)


@pytest.mark.parametrize("curvature", ["kfac", "ekfac"])
def test_a_state_with_directions_in_double_precision_is_loaded(curvature):
    """Before, decompositions had the dtype of the running sums."""
    model, data = single(convolutional(), batches())
    interrupted = updated(model, data[:4], curvature=curvature)
    state = interrupted.state_dict()
    for tensors in state["blocks"].values():
        for name in ("U_G", "U_A", "eigenvalues_G", "eigenvalues_A"):
            if name in tensors:
                tensors[name] = tensors[name].double()
    resumed = OnlineCurvature(model, **OPTIONS, curvature=curvature)
    resumed.load_state_dict(state)
    for x, y in data[4:]:
        interrupted.update(x, y)
        resumed.update(x, y)
    assert torch.equal(dense(resumed.posterior(100)), dense(interrupted.posterior(100)))


def test_a_posterior_of_a_model_that_was_converted_since_is_refused():
    model = convolutional()
    data = batches()
    online = updated(model, data[:6])
    model.to({torch.float32: torch.float64, torch.float64: torch.float32}[model[0].weight.dtype])
    with pytest.raises(RuntimeError, match=r"0.weight was moved or replaced"):
        online.posterior(100)


def test_replaced_and_half_precision_parameters_are_refused():
    model = convolutional()
    data = batches()
    online = updated(model, data[:2])
    model[0].weight.data = model[0].weight.data.clone()
    with pytest.raises(RuntimeError, match=r"0.weight was moved or replaced"):
        online.update(*data[2])
    with pytest.raises(NotImplementedError, match=r"0.weight has dtype torch.bfloat16"):
        OnlineCurvature(convolutional().bfloat16())


@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize(
    "rejected",
    [
        (torch.randn(8, 2, 4, dtype=torch.float64), torch.full((8,), 7)),
        (torch.full((8, 2, 4), torch.nan, dtype=torch.float64), torch.zeros(8).long()),
        (torch.randn(0, 2, 4, dtype=torch.float64), torch.zeros(0).long()),
    ],
)
def test_a_rejected_batch_at_the_first_refresh_leaves_the_running_means(rejected, every):
    data = batches((8,) * 9)
    expected, online = (updated(convolutional(), data[:every], every=every) for _ in range(2))
    with pytest.raises(ValueError, match=r"label|NaN|example"):
        online.update(*rejected)
    with pytest.raises(RuntimeError, match="must come from different batches"):
        online.posterior(100)
    online.state_dict()
    for x, y in data[every:]:
        expected.update(x, y)
        online.update(x, y)
    torch.testing.assert_close(
        online.posterior(100).posterior.curvature.to_dense(),
        expected.posterior(100).posterior.curvature.to_dense(),
    )


def test_the_text_shows_the_options_and_the_number_of_updates():
    online = OnlineCurvature(nn.Linear(3, 2).double(), decay=0.9, refresh=10, every=1)
    online.update(torch.randn(4, 3, dtype=torch.float64), torch.arange(4) % 2)
    assert repr(online) == (
        "OnlineCurvature(Linear, likelihood=classification, curvature=ekfac, decay=0.9, "
        "refresh=10, every=1, num_updates=1)"
    )


@pytest.mark.parametrize("curvature", ["kfac", "ekfac"])
@pytest.mark.parametrize("refresh", [2, 100])
def test_a_refresh_does_not_depend_on_the_basis_of_a_null_space(curvature, refresh):
    """The first batch leaves null spaces: the order of its examples decides nothing else."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 10), nn.ReLU(), nn.Linear(10, 3)).double().eval()
    x = torch.randn(12, 12, dtype=torch.float64)
    y = torch.randint(3, (12,))

    def precision(first):
        online = OnlineCurvature(
            model, decay=1.0, refresh=refresh, every=1, fisher="exact", curvature=curvature
        )
        for batch in (first, torch.arange(4, 8), torch.arange(8, 12)):
            online.update(x[batch], y[batch])
        return online.posterior(num_data=60).posterior.precision.to_dense()

    expected = precision(torch.arange(4))
    permuted = precision(torch.tensor([2, 0, 3, 1]))
    torch.testing.assert_close(permuted, expected, atol=1e-12 * float(expected.max()), rtol=1e-10)
