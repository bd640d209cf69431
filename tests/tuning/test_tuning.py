"""Tuning on held-out data: passes, flatness, ties, several metrics."""

import itertools
import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Categorical
from torch.utils.data import DataLoader, TensorDataset

from laplace_debias import Laplace, Link
from laplace_debias.curvature.data.batch import Batch
from laplace_debias.curvature.losses.likelihoods import Categorical as Softmax
from laplace_debias.laplace.tuning.grid_metrics import evaluate_grid
from laplace_debias.laplace.tuning.tune import DEFAULT_GRID, TEMPERATURES, choose, summarise

# Alone: the search for the prior precision without links and temperatures.
PLAIN = Link("probit")


class Passes(list):
    """Batches that count how often they are read."""

    count = 0

    def __iter__(self):
        self.count += 1
        return super().__iter__()


def problem(scale=1.0, num_data=80, temperature=1.0):
    """A classifier whose logits are too large by 1/temperature for the labels."""
    g = torch.Generator().manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3)).double().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(scale * torch.randn(p.shape, generator=g, dtype=torch.float64))
        x = torch.randn(num_data, 3, generator=g, dtype=torch.float64)
        probs = (model(x) * temperature).softmax(1)
        y = torch.multinomial(probs, 1, generator=g)[:, 0]
    return model, x, y


def shaped(curve, num_examples=200, noise=0.0, start=DEFAULT_GRID):
    """A search over a metric of δ that is written down, example by example.

    The probability of the label is exp(-curve(log10 δ)), times noise that δ moves a little.
    """
    g = torch.Generator().manual_seed(0)
    jitter = noise * torch.randn(num_examples, generator=g, dtype=torch.float64)
    jitter -= jitter.mean()
    batches = Passes([Batch(torch.zeros(num_examples, 1), torch.zeros(num_examples).long())])
    tried = []

    def predict(x, grid, links, network_links):
        tried.append(grid.tolist())
        for number, delta in enumerate(grid.tolist()):
            power = math.log10(delta)
            log_p = -(curve(power) + jitter * power)
            logits = torch.stack([log_p, torch.log1p(-log_p.exp())], 1)
            yield number, Categorical(logits=logits.unsqueeze(0), validate_args=False)

    table = evaluate_grid(
        predict, batches, Softmax(), "nll", prior_precisions=start.tolist(), links=[]
    )
    return summarise(table, choose(table), "nll"), batches, tried


def resolution(tuning):
    """The factor to the nearest values tried, the larger of the two."""
    tried = sorted(row["prior_precision"] for row in tuning.table)
    index = tried.index(tuning.prior_precision)
    neighbours = tried[max(index - 1, 0) : index + 2]
    return max(high / low for low, high in itertools.pairwise(neighbours))


def test_the_optimum_is_found_in_one_pass():
    tuning, batches, _ = shaped(lambda power: 1 + 0.1 * (power - 2.33) ** 2)
    assert batches.count == 1
    assert math.log10(tuning.prior_precision) == pytest.approx(2.33, abs=0.125)
    assert resolution(tuning) == pytest.approx(10**0.25)
    assert tuning.value == min(row["nll"] for row in tuning.table)
    assert tuning.notes == ()
    assert len(tuning.table) == 49


@pytest.mark.parametrize(
    ("slope", "end", "word"), [(0.01, 1e-4, "smallest"), (-0.01, 1e8, "largest")]
)
def test_a_best_at_the_end_of_the_grid_is_told(slope, end, word):
    tuning, _, _ = shaped(lambda power: 2 + slope * power)
    assert tuning.prior_precision == pytest.approx(end)
    assert f"The best value is the {word} that was tried, {end:.3g}." in tuning.message


def test_a_posterior_that_is_no_better_than_the_network_needs_no_larger_prior_precision():
    """The network is calibrated, and the posterior of eight examples is much too wide."""
    model, x, y = problem(1.0, 1000)
    la = Laplace(model).fit([(x[:8], y[:8])])
    tuning = la.tune([(x, y)])
    assert tuning.prior_precision == pytest.approx(1e8)
    (note,) = tuning.notes
    assert "scores no better than the network" in note
    assert "grid=" not in note
    # Among smaller ones, the largest is better than the others, but not as good as the network.
    note, *_ = la.tune([(x, y)], grid=[0.1, 1.0]).notes
    assert "grid=[1.0e+01" in note


