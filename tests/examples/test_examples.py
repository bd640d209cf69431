"""The examples run, and they print the results that their first lines promise."""

import importlib.util
import itertools
import math
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import load_file

from laplace_debias import Laplace
from laplace_debias.cli import main as command_line
from laplace_debias.commands import COMMANDS

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))

# Values of the examples' constants that reduce their steps; these examples have no options.
CONSTANTS = {
    "demo": {"EPOCHS": 4, "DRAWS": 2, "PRIOR_PRECISIONS": (0.178, 5.62)},
    "influence_functions": {"EPOCHS": 2, "DAMPING": 0.1},
    "matrix_free_posterior": {"NUM_STEPS": 20, "NUM_SAMPLES": 4},
    "newton_step": {"NUM_STEPS": 2, "SHOWN": (0, 1, 2)},
    "pruning": {"EPOCHS": 2, "NUM_PRODUCTS": 5},
    "quickstart": {"EPOCHS": 2},
    "spectrum": {"NUM_STEPS": 1, "EVERY": 2, "NUM_PRODUCTS": 10, "NUM_PROBES": 1, "TOL": 0.3},
}
WITH_PICTURES = {"active_learning", "regression_1d", "unfamiliar_inputs", *CONSTANTS} - {
    "quickstart"
}


@pytest.fixture
def example(tmp_path, monkeypatch, capsys):
    """Run an example in an empty folder. Return the result of `main` and the printed text."""
    monkeypatch.chdir(tmp_path)

    def run(name, *options):
        module = module_of(name)
        for constant, value in CONSTANTS.get(name, {}).items():
            monkeypatch.setattr(module, constant, value)
        result = module.main(*options)
        return result, capsys.readouterr().out

    return run


def module_of(name):
    path = ROOT / "examples" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def check_pictures(example_name, folder, printed):
    """Check that the pictures that an example names exist."""
    pictures = re.findall(r"^Picture: (\S+)$", printed, re.MULTILINE)
    assert bool(pictures) == (example_name in WITH_PICTURES)
    for picture in pictures:
        assert (folder / picture).read_bytes().startswith(b"\x89PNG")


def numbers_of(printed, start):
    """The numbers with a decimal point in the line that begins with `start`."""
    (line,) = [line for line in printed.splitlines() if line.startswith(start)]
    return [float(number) for number in re.findall(r"-?\d+\.\d+", line)]


@pytest.mark.slow
@pytest.mark.parametrize("name", CONSTANTS)
def test_examples_of_linear_algebra_run_at_reduced_size(name, example, tmp_path):
    """Every line of them in a few seconds; `make examples` runs them as they are."""
    _, printed = example(name)
    assert printed
    check_pictures(name, tmp_path, printed)


@pytest.mark.slow
def test_the_posterior_as_prior_remembers_more_tasks(example):
    options = ["--tasks", "3", "--seeds", "1", "--steps", "150", "--methods", "fine-tuning", "kfac"]
    curves, _ = example("continual_learning", options)
    (forgets,) = curves["fine-tuning"]
    (remembers,) = curves["kfac"]
    assert len(forgets) == len(remembers) == 3
    assert forgets[0] == remembers[0]  # the first task has no earlier one
    assert remembers[-1] > forgets[-1] + 0.1


def test_every_example_is_run():
    tested = set(re.findall(r'example\(\s*"(\w+)"', Path(__file__).read_text(encoding="utf-8")))
    assert tested | set(CONSTANTS) == {path.stem for path in EXAMPLES}


def test_a_page_lists_every_example():
    listed = re.findall(
        r"\[\w+\.py\]\(\.\./\.\./examples/(\w+)\.py\)",
        (ROOT / "docs/how-to/examples.md").read_text(encoding="utf-8"),
    )
    assert sorted(listed) == [path.stem for path in EXAMPLES]


@pytest.mark.slow
def test_classification_tunes_the_nll_and_prints_what_it_returns(example):
    metrics_by_name, printed = example("classification", ["--epochs", "60", "--seed", "1"])
    network = metrics_by_name["network"]
    laplace = metrics_by_name["Laplace"]
    assert network["accuracy"] > 0.9
    # It over-fits a thousand images: less certain is better, on other images than were tuned on.
    assert laplace["nll"] < network["nll"]
    assert laplace["mean_entropy"] > network["mean_entropy"]
    assert laplace["auroc_no_digits"] > 0.7
    for name, metrics in metrics_by_name.items():
        assert metrics["nll"] == pytest.approx(numbers_of(printed, f"{name}:")[1], abs=1e-4)


