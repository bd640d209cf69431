"""Every command on a table of counts (`--task=poisson`) and on one of successes (a user's class).

The class is that of `docs/how-to-add.md`; the command line gets its import path.
"""

import json
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch
import user_files
from scipy import stats
from torch import nn

from laplace_debias import Laplace
from laplace_debias.cli import main
from laplace_debias.sources import SourceSettings, load

TRIALS = 6
USER_LIKELIHOOD = '''
import torch
from torch.distributions import Binomial as BinomialDistribution
from torch.distributions import Categorical, Independent, MixtureSameFamily

from laplace_debias import Likelihood


class Binomial(Likelihood):
    """Numbers of successes of 6 trials; outputs are logits."""

    def check(self, outputs, targets):
        if targets.shape != outputs.shape:
            raise ValueError("Pass one number of successes per output.")

    def distribution(self, outputs):
        return BinomialDistribution(6, logits=outputs, validate_args=False)

    def nll(self, outputs, targets):
        return -self.distribution(outputs).log_prob(targets).sum(-1)

    def hessian_root(self, outputs):
        return torch.diag_embed(self.distribution(outputs).variance.sqrt()).movedim(-1, 0)

    def sample(self, outputs, uniforms):
        counts = torch.arange(7, dtype=outputs.dtype).view(-1, 1, 1)
        cumulative = self.distribution(outputs).log_prob(counts).exp().cumsum(0)
        return (cumulative[:-1] < uniforms).sum(0).to(outputs.dtype)

    def predictive(self, mean, covariance):
        if covariance is None:
            return Independent(self.distribution(mean), 1)
        is_matrix = covariance.ndim > mean.ndim
        variances = covariance.diagonal(dim1=-2, dim2=-1) if is_matrix else covariance
        probit = mean / (1 + torch.pi / 8 * variances).sqrt()
        return Independent(self.distribution(probit), 1)

    def mixture(self, samples):
        outputs = samples.movedim(0, -1)
        equal = Categorical(torch.ones_like(outputs))
        return Independent(MixtureSameFamily(equal, self.distribution(outputs)), 1)

    def exported(self, mean, covariance):
        variances = covariance.diagonal(dim1=-2, dim2=-1)
        return {"mean": 6 * torch.sigmoid(mean / (1 + torch.pi / 8 * variances).sqrt())}
'''


def table(path, draw):
    """Write rows of four numbers, and a target that is drawn from a score of them."""
    rng = np.random.default_rng(0)
    path.mkdir()
    for split, rows in (("train", 200), ("val", 100), ("test", 160)):
        x = rng.normal(size=(rows, 4))
        columns = {f"x{n}": x[:, n] for n in range(4)}
        columns["y"] = draw(rng, 1 + x[:, 0] + 0.5 * x[:, 1])
        pandas.DataFrame(columns).to_csv(path / f"{split}.csv", index=False)


def trained(folder, task, loss):
    """Train the network of the table, save its weights in `net.pt`, and load it with its data."""
    options = {
        "model": "nets:rows",
        "model_args": {"outputs": 1},
        "data": "data",
        "target": "y",
        "task": task,
        "device": "cpu",
        "progress": False,
    }
    model = load(SourceSettings(**options)).model.train()
    x, y = user_files.every(load(SourceSettings(**options)).train)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
    for _ in range(150):
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()
    user_files.weights(folder / "net.pt", model)
    return load(SourceSettings(**options, checkpoint=Path("net.pt")))


COMMON = ["--model=nets:rows", "--model_args.outputs=1", "--data=data", "--target=y"]
COMMON += ["--checkpoint=net.pt", "--device=cpu", "--progress=false"]
POSTERIOR = "--posterior=p.safetensors"


@pytest.fixture
def counts(tmp_path, monkeypatch):
    user_files.networks(tmp_path, monkeypatch)
    table(tmp_path / "data", lambda rng, score: rng.poisson(np.exp(score)))
    return trained(tmp_path, "poisson", nn.PoissonNLLLoss())


@pytest.fixture
def successes(tmp_path, monkeypatch):
    user_files.networks(tmp_path, monkeypatch)
    user_files.forget(monkeypatch, "own_likelihoods")
    (tmp_path / "own_likelihoods.py").write_text(USER_LIKELIHOOD)
    table(tmp_path / "data", lambda rng, score: rng.binomial(TRIALS, 1 / (1 + np.exp(-score))))

    def loss(outputs, targets):
        return nn.functional.binary_cross_entropy_with_logits(outputs, targets / TRIALS)

    return trained(tmp_path, "own_likelihoods:Binomial", loss)