def test_a_regression_that_is_no_better_than_the_network_needs_no_larger_prior_precision():
    """The network has the right noise, and the posterior of eight examples is much too wide."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double().eval()
    x = torch.randn(500, 3, dtype=torch.float64)
    y = model(x).detach() + 0.5 * torch.randn(500, 1, dtype=torch.float64)
    la = Laplace(model, "regression", sigma=0.5).fit([(x[:8], y[:8])])
    tuning = la.tune([(x, y)])
    assert tuning.prior_precision == pytest.approx(1e8)
    network = torch.distributions.Normal(model(x).detach(), 0.5)
    assert tuning.value == pytest.approx(-float(network.log_prob(y).mean()), abs=1e-6)
    note, note_on_sigma = tuning.notes
    assert "scores no better than the network" in note
    assert 'Predict with the method "map"' in note
    assert "grid=[" not in note
    assert "`sigma` is not tuned here" in note_on_sigma
    for grid in ([0.1, 1.0], [0.1, 0.9, 1.0]):
        note, *_ = la.tune([(x, y)], grid=grid).notes
        assert "grid=[1.0e+01" in note
    assert la.tune([(x, y)], grid=[1.0, 1.0]).prior_precision == 1.0


def test_a_default_link_is_compared_with_the_network_at_its_temperature():
    """With few examples, a better temperature is not chosen, so it does not matter here."""
    model, x, y = problem(1.0, 1000)
    la = Laplace(model).fit([(x[:8], y[:8])])
    correct = (y == model(x).argmax(1)).nonzero()[:90, 0]
    tuning = la.tune([(x[correct], y[correct])])
    assert tuning.prior_precision == pytest.approx(1e8)
    assert tuning.link.temperature == 1
    assert "scores no better than the network" in tuning.notes[0]


@pytest.mark.parametrize(
    ("temperature", "scale", "end"),
    [
        (0.1, 3.0, "4, is the largest of those tried. Check"),
        (8.0, 0.3, "0.25, is the smallest of those tried. The posterior"),
    ],
)
def test_a_temperature_at_the_end_of_those_tried_is_told(temperature, scale, end):
    model, x, y = problem(scale, 400, temperature=temperature)
    la = Laplace(model).fit([(x, y)])
    tuning = la.tune([(x, y)], grid=[1e6])
    note, note_on_network = tuning.notes
    assert f"The best temperature, {end}" in note
    assert note in tuning.message
    network_temperature = f"{tuning.link.network_temperature:.3g}"
    assert f"Its temperature, {network_temperature}, is outside the range" in note_on_network
    with_given_link = la.tune([(x, y)], grid=[1e6], link=tuning.link)
    assert with_given_link.notes == ()


def test_the_flat_range_is_that_of_paired_differences():
    """The reference computes the differences example by example."""
    tuning, _, tried = shaped(lambda power: 1 + 0.02 * (power - 2) ** 2, noise=0.1)
    g = torch.Generator().manual_seed(0)
    jitter = 0.1 * torch.randn(200, generator=g, dtype=torch.float64)
    jitter -= jitter.mean()
    points = sorted({delta for grid in tried for delta in grid})
    nll = [1 + 0.02 * (math.log10(d) - 2) ** 2 + jitter * math.log10(d) for d in points]
    best = min(range(len(points)), key=lambda i: nll[i].mean())
    is_as_good = []
    for nll_of_point in nll:
        difference = nll_of_point - nll[best]
        is_as_good.append(bool(difference.mean() <= difference.std() / math.sqrt(200)))
    low = best
    high = best
    while is_as_good[low - 1]:
        low -= 1
    while is_as_good[high + 1]:
        high += 1
    assert tuning.flat == pytest.approx((points[low], points[high]))
    assert low < best < high
    row = next(r for r in tuning.table if r["prior_precision"] == tuning.prior_precision)
    assert row["standard_error"] == pytest.approx(float(nll[best].std()) / math.sqrt(200))
    assert row["standard_error"] < max(r["standard_error"] for r in tuning.table)


def test_of_equal_values_the_middle_of_the_longest_run_is_taken():
    tuning, _, _ = shaped(lambda power: 1.0 if 1 <= power <= 4.9 else 2.0)
    assert tuning.prior_precision == pytest.approx(1e3, rel=0.7)
    assert tuning.flat[0] >= 10
    assert tuning.flat[1] <= 10**4.9
    # A lone point of the same value is no reason to go there.
    lone, _, _ = shaped(lambda power: 1.0 if power < -3.9 or 2 <= power < 5 else 2.0)
    assert 100 <= lone.prior_precision <= 1e5
    constant, batches, _ = shaped(lambda power: 1.0)
    assert constant.prior_precision == pytest.approx(100)
    assert batches.count == 1
    assert "untrained or damaged" in constant.message


def test_a_regression_with_targets_in_other_units_is_asked_to_check_them():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(80, 2, generator=generator)
    model = nn.Linear(2, 1)
    with torch.no_grad():
        nn.utils.vector_to_parameters(torch.tensor([1.0, 0.5, 0.0]), model.parameters())
    prices = 2e5 + 5e4 * model(x).detach() + 1e4 * torch.randn(80, 1, generator=generator)
    tuning = (
        Laplace(model.eval(), "regression", sigma=1.0)
        .fit([(x, prices)])
        .tune([(x, prices)], sigma=True)
    )
    assert tuning.all_alike
    assert "that its outputs have the units of the targets" in tuning.message
    assert "accuracy" not in tuning.message


def test_no_accuracy_is_mentioned_for_predicted_noise():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(80, 2, generator=generator)
    y = torch.randn(80, 1, generator=generator)
    model = nn.Linear(2, 2)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    la = Laplace(model.eval(), "heteroscedastic").fit([(x, y)], num_data=10**9)
    tuning = la.tune([(x, y)])
    assert tuning.all_alike
    assert "untrained or damaged" in tuning.message
    assert "accuracy" not in tuning.message


def test_points_that_are_nan_are_passed_over():
    tuning, _, _ = shaped(lambda power: math.nan if power < 0 else 1 + 0.1 * (power - 1) ** 2)
    assert tuning.prior_precision == pytest.approx(10, rel=0.1)
    assert tuning.flat[0] >= 1
    assert "The best prior precision is the smallest one at which" not in tuning.message
    with pytest.raises(ValueError, match="NaN or infinite at every"):
        shaped(lambda power: math.nan)


def heteroscedastic_problem():
    """A network with log-variances in float32, and 50 examples for it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 50), nn.Tanh(), nn.Linear(50, 2)).eval()
    x = torch.randn(50, 4)
    return model, x, torch.randn(50, 1)