@pytest.mark.slow
def test_a_posterior_separates_unfamiliar_inputs_that_a_temperature_does_not(example, tmp_path):
    means, printed = example("unfamiliar_inputs", ["--seeds", "1"])
    network, tempered, posterior = (means[name] for name in ("network", "temperature", "Laplace"))
    assert posterior["auroc"] > 0.2 + max(network["auroc"], tempered["auroc"])
    assert posterior["nll"] < tempered["nll"] < network["nll"]
    for name, scores in means.items():
        assert numbers_of(printed, f"mean, {name}:") == pytest.approx(
            [scores["nll"], scores["auroc"]], abs=1e-3
        )
    check_pictures("unfamiliar_inputs", tmp_path, printed)


def test_regression_is_less_certain_between_the_data_and_beyond(example, tmp_path):
    results, printed = example("regression_1d", [])
    assert results["in the gap"] > 4 * results["at the data"]
    assert results["outside"] > 4 * results["at the data"]
    assert results["sigma"] == pytest.approx(module_of("regression_1d").NOISE, rel=0.3)
    check_pictures("regression_1d", tmp_path, printed)


def test_regression_on_a_table_covers_what_its_own_residuals_do_not(example):
    results, printed = example("regression_table", ["--splits", "2"])
    residuals, held_out, laplace = results.values()
    assert residuals["in the 95 % intervals"] < 0.92 < laplace["in the 95 % intervals"]
    assert laplace["NLL (nats)"] < residuals["NLL (nats)"]
    assert residuals["RMSE"] == held_out["RMSE"] == pytest.approx(laplace["RMSE"])
    assert laplace["NLL (nats)"] == pytest.approx(numbers_of(printed, "Laplace")[0], abs=1e-3)


def test_regression_on_a_table_is_evaluated_in_the_units_of_the_table():
    unit = torch.tensor(7.0)
    noise = 0.5
    y = torch.linspace(-1, 1, 9, dtype=torch.float64)[:, None]
    evaluate = module_of("regression_table").evaluate
    metrics = evaluate(torch.distributions.Normal(y * 0, noise), y, unit)
    nll, rmse, covered, width = (float(value) for value in metrics.values())
    # By hand, for targets that were never standardised.
    sigma = noise * 7
    squares = [(7 * float(value)) ** 2 for value in y]
    by_hand = [math.log(sigma * math.sqrt(2 * math.pi)) + s / (2 * sigma**2) for s in squares]
    assert nll == pytest.approx(sum(by_hand) / 9)
    assert rmse == pytest.approx(math.sqrt(sum(squares) / 9))
    assert covered == pytest.approx(sum(s <= (1.959964 * sigma) ** 2 for s in squares) / 9)
    assert width == pytest.approx(2 * 1.959964 * sigma, rel=1e-5)


def test_the_last_layer_of_a_timm_network_keeps_its_decisions(example):
    results, printed = example("timm_last_layer", ["--epochs", "4", "--train", "100"])
    assert "classifier.weight, classifier.bias, 2,570 of" in printed
    # Whatever Laplace does to the probabilities, the classes stay nearly those of the network.
    assert results["after"]["accuracy"] == pytest.approx(results["before"]["accuracy"], abs=0.02)
    assert results["after"]["nll"] <= results["before"]["nll"] + 0.01
    assert numbers_of(printed, "after:")[1] == pytest.approx(results["after"]["nll"], abs=1e-4)


@pytest.mark.slow
def test_a_posterior_over_adapters_is_less_sure_of_mixed_reviews(example):
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    results, printed = example("hugging_face_lora", ["--epochs", "15"])
    assert results["network nll"] < math.log(2)
    assert results["Laplace mixed"] > results["Laplace clear"]
    assert results["Laplace mixed"] >= results["network mixed"]
    # Rank 4 of two 32 × 32 projections in two layers, both factors.
    assert f"posterior over {2 * 2 * 2 * 4 * 32:,} entries of the adapters" in printed