def run_json(capsys, *arguments):
    """Run a command, and read what it prints as JSON."""
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def metrics_on_set(results, method, set_name="test"):
    """The metrics of a method on a set."""
    rows = [row for row in results["rows"] if (row["method"], row["set"]) == (method, set_name)]
    return {row["metric"]: row["value"] for row in rows}


def test_counts_go_through_every_command(counts, capsys):
    task = "--task=poisson"
    run_json(capsys, "fit", *COMMON, task, "--output=p.safetensors")
    tuned = run_json(capsys, "tune", *COMMON, task, POSTERIOR)
    assert tuned["metric"] == "nll"
    run_json(capsys, "predict", *COMMON, task, POSTERIOR, "--output=p.csv")
    evaluated = run_json(capsys, "evaluate", *COMMON, task, POSTERIOR)
    reported = run_json(capsys, "report", *COMMON, task, "--output=run", "--ood.far=data/test.csv")

    x, y = user_files.every(counts.test)
    y = y[:, 0].double().numpy()
    with torch.no_grad():
        rates = counts.model(x)[:, 0].double().exp().numpy()
    network_metrics = metrics_on_set(reported, "network")
    assert network_metrics["nll"] == pytest.approx(-stats.poisson.logpmf(y, rates).mean(), rel=1e-6)
    assert network_metrics["mae"] == pytest.approx(np.abs(y - rates).mean(), rel=1e-6)
    assert network_metrics["rmse"] == pytest.approx(np.sqrt(((y - rates) ** 2).mean()), rel=1e-6)
    assert network_metrics["scaled_error"] == pytest.approx(
        np.sqrt(((y - rates) ** 2 / rates).mean()), rel=1e-6
    )
    low = stats.poisson.ppf(0.025, rates)
    high = stats.poisson.ppf(0.975, rates)
    assert network_metrics["coverage"] == pytest.approx(((low <= y) & (y <= high)).mean(), abs=1e-9)
    assert network_metrics["width"] == pytest.approx((high - low).mean(), abs=1e-9)
    assert metrics_on_set(evaluated, "network") == network_metrics

    la = Laplace.load("p.safetensors", counts.model)
    log_prob = la.predict(x).log_prob(torch.from_numpy(y)[:, None])
    posterior = metrics_on_set(evaluated, "posterior-p")
    assert posterior["nll"] == pytest.approx(-log_prob.mean().item(), rel=1e-5)
    assert 0.9 <= posterior["coverage"] <= 1
    columns = pandas.read_csv("p.csv")
    moments = la.functional(x, diagonal=True)
    mean, variance = (moment[:, 0].double().numpy() for moment in moments)
    np.testing.assert_allclose(columns["mean"], np.exp(mean + variance / 2), rtol=1e-4)
    for quantile, name in ((0.025, "lower"), (0.975, "upper")):
        ends = columns[name][:20]
        for end, m, v in zip(ends, mean[:20], variance[:20], strict=True):
            assert probability_up_to(end - 1, m, v) < quantile
            assert quantile <= probability_up_to(end, m, v) + 1e-6

    run_json(capsys, "predict", *COMMON, task, POSTERIOR, "--method=map", "--output=map.csv")
    columns = pandas.read_csv("map.csv")
    np.testing.assert_array_equal(columns["lower"], low)
    np.testing.assert_array_equal(columns["upper"], high)

    options = ["--examples=40", "--eigenpairs=2", "--max_matvecs=60", "--tolerance=1e-6"]
    spectrum = run_json(capsys, "spectrum", *COMMON, task, *options, "--output=spectrum")
    x_train, _ = user_files.every(counts.train)
    largest = largest_eigenvalue(counts.model, x_train[:40])
    assert max(spectrum["eigenvalues"]) == pytest.approx(largest, rel=1e-4)

    page = Path(reported["page"]).read_text(encoding="utf-8")
    assert "Do the intervals contain as many targets" in page
    assert "MAE" in page
    assert any("of the targets" in sentence for sentence in reported["conclusion"])
    assert main(["report", "--from=run"]) == 0


def largest_eigenvalue(model, x):
    """The largest eigenvalue of the GGN of the mean Poisson loss of some inputs."""
    rows = []
    for row in x:
        gradients = torch.autograd.grad(model(row[None])[0, 0], model.parameters())
        rows.append(torch.cat([gradient.flatten() for gradient in gradients]))
    J = torch.stack(rows).double()
    with torch.no_grad():
        weights = model(x).double().exp() / len(x)
    return torch.linalg.eigvalsh(J.T @ (weights * J))[-1].item()