@pytest.mark.parametrize("curvature", ["kfac", "ekfac", "full", "lowrank"])
def test_a_mean_noise_that_overflows_is_infinitely_bad(curvature):
    """Against the predictive's NLL in double precision, written out from the moments."""
    model, x, y = heteroscedastic_problem()
    la = Laplace(model, "heteroscedastic", curvature).fit([(x, y)])
    x = 10 * x
    tuning = la.tune([(x, y)])
    worst = min(tuning.table, key=lambda row: row["prior_precision"])
    assert worst["prior_precision"] == pytest.approx(1e-4)
    assert worst["nll"] == math.inf
    assert math.isfinite(tuning.value)
    assert la.prior_precision.item() == tuning.prior_precision
    with pytest.raises(ValueError, match="mean of the noise variance overflows"):
        la.tune([(x, y)], grid=[1e-4])
    for row in tuning.table:
        la.prior_precision = row["prior_precision"]
        mean, covariance = (moment.double() for moment in la.functional(x))
        noise = (mean[:, 1] + covariance[:, 1, 1] / 2).exp()
        if noise.max() > torch.finfo(torch.float32).max:
            assert row["nll"] == math.inf
            continue
        variance = covariance[:, 0, 0] + noise
        squares = (y[:, 0].double() - mean[:, 0]).square() / variance
        nll = 0.5 * (squares + variance.log() + math.log(2 * math.pi)).mean()
        assert row["nll"] == pytest.approx(nll.item(), rel=1e-4)


def test_a_covariance_that_is_singular_or_overflows_is_infinitely_bad():
    """In float32 a noise of 1e-3 is lost beside variances of 1e4 that two outputs share."""
    torch.manual_seed(0)
    x = torch.randn(60, 3)
    shared = nn.Linear(3, 1, bias=False)
    model = nn.Sequential(shared, Twice()).eval()
    y = model(x).detach() + 1e-3 * torch.randn(60, 2)
    la = Laplace(model, "regression", sigma=1e-3).fit_batches([(1e-6 * x[:2], 1e-6 * y[:2])])
    grid = [1e-6, 1e-4, 1.0, 1e4]
    tuning = la.tune([(x, y)], grid=grid)
    values = [row["nll"] for row in tuning.table]
    assert values[:2] == [math.inf, math.inf]
    assert math.isfinite(values[-1])
    la.prior_precision = 1e-6
    with pytest.raises(ValueError, match="singular"):
        la.predict(x)
    # The squared Jacobian, 1e38, over the prior precision is out of float32's range.
    large = torch.full((60, 3), 1e19)
    with torch.no_grad():
        shared.weight.fill_(1e-19)
    la = Laplace(nn.Sequential(shared), "binary").fit_batches([(x[:2], torch.ones(2, 1))])
    labels = torch.ones(60, 1)
    tuning = la.tune([(large, labels)], grid=[1e-3, 10.0])
    assert tuning.table[0]["nll"] == math.inf
    assert tuning.prior_precision == 10.0
    assert "smallest one at which the metric is finite" in tuning.message
    la.prior_precision = 1e-3
    with pytest.raises(ValueError, match="overflows"):
        la.predict(large)


class Twice(nn.Module):
    """One output as two."""

    def forward(self, x):
        return torch.cat([x, x], -1)


@pytest.mark.parametrize("sigma", [None, True])
def test_targets_far_from_one_leave_out_what_their_dtype_cannot_represent(sigma):
    """With residuals of 2e15 the largest value of the grid would be 4e38."""
    model, x, _ = regression(dtype=torch.float32)
    with torch.no_grad():
        model[-1].weight.mul_(2e16)
        model[-1].bias.mul_(2e16)
    target = model(x).detach() + 2e15 * torch.randn(
        120, 1, generator=torch.Generator().manual_seed(0)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        la = Laplace(model, "regression", sigma=None if sigma is None else 1.0)
        la.fit([(x, target)])
    tuning = la.tune([(x, target)], sigma=sigma)
    assert 40 < len(tuning.table) < 49
    assert tuning.sigma == pytest.approx(2e15, rel=0.2)


def test_data_that_can_be_read_once_will_do_in_any_order():
    model, x, y = problem(3.0, 1000, temperature=0.3)
    la = Laplace(model).fit([(x, y)])
    expected = la.tune([(x, y)], link=PLAIN)
    shuffled = la.tune(DataLoader(TensorDataset(x, y), batch_size=250, shuffle=True), link=PLAIN)
    assert [row["nll"] for row in shuffled.table] == pytest.approx(
        [r["nll"] for r in expected.table]
    )
    assert shuffled.flat == pytest.approx(expected.flat)
    assert la.tune(iter([(x, y)]), link=PLAIN).table == expected.table


def test_passes_of_the_front_end():
    model, x, y = problem(3.0, 1000, temperature=0.3)
    la = Laplace(model).fit([(x, y)])
    data = Passes([(x, y)])
    tuning = la.tune(data, link=PLAIN)
    assert data.count == 1
    assert la.prior_precision.item() == tuning.prior_precision
    assert tuning.value == pytest.approx(la.evaluate([(x, y)])["nll"], rel=1e-9)
    data = Passes([(x, y)])
    with_given_grid = la.tune(data, grid=[1e-4, 1e-3], link=PLAIN)
    assert (data.count, len(with_given_grid.table)) == (1, 2)
    assert (
        "Tune this posterior again with larger ones: grid=[1.0e-02,1.0e-01,1.0e+00] in Python, or "
        "the command laplace-debias tune with --prior_precisions 1.0e-02,1.0e-01,1.0e+00."
    ) in with_given_grid.message


@pytest.mark.parametrize("metric", ["nll", "brier"])
def test_standard_errors_are_those_of_the_examples(metric):
    model, x, y = problem(2.0, num_data=400, temperature=0.4)
    la = Laplace(model).fit([(x, y)])
    (row,) = la.tune([(x[:150], y[:150]), (x[150:], y[150:])], metric, [3.0], link=PLAIN).table
    probs = la.predict(x).probs
    label = probs[torch.arange(400), y]
    terms = {"nll": -label.log(), "brier": probs.square().sum(1) - 2 * label + 1}[metric]
    assert row[metric] == pytest.approx(terms.mean().item())
    assert row["standard_error"] == pytest.approx(terms.std().item() / 20)


def test_the_terms_of_an_example_are_not_independent():
    """A sequence of equal positions has no more information than one of its positions."""
    torch.manual_seed(0)
    model = nn.Linear(2, 3).double().eval()
    x = torch.randn(30, 2).double()
    y = torch.randint(3, (30,))
    la = Laplace(model).fit([(x, y)])
    y[:3] = -100
    row = la.tune([(x, y)], grid=[2.0]).table[0]
    la_of_sequences = Laplace(model).fit([(x[:, None].expand(-1, 4, -1), y[:, None].expand(-1, 4))])
    la_of_sequences.prior_precision = 1.0
    padded = y[:, None].repeat(1, 4)
    padded[5, 2:] = -100
    row_of_sequences = la_of_sequences.tune(
        [(x[:, None].expand(-1, 4, -1).contiguous(), padded)], grid=[2.0]
    ).table[0]
    log_p = la_of_sequences.predict(x[:, None].expand(-1, 4, -1)).logits.log_softmax(-1)[:, 0]
    counts = (padded >= 0).sum(1).double()
    nll = -log_p[torch.arange(30), y.clamp(min=0)]
    value = (nll * counts).sum() / counts.sum()
    residuals = counts * (nll - value)
    error = (27 / 26 * residuals.square().sum()).sqrt() / counts.sum()
    assert row_of_sequences["nll"] == pytest.approx(value.item())
    assert row_of_sequences["standard_error"] == pytest.approx(error.item())
    assert row_of_sequences["standard_error"] == pytest.approx(row["standard_error"], rel=0.5)


def test_several_labels_and_a_single_one():
    torch.manual_seed(0)
    model = nn.Linear(2, 3).double().eval()
    x = torch.randn(40, 2).double()
    y = torch.randint(2, (40, 3)).double()
    la = Laplace(model, "multilabel").fit([(x, y)])
    row = la.tune([(x, y)], "brier", grid=[1.0]).table[0]
    p = la.predict(x).mean
    scores = 2 * (p - y).square().mean(1)
    assert row["brier"] == pytest.approx(scores.mean().item())
    assert row["standard_error"] == pytest.approx(scores.std().item() / math.sqrt(40))
    la = Laplace(nn.Linear(2, 1).double().eval(), "binary").fit([(x, y[:, :1])])
    row = la.tune([(x, y[:, :1])], "brier", grid=[1.0]).table[0]
    terms = 2 * (la.predict(x).probs - y[:, 0]).square()
    assert row["standard_error"] == pytest.approx(terms.std().item() / math.sqrt(40))


def test_one_example_has_no_error():
    model, x, y = problem()
    la = Laplace(model).fit([(x, y)])
    tuning = la.tune([(x[:1], y[:1])], grid=[1.0, 2.0])
    assert tuning.flat is None
    assert tuning.table[0].keys() == {"prior_precision", "nll"}
    assert all(math.isnan(row["half_width"]) for row in tuning.compared)
    for text in (str(tuning), tuning.message):
        assert "–" in text
        assert "nan" not in text


def test_the_message_names_parameters_that_the_data_determine_well():
    """With so much data, the predictions hardly depend on the prior precision."""
    model, x, y = problem(0.3, 4000)
    la = Laplace(model, params="last_layer").fit([(x, y)], num_data=10**9)
    tuning = la.tune([(x[:300], y[:300])])
    probs = []
    for prior_precision in (1e-4, 1e8):
        la.prior_precision = prior_precision
        probs.append(la.predict(x[:300]).probs)
    assert (probs[0] - probs[1]).abs().max() < 1e-5
    assert tuning.all_alike
    assert "the training data determine the parameters of the posterior so well" in tuning.message


def test_a_network_that_knows_nothing_is_told_of():
    """All values are equal, so none is the best, and the message asks for no other grid."""
    model, x, y = problem(3.0, 60)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    tuning = Laplace(model).fit([(x, y)]).tune([(x, y)])
    assert tuning.all_alike
    assert "score about as well (worse by at most one standard error" in tuning.message
    assert "untrained or damaged" in tuning.message
    assert "tried" not in tuning.message
    few = Laplace(model).fit([(x, y)]).tune([(x, y)], grid=[1.0, 2.0])
    assert "untrained" not in few.message


@pytest.mark.parametrize("params", ["all", "last_layer"])
def test_training_data_are_recognised(params):
    """The search over the training data chose a posterior that hardly differs from the network."""
    model, x, y = problem(num_data=240)
    la = Laplace(model, params=params).fit([(x[:120], y[:120])])
    message = r"same NLL, .* probably the training data\. Tune on data"
    with pytest.warns(UserWarning, match=message):
        la.tune([(x[60:120], y[60:120]), (x[:60], y[:60])])
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message)
        la.tune([(x[120:], y[120:])])


def test_it_reads_well():
    model, x, y = problem(3.0, 1000, temperature=0.3)
    la = Laplace(model).fit([(x, y)])
    tuning = la.tune([(x, y)], link="probit")
    (chosen,) = (row for row in tuning.table if row["prior_precision"] == tuning.prior_precision)
    error = chosen["standard_error"]
    low, high = tuning.flat
    assert repr(tuning) == (
        f"<Tuning: Prior precision {tuning.prior_precision:.3g}, link {tuning.link}: nll "
        f"{tuning.value:.4g} (standard error {error:.2g}).>"
    )
    assert tuning.message.startswith(
        f"Prior precision {tuning.prior_precision:.3g}, link {tuning.link}: nll {tuning.value:.4g} "
        f"(standard error {error:.2g}). Prior precisions from {low:.3g} to {high:.3g} score "
        "about as well (worse by at most one standard error of the paired difference)."
    )
    beginning = "Scores of the alternatives minus the score of this choice, with 95 % intervals"
    assert f"{beginning}: network: +" in tuning.message
    assert "+0 ± 0" not in tuning.message  # The choice is not compared with itself.
    assert float(tuning) == tuning.prior_precision


def test_print_explains_the_choice():
    model, x, y = problem(3.0, 1000, temperature=0.3)
    la = Laplace(model).fit([(x, y)])
    tuning = la.tune([(x, y)], link="probit")
    lines = str(tuning).splitlines()
    low, high = tuning.flat
    assert lines[0] == f"{repr(tuning)[len('<Tuning: ') : -1]}"
    assert lines[1].startswith(f"Prior precisions from {low:.3g} to {high:.3g} score about as well")
    assert str(tuning.compared) in str(tuning)
    assert tuning.compared == list(tuning.compared)
    table = str(tuning.compared).splitlines()
    assert table[0].split() == [
        "prior",
        "precision",
        "temperature",
        "nll",
        "difference",
        "±",
        "(95",
        "%)",
    ]
    assert len({len(line) for line in table}) == 1
    for line, row in zip(table[1:], tuning.compared, strict=True):
        assert line.startswith(row["name"])
        assert line.split()[-2:] == [f"{row['difference']:+.2g}", f"{row['half_width']:.2g}"]
    assert table[1].split()[:3] == ["network", "none", "1"]


def test_the_choice_is_marked_among_the_candidates():
    model, x, y = problem(3.0, 1000)
    tuning = Laplace(model).fit([(x, y)]).tune([(x, y)])
    assert tuning.link.temperature == 1
    assert "Candidates compared with the choice (*); a positive difference is worse:" in str(tuning)
    marked = [line.split(" * ")[0] for line in str(tuning.compared).splitlines() if " * " in line]
    assert marked == [tuning.link.name]
    (row,) = (row for row in tuning.compared if row["name"] == tuning.link.name)
    assert row["prior_precision"] == tuning.prior_precision
    assert row["difference"] == 0


def test_the_choice_has_a_row_of_its_own_if_it_is_none_of_the_candidates():
    """The choice is the smallest prior precision that is tied with the lowest score."""
    model, x, y = problem(3.0, 1000, temperature=0.3)
    tuning = Laplace(model).fit([(x, y)]).tune([(x, y)], link="probit")
    (tempered,) = (row for row in tuning.compared if row["name"] == "probit, tempered")
    assert tempered["prior_precision"] > tuning.prior_precision
    assert tempered["difference"] < 0
    choice = tuning.compared[-1]
    assert choice["name"] == "choice"
    assert choice["prior_precision"] == tuning.prior_precision
    assert choice["difference"] == choice["half_width"] == 0
    (marked,) = (line for line in str(tuning).splitlines() if " *" in line)
    assert marked.startswith("choice *")


def test_it_says_why_the_alternative_that_looks_best_is_not_taken():
    """The same 80 examples of a network that is too sure, and then 20 times as many."""
    model, x, y = problem(3.0, 80, temperature=0.3)
    la = Laplace(model).fit([(x, y)])
    few = la.tune([(x, y)], grid=[1e6])
    lowest = min(few.compared, key=lambda row: row["difference"])
    assert lowest["difference"] < 0
    assert few.link == Link("pairwise")
    (note,) = few.notes
    score = f'The score of "{lowest["name"]}" is better (lower by {-lowest["difference"]:.2g})'
    assert note.startswith(score)
    assert "fewer than 100 examples (here 80)" in note
    assert note in str(few)
    many = la.tune([(x.repeat(20, 1), y.repeat(20))], grid=[1e6])
    assert many.link.temperature > 1
    assert "not chosen" not in many.message
    # As many labels of each class as the network says, but for two: T = 1 is kept as equally good.
    counts = (100 * model(x).softmax(1)).round().long()
    labels = torch.arange(3).repeat(80).repeat_interleave(counts.flatten())
    data = [(x.repeat_interleave(counts.sum(1), 0), labels)]
    with_matching_labels = la.tune(data, grid=[1e6])
    assert with_matching_labels.link == Link("pairwise")
    lowest = min(row["difference"] for row in with_matching_labels.compared)
    error = with_matching_labels.table[0]["standard_error"]
    assert ("keeps the default link" in with_matching_labels.message) == (-lowest > 1e-3 * error)


# ------------------------------------------------------------- the link and its temperature


def test_links_and_temperatures_are_those_of_predictions_one_by_one():
    """The rows of the comparison, against predictions at every point of the grid."""
    model, x, y = problem(3.0, 300, temperature=0.3)
    la = Laplace(model).fit([(x, y)])
    grid = [1e-3, 1e-2, 0.1, 1.0]
    data = Passes([(x[:100], y[:100]), (x[100:], y[100:])])
    tuning = la.tune(data, grid=grid)
    assert data.count == 1

    def losses(delta, link):
        la.prior_precision = delta
        return -la.predict(x, link=link).log_prob(y)

    def best_candidate(links):
        candidates = [(delta, link) for delta in grid for link in links]
        return min(candidates, key=lambda candidate: losses(*candidate).mean())

    chosen_losses = losses(tuning.prior_precision, tuning.link)
    assert tuning.value == pytest.approx(chosen_losses.mean().item(), rel=1e-12)
    rows = {row["name"]: row for row in tuning.compared}
    for name in ("pairwise", "probit"):
        for key, temperatures in ((name, [1.0]), (f"{name}, tempered", TEMPERATURES)):
            row = rows.pop(key)
            delta, link = best_candidate([Link(name, T) for T in temperatures])
            assert (row["prior_precision"], row["temperature"]) == (delta, link.temperature)
            difference = losses(delta, link) - chosen_losses
            assert row["difference"] == pytest.approx(difference.mean().item(), abs=1e-12)
            half_width = 1.96 * difference.std().item() / math.sqrt(300)
            assert row["half_width"] == pytest.approx(half_width, abs=1e-12)
    logits = model(x).detach()
    for key, temperatures in (("network", [1.0]), ("temperature scaling", TEMPERATURES)):
        row = rows.pop(key)
        nlls = [torch.nn.functional.cross_entropy(logits / T, y).item() for T in temperatures]
        assert row["nll"] == pytest.approx(min(nlls), rel=1e-12)
        assert row["prior_precision"] is None
    assert not rows


@pytest.mark.parametrize("metric", ["nll", "brier"])
def test_what_is_chosen_is_set_and_is_what_evaluate_gives(metric, tmp_path):
    model, x, y = problem(3.0, 400, temperature=0.3)
    la = Laplace(model).fit([(x, y)])
    tuning = la.tune([(x, y)], metric)
    assert la.link == tuning.link
    assert la.evaluate([(x, y)])[metric] == pytest.approx(tuning.value, rel=1e-6)
    la.save(tmp_path / "posterior.safetensors")
    loaded = Laplace.load(tmp_path / "posterior.safetensors", model)
    assert loaded.link == tuning.link
    assert loaded.evaluate([(x, y)])[metric] == pytest.approx(tuning.value, rel=1e-6)


def test_a_temperature_is_taken_unless_the_simplest_link_is_as_good():
    """With the prior precision pinned where the posterior adds nothing."""
    model, x, y = problem(3.0, 400, temperature=0.3)
    la = Laplace(model).fit([(x, y)])
    too_sure = la.tune([(x, y)], grid=[1e6])
    assert too_sure.link.temperature == pytest.approx(1 / 0.3, rel=0.2)
    assert too_sure.link.name == "pairwise"
    (plain,) = (row for row in too_sure.compared if row["name"] == "pairwise")
    assert plain["difference"] > plain["half_width"] / 1.96
    # As many labels of each class as the network says: no temperature is better than 1.
    counts = (100 * model(x).softmax(1)).round().long()
    labels = torch.arange(3).repeat(400).repeat_interleave(counts.flatten())
    data = [(x.repeat_interleave(counts.sum(1), 0), labels)]
    assert la.tune(data, grid=[1e6]).link == Link("pairwise")


def test_beside_a_temperature_the_smallest_prior_precision_that_is_as_good_is_taken():
    model, x, y = problem(3.0, 400, temperature=0.3)
    tuning = Laplace(model).fit([(x, y)]).tune([(x, y)], link="pairwise")
    assert tuning.link.temperature != 1
    values = {row["prior_precision"]: row["nll"] for row in tuning.table}
    least = min(values.values())
    error = max(row["standard_error"] for row in tuning.table)
    assert values[tuning.prior_precision] - least <= 0.25 * error
    smaller = max(delta for delta in values if delta < tuning.prior_precision)
    (chosen,) = (row for row in tuning.table if row["prior_precision"] == tuning.prior_precision)
    assert values[smaller] - least > 1e-3 * chosen["standard_error"]


def test_few_examples_take_the_simplest_link_and_another_link_can_win():
    model, x, y = problem(3.0, 400, temperature=0.3)
    la = Laplace(model).fit([(x, y)])
    for start in range(0, 400, 80):
        few = slice(start, start + 20)
        assert la.tune([(x[few], y[few])]).link == Link("pairwise")
    assert la.tune([(x[:99], y[:99])], grid=[1e6]).link == Link("pairwise")
    assert la.tune([(x[:100], y[:100])], grid=[1e6]).link.temperature > 2
    la.prior_precision = 0.01
    probs = la.predict(x, link="probit").probs
    g = torch.Generator().manual_seed(0)
    many = torch.multinomial(probs, 50, replacement=True, generator=g)
    data = [(x.repeat_interleave(50, 0), many.flatten())]
    assert la.tune(data, grid=[0.01]).link.name == "probit"


def test_a_link_that_is_asked_for_is_the_only_one():
    model, x, y = problem(3.0, 400, temperature=0.3)
    la = Laplace(model).fit([(x, y)])
    tuning = la.tune([(x, y)], grid=[1e-2, 1e6], link="exact")
    assert {row["name"] for row in tuning.compared} == {
        "network", "temperature scaling", "exact", "exact, tempered"
    }  # fmt: skip
    assert tuning.link.name == "exact"
    alone = la.tune([(x, y)], grid=[1e-2, 1.0], link=Link("probit", 1.5))
    assert alone.link == Link("probit", 1.5)
    for row in alone.table:
        la.prior_precision = row["prior_precision"]
        predictive = la.predict(x, link=Link("probit", 1.5))
        assert row["nll"] == pytest.approx(-predictive.log_prob(y).mean().item())
    at_end = la.tune([(x, y)], grid=[1e2, 1e4, 1e6, 1e8, 1e10], link="pairwise")
    assert at_end.link.temperature != 1
    assert at_end.prior_precision < 1e10
    assert at_end.flat[0] <= at_end.prior_precision < at_end.flat[1] == 1e10
    assert la.tune([(x, y)], link="pairwise").flat[1] == 1e8


def test_evidence_is_a_function_of_its_own_and_leaves_the_link():
    model, x, y = problem()
    la = Laplace(model).fit([(x, y)])
    la.link = "exact"
    tuning = la.tune_evidence()
    assert la.prior_precision.item() == tuning.prior_precision
    assert (la.link, tuning.link, tuning.compared) == (Link("exact"), None, [])
    assert la.tune(method="marglik") == tuning
    assert len(la.tune_evidence(per="kind").table) == 2
    with pytest.raises(ValueError, match=r"Use tune_evidence\(per='kind'\)"):
        la.tune([(x, y)], per="kind")
    with pytest.raises(ValueError, match=r"or use tune_evidence\(\)"):
        la.tune()


# ------------------------------------------------------------------ the noise on held-out data


def regression(noise=0.1, dtype=torch.float64, num_outputs=1):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(120, 2, generator=g, dtype=torch.float64)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, num_outputs)).double().eval()
    scales = noise * torch.arange(1.0, num_outputs + 1)
    y = model(x).detach() + scales * torch.randn(120, num_outputs, generator=g).double()
    return model.to(dtype), x.to(dtype), y.to(dtype)


@pytest.mark.parametrize("sigma", [None, 0.03, [1.0, 2.0]])
def test_noise_and_prior_precision_have_the_least_validation_nll(sigma):
    """Fits with other noises and prior precisions do not predict the held-out targets better."""
    model, x, y = regression(num_outputs=2 if isinstance(sigma, list) else 1)
    train = [(x[:40], y[:40])]
    held_out = [(x[40:90], y[40:90]), (x[90:], y[90:])]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        la = Laplace(model, "regression", sigma=sigma).fit(train)
    tuning = la.tune(held_out, sigma=None if sigma is None else True)
    first = torch.as_tensor(tuning.sigma).flatten()[0].item()
    ratio = torch.as_tensor(tuning.sigma).flatten() / first

    def nll(log_sigma, log_delta):
        refitted = Laplace(
            model, "regression", sigma=ratio * math.exp(log_sigma), backend="hooks",
            prior_precision=math.exp(log_delta),
        ).fit(train)  # fmt: skip
        return -refitted.predict(x[40:]).log_prob(y[40:]).mean().item()

    start = [math.log(first), math.log(tuning.prior_precision)]
    assert nll(*start) == pytest.approx(tuning.value, rel=1e-9)
    assert la.evaluate(held_out)["nll"] == pytest.approx(tuning.value, rel=1e-9)
    # The closed form is exact in sigma; the prior precision is known to the resolution.
    for step in (-0.02, 0.02):
        assert nll(start[0] + step, start[1]) > tuning.value
    for step in (-1, 1):
        assert nll(start[0], start[1] + step * math.log(resolution(tuning))) > tuning.value - 1e-6
    assert min(row["nll"] for row in tuning.table) == tuning.value
    assert 0.7 < first / 0.1 < 1.3
    assert not la.likelihood.is_assumed


def test_a_noise_that_was_given_stays_and_one_that_was_not_is_tuned():
    model, x, y = regression()
    data = [(x, y)]
    with_given_noise = Laplace(model, "regression", sigma=0.5).fit(data)
    assert with_given_noise.tune(data).sigma is None
    assert with_given_noise.tune(method="marglik").sigma is None
    assert with_given_noise.likelihood.sigma == 0.5
    for arguments in (
        {"loader": data},
        {"method": "marglik"},
        {"method": "marglik", "per": "block"},
    ):
        with pytest.warns(UserWarning, match="is assumed"):
            la = Laplace(model, "regression").fit(data)
        assert la.tune(**arguments).sigma == pytest.approx(0.1, rel=0.3)
        assert la.likelihood.sigma == pytest.approx(0.1, rel=0.3)
    with pytest.warns(UserWarning, match="is assumed"):
        la = Laplace(model, "regression").fit(data)
    tuning = la.tune(data, grid=[1.0, 2.0])
    assert tuning.sigma is None
    assert "assumed to be 1.0" in tuning.message
    off = la.tune(data, sigma=False)
    assert off.sigma is None
    assert "assumed" not in off.message


def test_a_given_noise_that_is_too_large_is_named_as_the_reason_for_the_largest_value():
    """The noise of the data is 0.1."""
    model, x, y = regression()
    data = [(x, y)]
    la = Laplace(model, "regression", sigma=0.5).fit(data)
    reason = "`sigma` is not tuned here, because it was set before."
    tuning = la.tune(data)
    assert tuning.prior_precision == pytest.approx(1e8)
    assert reason in tuning.message
    assert reason in la.tune(data, grid=[1.0, 10.0]).message
    # The advice leads to a better score, and the note disappears.
    better = la.tune(data, sigma=True)
    assert better.value < tuning.value - 0.5
    assert reason not in better.message
    assert reason not in la.tune(data, grid=[1.0, 10.0], sigma=False).message
    too_small = Laplace(model, "regression", sigma=0.02).fit(data).tune(data)
    assert too_small.prior_precision < 1e8
    assert reason not in too_small.message


def test_a_noise_that_cannot_be_tuned_on_data_says_so():
    model, x, y = regression()
    la = Laplace(model, "regression", sigma=0.5).fit([(x, y)])
    with pytest.raises(ValueError, match=r"Remove `grid=` .* or `sigma="):
        la.tune([(x, y)], sigma=True, grid=[1.0])
    with pytest.raises(ValueError, match="validation data are zero"):
        la.tune([(x, model(x).detach())], sigma=True)
    la = Laplace(model, "regression", sigma=0.5, fisher="empirical").fit([(x, y)])
    with pytest.raises(ValueError, match="does not work after a fit with `fisher="):
        la.tune([(x, y)], sigma=True)
    la = Laplace(model, "binary").fit([(x, (y > 0).double())])
    with pytest.raises(ValueError, match="but the likelihood is Bernoulli"):
        la.tune([(x, (y > 0).double())], sigma=True)


@pytest.mark.parametrize("params", ["all", "last_layer"])
@pytest.mark.parametrize("link", ["probit", "bridge", "bridge_norm"])
def test_the_choice_is_compared_with_the_network_itself(link, params):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 3
    x = torch.randn(300, 4, dtype=torch.float64)
    y = Categorical(logits=0.6 * model(x)).sample()
    la = Laplace(model, params=params).fit([(x[:100], y[:100])])
    x = x[100:]
    y = y[100:]
    tuning = la.tune([(x, y)], link=link)
    rows = {row["name"]: row["nll"] for row in tuning.compared}
    logits = model(x).detach()
    nlls = [F.cross_entropy(logits / T, y).item() for T in TEMPERATURES]
    assert rows["network"] == pytest.approx(F.cross_entropy(logits, y).item(), abs=1e-6)
    assert rows["temperature scaling"] == pytest.approx(min(nlls), abs=1e-6)


def test_temperature_scaling_of_the_network_by_the_row_of_the_comparison():
    """docs/how-to/temperature-scaling.md does the same; `la.link` has a different temperature."""
    model, x, y = problem(3.0, 400, temperature=0.3)
    la = Laplace(model).fit([(x[:200], y[:200])])
    x = x[200:]
    y = y[200:]
    compared = la.tune([(x, y)], grid=[1.0]).compared
    (row,) = (row for row in compared if row["name"] == "temperature scaling")
    assert la.link.temperature != row["temperature"]
    la.link = Link("probit", row["temperature"])
    probs = la.predict(x, method="temperature").probs
    torch.testing.assert_close(probs, (model(x).detach() / row["temperature"]).softmax(1))
    assert F.nll_loss(probs.log(), y).item() == pytest.approx(row["nll"], rel=1e-9)


@pytest.mark.parametrize("params", ["last_layer", "all"])
@pytest.mark.parametrize("name", ["probit", "pairwise"])
def test_the_prior_precision_is_tuned_for_a_link_with_a_temperature(params, name):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)).double().eval()
    x = torch.randn(260, 3).double()
    y = torch.randint(3, (260,))
    la = Laplace(model, params=params).fit([(x[:60], y[:60])])
    link = Link(name, 1.5)
    grid = [0.1, 1.0, 10.0, 100.0]
    tuning = la.tune([(x[60:], y[60:])], link=link, grid=grid)
    assert la.link == link
    nlls = []
    for delta in grid:
        la.prior_precision = delta
        log_probs = la.predict(x[60:], link=link).log_prob(y[60:])
        nlls.append(float(-log_probs.mean()))
    assert [row["nll"] for row in tuning.table] == pytest.approx(nlls, abs=1e-9)