@pytest.mark.slow
def test_active_learning_begins_alike_and_chooses_other_images(example, tmp_path):
    options = ["--seeds", "2", "--rounds", "4", "--steps", "60", "--candidates", "20"]
    curves, printed = example("active_learning", options)
    tensors = {method: torch.tensor(curve) for method, curve in curves.items()}
    assert list(tensors) == ["random", "BALD", "BatchBALD"]
    for method in ("BALD", "BatchBALD"):
        curve = tensors[method]
        assert curve.shape == (2, 5)
        assert torch.equal(curve[:, 0], tensors["random"][:, 0])
        assert not torch.equal(curve[:, 1:], tensors["random"][:, 1:])
        assert curve[:, -1].mean() > curve[:, 0].mean() + 0.05
        (gain,) = re.findall(rf"^{method} minus random at 60 labels: ([+-][\d.]+)", printed, re.M)
        difference = (curve - tensors["random"])[:, -1].mean()
        assert float(gain) == pytest.approx(float(difference), abs=6e-4)
    assert not torch.equal(tensors["BALD"], tensors["BatchBALD"])
    check_pictures("active_learning", tmp_path, printed)


@pytest.mark.slow
def test_a_served_posterior_answers_as_predict_does(example):
    options = ["--epochs", "3", "--program", "predictive.pt2"]
    differences, printed = example("serving", options)
    assert differences["probs"] < 1e-6
    assert differences["variance"] < 1e-4
    assert "A wrong request: 400, Send finite images of 64 pixels, got shape [1, 2]." in printed


def test_the_endpoint_rejects_what_is_not_a_request_for_images(tmp_path):
    module = module_of("serving")
    model = torch.nn.Linear(64, 3)
    x = torch.randn(30, 64)
    la = Laplace(model, params="last_layer").fit([(x, torch.arange(30) % 3)])
    la.export(tmp_path / "p.pt2", x[:2])
    with module.serving(tmp_path / "p.pt2") as port:
        status, answer = module.request(port, {"images": x.tolist()})
        assert status == 200
        torch.testing.assert_close(torch.tensor(answer["probs"]), la.predict(x).probs)
        for content, path, status, message in (
            ({"images": [[1.0] * 63]}, "/predict", 400, "got shape [1, 63]"),
            ({"images": [[float("nan")] * 64]}, "/predict", 400, "finite images"),
            ({"pictures": []}, "/predict", 400, "as JSON ('images')"),
            ([1], "/predict", 400, "as JSON"),
            ({"images": [["a"] * 64]}, "/predict", 400, "as JSON"),
            ({"images": [[10**400] * 64]}, "/predict", 400, "too large"),
            ({"images": x.tolist()}, "/other", 404, "Use /predict"),
        ):
            answered, answer = module.request(port, content, path)
            assert answered == status
            assert message in answer["error"]


def test_batches_of_most_information_are_those_of_all_labellings():
    """The greedy choice, from entropies that are summed over every labelling of a batch."""

    def information(probs, batch):
        num_samples, _, num_classes = probs.shape
        total = 0.0
        for labels in itertools.product(range(num_classes), repeat=len(batch)):
            likelihoods = [
                math.prod(float(probs[s, n, c]) for n, c in zip(batch, labels, strict=True))
                for s in range(num_samples)
            ]
            mean = sum(likelihoods) / num_samples
            total -= mean * math.log(mean)
        conditional = -(probs * probs.log()).sum(-1).mean(0)
        return total - float(conditional[list(batch)].sum())

    torch.manual_seed(0)
    probs = (2 * torch.randn(8, 5, 3, dtype=torch.float64)).softmax(-1)
    probs[:, 1] = probs[:, 0]  # the second image is the first one again
    batch = []
    for _ in range(3):
        scores = [-1.0 if n in batch else information(probs, [*batch, n]) for n in range(5)]
        batch.append(scores.index(max(scores)))
    choose = module_of("active_learning").batch_of_most_information
    assert choose(probs, 3) == batch
    # With sampled labellings the estimate is close enough for the same choice.
    assert choose(probs, 3, num_labellings=2_000) == batch
    likely = (4 * torch.randn(50, 1, 3, dtype=torch.float64)).softmax(-1).expand(50, 2, 3)
    unlike = (2 * torch.randn(50, 1, 3, dtype=torch.float64)).softmax(-1)
    pool = torch.cat([likely, unlike], 1)
    assert set(choose(pool, 2)) == {0, 2}  # by BALD the two images that are the same


def test_joint_samples_have_the_joint_moments():
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 2)
    la = Laplace(model, curvature="full").fit([(torch.randn(6, 2), torch.arange(6) % 2)])
    x = torch.randn(3, 2)
    samples = module_of("active_learning").joint_samples(la, x, 40_000)
    log_odds = (samples[:, :, 0] / samples[:, :, 1]).log()
    mean, covariance = la.functional(x, joint=True)
    contrast = covariance[:, 0] - covariance[:, 1]
    expected = contrast[:, :, 0] - contrast[:, :, 1]
    assert (torch.cov(log_odds.T) - expected).abs().max() < 0.03 * expected.diagonal().max()
    assert (log_odds.mean(0) - (mean[:, 0] - mean[:, 1])).abs().max() < 0.05