def probability_up_to(count, mean, variance):
    """The probability of at most a count, for a normal log-rate, by a fine sum over it."""
    f = mean + np.sqrt(variance) * np.linspace(-9, 9, 4001)
    weights = stats.norm.pdf(np.linspace(-9, 9, 4001))
    return (weights * stats.poisson.cdf(count, np.exp(f))).sum() / weights.sum()


def test_what_is_no_count_is_refused_before_the_work(counts, capsys):
    frame = pandas.read_csv("data/train.csv")
    frame.loc[3, "y"] = -1
    frame.to_csv("data/train.csv", index=False)
    assert main(["fit", *COMMON, "--task=poisson", "--output=q.safetensors"]) == 2
    assert "Counts must be whole numbers of at least 0" in capsys.readouterr().err


def test_a_posterior_of_another_task_is_refused(counts, capsys):
    assert main(["fit", *COMMON, "--task=poisson", "--output=p.safetensors"]) == 0
    for command in (["tune"], ["predict", "--output=p.csv"], ["evaluate"]):
        name, *options = command
        assert main([name, *COMMON, "--task=regression", POSTERIOR, *options]) == 2
        message = capsys.readouterr().err
        assert "was fitted with --task=poisson, but this command uses --task=regression" in message


def test_the_import_path_of_a_task_may_be_repeated(counts, capsys):
    task = "--task=laplace_debias:Poisson"
    run_json(capsys, "fit", *COMMON, task, "--output=p.safetensors")
    run_json(capsys, "predict", *COMMON, task, POSTERIOR, "--output=p.csv")
    other = "--task=laplace_debias:Gaussian"
    assert main(["predict", *COMMON, other, POSTERIOR, "--output=q.csv"]) == 2
    assert "was fitted with --task=poisson" in capsys.readouterr().err


def test_commands_on_a_saved_posterior_use_its_task(counts, capsys):
    run_json(capsys, "fit", *COMMON, "--task=poisson", "--output=p.safetensors")
    for task, output in ((["--task=poisson"], "named.csv"), ([], "saved.csv")):
        run_json(capsys, "predict", *COMMON, *task, POSTERIOR, f"--output={output}")
    assert Path("saved.csv").read_text() == Path("named.csv").read_text()
    assert run_json(capsys, "evaluate", *COMMON, POSTERIOR)["task"] == "poisson"
    assert main(["tune", *COMMON, POSTERIOR]) == 0


def test_a_likelihood_of_ones_own_goes_through_every_command(successes, capsys):
    task = "--task=own_likelihoods:Binomial"
    run_json(capsys, "fit", *COMMON, task, "--output=p.safetensors")
    assert main(["tune", *COMMON, POSTERIOR]) == 2
    assert "own_likelihoods:Binomial" in capsys.readouterr().err
    run_json(capsys, "predict", *COMMON, task, POSTERIOR, "--output=p.csv")
    evaluated = run_json(capsys, "evaluate", *COMMON, task, POSTERIOR)
    reported = run_json(capsys, "report", *COMMON, task, "--output=run", "--ood.far=data/test.csv")
    assert reported["task"] == "Binomial"

    x, y = user_files.every(successes.test)
    y = y[:, 0].double().numpy()
    with torch.no_grad():
        p = successes.model(x)[:, 0].double().sigmoid().numpy()
    network_metrics = metrics_on_set(reported, "network")
    assert network_metrics["nll"] == pytest.approx(
        -stats.binom.logpmf(y, TRIALS, p).mean(), rel=1e-6
    )
    assert network_metrics["mae"] == pytest.approx(np.abs(y - TRIALS * p).mean(), rel=1e-6)
    # `torch.distributions.Binomial` has no distribution function, so there are no intervals.
    assert "coverage" not in network_metrics
    assert metrics_on_set(evaluated, "network") == network_metrics
    assert {row["metric"] for row in reported["rows"] if row["set"] == "far"} >= {"auroc"}

    likelihood = successes.likelihood
    la = Laplace.load("p.safetensors", successes.model, likelihood=likelihood)
    predictive = la.predict(x)
    columns = pandas.read_csv("p.csv")
    np.testing.assert_allclose(columns["mean"], predictive.mean[:, 0], rtol=1e-5)
    nll = -predictive.log_prob(torch.from_numpy(y)[:, None]).mean().item()
    assert metrics_on_set(evaluated, "posterior-p")["nll"] == pytest.approx(nll, rel=1e-5)
    la.export("p.pt2", x)
    program = torch.export.load("p.pt2").module()
    torch.testing.assert_close(program(x)["mean"], predictive.mean)
    report = la.evaluate(successes.test)
    assert report["nll"].value == pytest.approx(nll, rel=1e-5)