def test_mutual_information_is_that_of_an_integral():
    """For a posterior with one uncertain direction, against a fine quadrature over it."""

    class OneUncertainDirection:
        """Logits (z, 0) with z normal: the integral over z is one-dimensional."""

        def functional(self, x):
            covariance = torch.zeros(len(x), 2, 2)
            covariance[:, 0, 0] = torch.tensor([0.01, 4.0])
            return torch.tensor([[0.0, 0.0], [1.0, 0.0]]), covariance

    torch.manual_seed(0)
    information = module_of("active_learning").mutual_information(
        OneUncertainDirection(), torch.zeros(2, 1), 20_000
    )
    for value, mean, variance in zip(information.tolist(), (0.0, 1.0), (0.01, 4.0), strict=True):
        z = torch.linspace(-8, 8, 4001, dtype=torch.float64)
        weights = (-(z**2) / 2).exp()
        weights /= weights.sum()
        p = torch.sigmoid(mean + math.sqrt(variance) * z)

        def entropy(p):
            return -(p * p.log() + (1 - p) * (1 - p).log())

        expected = entropy((weights * p).sum()) - (weights * entropy(p)).sum()
        assert value == pytest.approx(float(expected), rel=0.03)


def test_coming_from_laplace_torch_names_what_the_page_names(example):
    results, printed = example("coming_from_laplace_torch", ["--steps", "100"])
    assert results["largest change of the model"] == 0
    assert results["largest difference after loading"] == 0
    assert results["NLL"] == pytest.approx(results["evaluate: nll"], rel=1e-5)
    assert results["prior precision by validation"] > 0
    assert numbers_of(printed, "NLL:") == pytest.approx([results["NLL"]], rel=1e-3)
    source = (ROOT / "examples/coming_from_laplace_torch.py").read_text(encoding="utf-8")
    page = (ROOT / "docs/coming-from/laplace-torch.md").read_text(encoding="utf-8")
    for name in re.findall(r"(\w+)=", " ".join(re.findall(r"# laplace-torch: (.*)", source))):
        assert name in page, (
            f"docs/coming-from/laplace-torch.md has nothing on laplace-torch's {name}"
        )


@pytest.fixture
def trained_on_a_folder(example, tmp_path):
    """The command that the user's script returns, its printed text, and its folder.

    The network has learned hardly anything after one epoch.
    """
    options = ["--make-data", "--train", "80", "--epochs", "1"]
    return *example("train_timm_on_a_folder", options), tmp_path


@pytest.mark.slow
def test_the_script_writes_folders_a_checkpoint_and_the_command(trained_on_a_folder):
    command, printed, folder = trained_on_a_folder
    assert shlex.split(printed.splitlines()[-1]) == command
    assert command[:2] == ["laplace-debias", "report"]
    data = folder / "results/folder/digits"
    counts = {
        split: len(list(data.glob(f"{split}/digit_*/*.png"))) for split in ("train", "val", "test")
    }
    assert counts == {"train": 80, "val": 150, "test": 300}
    with Image.open(next(data.glob("test/digit_3/*.png"))) as picture:
        assert picture.size == (32, 32)
        low, high = picture.convert("L").getextrema()
        assert low < 50 < 200 < high
    assert len(list((folder / "results/folder/textures").rglob("*.png"))) == 150
    network = timm.create_model(command[command.index("--timm") + 1], num_classes=10)
    network.load_state_dict(load_file(command[command.index("--checkpoint") + 1]))


def test_the_script_says_where_data_are_missing(example, capsys):
    with pytest.raises(SystemExit):
        example("train_timm_on_a_folder", ["--data", "nowhere"])
    assert "there is no nowhere/train: pass --data DIR, or --make-data" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif("report" not in COMMANDS, reason="the command `report` does not exist yet")
def test_the_printed_command_judges_a_network_that_is_not_ours(trained_on_a_folder):
    command, _, folder = trained_on_a_folder
    assert command_line([*command[1:], "--progress=false"]) == 0
    page = folder / "results/folder/report/report.html"
    assert "textures" in page.read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["coming_from_laplace_torch", "quickstart"])
def test_examples_run_as_they_are(name, tmp_path):
    """The examples that take seconds; `make examples` runs all, `make demo` the demo."""
    run = subprocess.run(
        [sys.executable, ROOT / "examples" / f"{name}.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout
