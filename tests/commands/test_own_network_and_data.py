"""fit, tune, predict and spectrum on a network and data of a user."""

import json
import re

import numpy as np
import pandas
import pytest
import torch
import user_files
from csv_table import read_csv
from torch import nn

from laplace_debias import Laplace, Link
from laplace_debias.cli import main
from laplace_debias.sources import SourceSettings, load

QUIET = ["--device=cpu", "--progress=false"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    user_files.networks(tmp_path, monkeypatch)
    user_files.archive(tmp_path / "d.npz")
    return tmp_path


def load_on_cpu(**options):
    return load(SourceSettings(**{"device": "cpu", "progress": False, **options}))


ROWS_OF_NUMBERS = {"model": "nets:rows", "model_args": {"outputs": 1}, "data": "r.npz"}
ROWS = ["--model=nets:rows", "--data=d.npz", *QUIET]


def test_a_whole_session_on_images(folder, capsys):
    user_files.image_folder(folder / "images")
    user_files.loose_images(folder / "loose")
    (folder / "loose" / "4.png").rename(folder / "loose" / "@4.png")
    torch.manual_seed(5)
    trained = nn.Sequential(
        nn.Conv2d(3, 5, 5, stride=4),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(5, 3),
    )
    user_files.weights(folder / "net.pt", trained, "module.", "state_dict")
    (folder / "all.yaml").write_text(
        "model: nets:build\nmodel_args: {width: 5}\ncheckpoint: net.pt\ndata: images\n"
        "mean: [0.5, 0.4, 0.3]\nstd: [0.2, 0.3, 0.4]\nood: {loose: loose}\n"
        "device: cpu\nprogress: false\n"
    )
    common = ["--config=all.yaml"]
    assert main(["fit", *common, "--output=p.safetensors"]) == 0
    printed = capsys.readouterr().out
    assert "N = 24" in printed
    assert "Not used: ood (for `report` and `evaluate`)." in printed
    grid = "--prior_precisions=[0.1, 1.0, 10.0]"
    assert main(["tune", *common, "--posterior=p.safetensors", grid]) == 0
    predict = ["predict", *common, "--posterior=p.safetensors"]
    assert main([*predict, "--inputs=loose", "--output=loose.csv"]) == 0
    assert main([*predict, "--output=test.parquet"]) == 0

    options = {"mean": (0.5, 0.4, 0.3), "std": (0.2, 0.3, 0.4), "ood": {"loose": "loose"}}
    loaded = load_on_cpu(model="nets:build", model_args={"width": 5}, data="images", **options)
    loaded.model.load_state_dict(trained.state_dict())
    la = Laplace(loaded.model, params="last_layer").fit(list(loaded.train), num_data=24)
    la.tune(list(loaded.validation), grid=[0.1, 1.0, 10.0])
    table = pandas.read_csv("loose.csv")
    assert "ood loose: images of 9 × 12 pixels are resized to 16 × 20." in loaded.notes
    x = torch.cat([x for x, _ in loaded.ood["loose"]])
    predictive = la.predict(x)
    columns = table[[f"probability_{name}" for name in user_files.CLASSES]].to_numpy()
    np.testing.assert_allclose(columns, predictive.probs.numpy(), atol=1e-5)
    np.testing.assert_allclose(table["entropy"], predictive.entropy(), atol=1e-5)
    # A leading quote keeps spreadsheets from reading the name as a formula.
    assert table["name"].tolist() == [*(f"{n}.png" for n in range(4)), "'@4.png"]
    table = pandas.read_parquet("test.parquet")
    assert table["label"].tolist() == [name for name in user_files.CLASSES for _ in range(3)]
    assert table["row"].tolist() == list(range(9))
    assert table["name"].tolist() == [
        f"test/{name}/{n}.png" for name in user_files.CLASSES for n in range(3)
    ]
    predicted_labels = (
        table[[f"probability_{name}" for name in user_files.CLASSES]].to_numpy().argmax(1)
    )
    assert [user_files.CLASSES[label] for label in predicted_labels] == table["prediction"].tolist()


def test_regression_with_its_noise(folder):
    user_files.archive(folder / "r.npz", **user_files.arrays("numbers"))
    common = ["--model=nets:rows", "--model_args.outputs=1", "--data=r.npz", *QUIET]
    assert main(["fit", *common, "--sigma=0.5", "--output=p.safetensors"]) == 0
    by_evidence = ["tune", *common, "--posterior=p.safetensors", "--method=marglik"]
    assert main([*by_evidence, "--sigma", "--per=kind", "--output=k.safetensors"]) == 0
    tuned = Laplace.load("k.safetensors", load_on_cpu(**ROWS_OF_NUMBERS).model)
    assert float(tuned.likelihood.sigma) != pytest.approx(0.5, rel=1e-3)
    assert len({float(delta) for delta in tuned.prior_precision}) > 1
    assert main(["tune", *common, "--posterior=p.safetensors", "--per=kind"]) == 2
    assert main(by_evidence) == 0
    predict = ["predict", *common, "--posterior=p.safetensors", "--output=p.csv"]
    assert main(predict) == 0
    loaded = load_on_cpu(**ROWS_OF_NUMBERS)
    la = Laplace.load(folder / "p.safetensors", loaded.model)
    x, y = user_files.every(loaded.test)
    mean, covariance = la.functional(x)
    table = pandas.read_csv("p.csv")
    np.testing.assert_allclose(table["mean"], mean[:, 0].numpy(), rtol=1e-5)
    spread = (covariance[:, 0, 0] + 0.25).sqrt()
    np.testing.assert_allclose(table["standard_deviation"], spread.numpy(), rtol=1e-5)
    np.testing.assert_allclose(table["target"], y[:, 0].numpy(), rtol=1e-6)
    half = 1.959964 * spread.numpy()
    np.testing.assert_allclose(table["lower"], table["mean"] - half, atol=1e-5)
    np.testing.assert_allclose(table["upper"], table["mean"] + half, atol=1e-5)
    epistemic = covariance[:, 0, 0].sqrt().numpy()
    np.testing.assert_allclose(table["epistemic"], epistemic, rtol=1e-5)
    # It is nearly the same if it is estimated from draws. The network alone has none.
    assert main([*predict, "--method=glm-mc", "--samples=2000", "--overwrite"]) == 0
    np.testing.assert_allclose(pandas.read_csv("p.csv")["epistemic"], epistemic, rtol=0.1)
    assert main([*predict, "--method=map", "--overwrite"]) == 0
    assert (pandas.read_csv("p.csv")["epistemic"] == 0).all()


@pytest.mark.parametrize(
    ("targets", "outputs", "columns"),
    [
        ("labels", 3, ["probability_0", "probability_1", "probability_2"]),
        ("two", 1, ["probability", "entropy"]),
    ],
)
def test_labels_that_may_apply_at_once_and_one_logit(folder, targets, outputs, columns):
    content = user_files.arrays(classes=2) if targets == "two" else user_files.arrays(targets)
    user_files.archive(folder / "m.npz", **content)
    common = ["--model=nets:rows", f"--model_args.outputs={outputs}", "--data=m.npz", *QUIET]
    assert main(["fit", *common, "--output=p.safetensors"]) == 0
    predict = ["predict", *common, "--posterior=p.safetensors", "--output=p.csv", "--method=map"]
    assert main(predict) == 0
    table = pandas.read_csv("p.csv")
    assert [name for name in table.columns if name in columns] == columns
    loaded = load_on_cpu(model="nets:rows", model_args={"outputs": outputs}, data="m.npz")
    x = torch.cat([x for x, _ in loaded.test])
    with torch.no_grad():
        expected = loaded.model(x).sigmoid().numpy()
    probabilities = [name for name in columns if name != "entropy"]
    np.testing.assert_allclose(table[probabilities].to_numpy(), expected, atol=1e-5)


def entropy(probs):
    return -(probs * probs.log()).sum(-1)


def test_a_table_has_the_scores_of_the_posterior(folder):
    """They are computed again from the moments of the logits and from draws of them."""
    fit = ["fit", *ROWS, "--prior_precision=0.01", "--params=all", "--output=p.safetensors"]
    assert main(fit) == 0
    predict = ["predict", *ROWS, "--posterior=p.safetensors", "--output=p.csv", "--overwrite"]
    assert main(predict) == 0
    table = pandas.read_csv("p.csv")
    loaded = load_on_cpu(model="nets:rows", data="d.npz")
    x = torch.cat([x for x, _ in loaded.test])
    la = Laplace.load("p.safetensors", loaded.model)
    mean, covariance = (moment.double() for moment in la.functional(x))

    # The variance of the logits without their common part, which no probability depends on.
    centre = torch.eye(3, dtype=torch.float64) - 1 / 3
    variance = (centre @ covariance @ centre).diagonal(dim1=1, dim2=2).mean(1)
    np.testing.assert_allclose(table["variance"], variance, rtol=1e-4)

    # The largest log-probability that another logit exceeds that of the predicted class.
    expected = []
    for m, C in zip(mean, covariance, strict=True):
        top = int(m.argmax())
        log_probabilities = []
        for rival in {0, 1, 2} - {top}:
            spread = (C[top, top] + C[rival, rival] - 2 * C[top, rival]).sqrt()
            log_probability = torch.special.log_ndtr(-(m[top] - m[rival]) / spread)
            log_probabilities.append(float(log_probability))
        expected.append(max(log_probabilities))
    np.testing.assert_allclose(table["instability"], expected, rtol=1e-3)

    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(20_000, len(x), 3, generator=generator, dtype=torch.float64)
    root = torch.linalg.cholesky(covariance + 1e-9 * torch.eye(3))
    probs = (mean + torch.einsum("bij,sbj->sbi", root, noise)).softmax(-1)
    total = entropy(probs.mean(0))
    mutual = total - entropy(probs).mean(0)
    assert float(mutual.max()) > 0.05
    np.testing.assert_allclose(table["mutual_information"], mutual, atol=0.01)

    # With draws, too: the score comes from the draws that the predictions are the mean of.
    for method in ("glm-mc", "nn"):
        options = [f"--method={method}", "--samples=4000"]
        assert main([*predict, *options]) == 0
        drawn = pandas.read_csv("p.csv")
        scores = {"mutual_information", "variance", "instability"} & set(drawn.columns)
        assert scores == {"mutual_information"}
        if method == "glm-mc":
            np.testing.assert_allclose(drawn["mutual_information"], mutual, atol=0.02)
    assert main([*predict, "--method=map"]) == 0
    assert not {"mutual_information", "variance"} & set(pandas.read_csv("p.csv").columns)


def test_predictions_with_temperature_scaling(folder, capsys):
    fit = ["fit", *ROWS, "--output=p.safetensors"]
    assert main(fit) == 0
    predict = ["predict", *ROWS, "--posterior=p.safetensors", "--output=p.csv"]
    assert main([*predict, "--method=temperature"]) == 2
    assert "command line: laplace-debias tune" in capsys.readouterr().err
    assert not (folder / "p.csv").exists()
    assert main([*predict, "--method=temperature", "--samples=3"]) == 2
    assert "`samples` has no effect with `method=temperature`" in capsys.readouterr().err

    loaded = load_on_cpu(model="nets:rows", data="d.npz")
    la = Laplace.load("p.safetensors", loaded.model)
    la.link = Link("pairwise", network_temperature=2.5)
    la.save("p.safetensors")
    x = torch.cat([x for x, _ in loaded.test])
    with torch.no_grad():
        logits = loaded.model(x)
    columns = ["probability_0", "probability_1", "probability_2"]
    for method, temperature in (("temperature", 2.5), ("map", 1.0)):
        assert main([*predict, f"--method={method}", "--overwrite"]) == 0
        expected = (logits / temperature).softmax(-1).numpy()
        table = pandas.read_csv("p.csv")
        np.testing.assert_allclose(table[columns].to_numpy(), expected, atol=1e-5)
        assert not {"mutual_information", "variance"} & set(table.columns)


def test_a_network_that_predicts_its_noise(folder, capsys):
    """It predicts means and log-variances; the noise is E[exp s] of normal log-variances s."""
    with open("nets.py", "a") as file:
        file.write("\n\ndef noisy():\n    torch.manual_seed(0)\n    return nn.Linear(4, 2)\n")
    user_files.archive(folder / "r.npz", **user_files.arrays("numbers"))
    common = ["--model=nets:noisy", "--data=r.npz", "--task=heteroscedastic", *QUIET]
    assert main(["fit", *common, "--output=p.safetensors"]) == 0
    posterior = "--posterior=p.safetensors"
    grid = "--prior_precisions=[1.0, 10.0]"
    assert main(["tune", *common, posterior, grid]) == 0
    assert main(["spectrum", *common, "--examples=20", "--eigenpairs=3"]) == 0
    assert main(["predict", *common, posterior, "--output=p.csv"]) == 0
    table = pandas.read_csv("p.csv")
    loaded = load_on_cpu(model="nets:noisy", data="r.npz", task="heteroscedastic")
    x, y = user_files.every(loaded.test)
    la = Laplace.load("p.safetensors", loaded.model)
    outputs, covariance = (moment.double() for moment in la.functional(x))
    noise = (outputs[:, 1] + covariance[:, 1, 1] / 2).exp()
    np.testing.assert_allclose(table["mean"], outputs[:, 0], rtol=1e-5)
    spread = (covariance[:, 0, 0] + noise).sqrt()
    np.testing.assert_allclose(table["standard_deviation"], spread, rtol=1e-5)
    np.testing.assert_allclose(table["epistemic"], covariance[:, 0, 0].sqrt(), rtol=1e-5)
    np.testing.assert_allclose(table["target"], y[:, 0], rtol=1e-6)
    draws = ["--method=glm-mc", "--samples=4000", "--output=q.csv"]
    assert main(["predict", *common, posterior, *draws]) == 0
    drawn = pandas.read_csv("q.csv")
    np.testing.assert_allclose(drawn["epistemic"], table["epistemic"], rtol=0.1)
    # A network with one output does not predict a mean and a log-variance.
    capsys.readouterr()
    wrong = ["fit", "--model=nets:rows", "--model_args.outputs=1", *common[1:], "--output=w"]
    assert main(wrong) == 2
    assert (
        "has 1 output, but the task heteroscedastic needs 2 (means and log-variances) for"
        in capsys.readouterr().err
    )


def test_ordered_classes_have_the_thresholds_of_the_posterior(folder, capsys):
    """Only the fit needs the thresholds, because the file of the posterior contains them."""
    user_files.archive(folder / "d.npz", **user_files.arrays())
    (folder / "likelihoods.py").write_text(
        "from laplace_debias import Ordinal\n\ngrades = Ordinal([-0.5, 0.7])\n"
    )
    common = ["--model=nets:rows", "--data=d.npz", *QUIET]
    ordered = [*common, "--model_args.outputs=1"]
    fit = ["fit", *ordered, "--output=p.safetensors"]
    assert main([*fit, "--task=ordinal"]) == 2
    assert "such as --task=my_pkg.likelihoods:grades" in capsys.readouterr().err
    assert main([*fit, "--task=likelihoods:grades"]) == 0
    assert main([*fit, "--task=likelihoods:grades", "--model_args.outputs=2"]) == 2
    posterior = "--posterior=p.safetensors"
    assert main(["tune", *ordered, posterior, "--prior_precisions=0.000562,0.001"]) == 0
    assert "0.000562" in capsys.readouterr().out
    assert main(["predict", *ordered, posterior, "--output=p.csv"]) == 0
    assert main(["evaluate", *ordered, posterior]) == 0
    printed = capsys.readouterr().out
    loaded = load_on_cpu(
        model="nets:rows", model_args={"outputs": 1}, data="d.npz", task="likelihoods:grades"
    )
    x, y = user_files.every(loaded.test)
    la = Laplace.load("p.safetensors", loaded.model)
    assert la.likelihood.thresholds.tolist() == [-0.5, 0.7]
    predictive = la.predict(x)
    table = pandas.read_csv("p.csv")
    np.testing.assert_allclose(table[[f"probability_{c}" for c in range(3)]], predictive.probs)
    network = la.predict(x, "map").log_prob(y).mean().item()
    assert f"{-network:.3f} (" in printed
    assert f"{-predictive.log_prob(y).mean().item():.3f} (" in printed
    # A posterior of the network's classes has a different task.
    assert main(["fit", *common, "--output=q.safetensors"]) == 0
    assert main(["evaluate", *ordered, posterior, "--posterior=q.safetensors"]) == 2
    assert "q.safetensors was fitted with --task=classification" in capsys.readouterr().err
    # The network has no thresholds of its own, so those of all posteriors must be the same.
    (folder / "others.py").write_text(
        "from laplace_debias import Ordinal\n\ngrades = Ordinal([-0.4, 0.7])\n"
    )
    other = ["fit", *ordered, "--task=others:grades", "--output=q.safetensors", "--overwrite"]
    assert main(other) == 0
    assert main(["evaluate", *ordered, posterior, "--posterior=q.safetensors"]) == 2
    assert "Pass posteriors with the same thresholds" in capsys.readouterr().err


def test_the_noise_of_a_posterior_is_not_that_of_the_network(folder, capsys):
    user_files.archive(folder / "r.npz", **user_files.arrays("numbers"))
    common = ["--model=nets:rows", "--model_args.outputs=1", "--data=r.npz", *QUIET]
    for name, sigma in (("narrow", 0.1), ("wide", 10)):
        assert main(["fit", *common, f"--sigma={sigma}", f"--output={name}.safetensors"]) == 0
    networks = []
    for names in (("narrow", "wide"), ("wide", "narrow"), ("wide",)):
        capsys.readouterr()
        posteriors = [f"--posterior={name}.safetensors" for name in names]
        assert main(["evaluate", *common, *posteriors, "--json"]) == 0
        rows = json.loads(capsys.readouterr().out)["rows"]
        networks.append([row["value"] for row in rows if row["method"] == "network"])
    assert networks[0]
    assert networks[0] == networks[1] == networks[2]


def test_advice_names_the_options_of_the_command_line(folder, capsys):
    """Messages name an option if its name differs from the argument in Python."""
    user_files.archive(folder / "r.npz", **user_files.arrays("numbers"))
    common = ["--model=nets:rows", "--model_args.outputs=1", "--data=r.npz", *QUIET]
    fit = ["fit", *common, "--overwrite", "--output=p.safetensors"]
    tune = ["tune", *common, "--posterior=p.safetensors"]

    def printed():
        out, err = capsys.readouterr()
        return " ".join((out + err).split())

    with pytest.warns(UserWarning, match="not specified"):
        assert main(fit) == 0
    printed()
    assert main([*tune, "--output=q.safetensors", "--prior_precisions=1,2"]) == 0
    assert "(command line: --sigma without --prior_precisions)" in printed()
    assert main([*tune, "--sigma", "--prior_precisions=1,2"]) == 2
    assert "Remove `grid=` (command line: --prior_precisions) or `sigma=`" in printed()
    assert main([*tune, "--output=r.safetensors", "--sigma"]) == 0
    for grid in ("1,-2", "0", "inf", "nan"):
        assert main([*tune, f"--prior_precisions={grid}"]) == 2
        assert "prior_precisions is" in printed()
    with pytest.warns(UserWarning, match="not specified"):
        assert main([*fit, "--fisher=empirical"]) == 0
    assert main(tune) == 0
    assert "(command line: fit --sigma)" in printed()
    spectrum = ["spectrum", *common, "--output=out"]
    with pytest.warns(RuntimeWarning, match="--density_width or --density_steps"):
        assert main([*spectrum, "--examples=20", "--eigenpairs=3", "--density_width=0.03"]) == 0
    printed()
    assert main([*spectrum, "--examples=1", "--eigenpairs=1"]) == 0
    lines = printed()
    assert "of 1 training example, 37 parameters" in lines
    assert re.search(r"Leading 1 eigenvalue: [\d.e-]+ largest residual", lines)


def test_draws_of_predictions_follow_the_seed(folder):
    assert main(["fit", *ROWS, "--output=p.safetensors"]) == 0
    tables = []
    for number, options in enumerate((["--seed=1"], ["--seed=1"], ["--seed=2"], ["--samples=3"])):
        command = ["predict", *ROWS, "--posterior=p.safetensors", f"--output={number}.csv"]
        assert main([*command, "--method=nn", "--inputs=d.npz", *options]) == 0
        tables.append(pandas.read_csv(f"{number}.csv")["probability_0"])
    assert tables[0].equals(tables[1])
    assert not tables[0].equals(tables[2])
    assert not tables[0].equals(tables[3])


@pytest.mark.slow
@pytest.mark.parametrize("task", ["classification", "regression", "binary", "multilabel"])
def test_the_spectrum_of_each_task(folder, task):
    kinds = {"regression": "numbers", "multilabel": "labels"}
    content = user_files.arrays(kinds.get(task, "classes"), classes=2 if task == "binary" else 3)
    user_files.archive(folder / "s.npz", **content)
    outputs = 1 if task in ("binary", "regression") else 3
    common = ["--model=nets:rows", f"--model_args.outputs={outputs}", "--data=s.npz", *QUIET]
    options = ["--examples=20", "--eigenpairs=3", "--max_matvecs=60", "--tolerance=1e-6"]
    assert main(["spectrum", *common, *options, "--output=out"]) == 0
    loaded = load_on_cpu(model="nets:rows", model_args={"outputs": outputs}, data="s.npz")
    x = torch.cat([x for x, _ in loaded.train])[:20]
    parameters = {name: p.detach().double() for name, p in loaded.model.named_parameters()}

    def parameters_of(vector):
        """Split a vector of all parameters into tensors by name."""
        pieces = vector.split([p.numel() for p in parameters.values()])
        return {
            name: piece.reshape(p.shape)
            for (name, p), piece in zip(parameters.items(), pieces, strict=True)
        }

    def f(vector):
        return torch.func.functional_call(loaded.model, parameters_of(vector), (x.double(),))

    trained = torch.cat([p.flatten() for p in parameters.values()])
    J = torch.autograd.functional.jacobian(f, trained)
    logits = f(trained)
    if task == "classification":
        p = logits.softmax(1)
        H = (torch.diag_embed(p) - p[:, :, None] * p[:, None]) / 20
    elif task == "regression":
        H = torch.full((20, 1, 1), 2 / 20, dtype=torch.float64)
    else:
        p = logits.sigmoid()
        H = torch.diag_embed(p * (1 - p)) / (20 * outputs)
    G = torch.einsum("nci,ncd,ndj->ij", J, H, J)
    expected = torch.linalg.eigvalsh(G).flip(0)[:3]
    values = [row["eigenvalue"] for row in read_csv(folder / "out" / "eigenvalues.csv")]
    np.testing.assert_allclose(values, expected.numpy(), rtol=1e-4)


def test_json_is_all_there_is_on_the_standard_output(folder, capsys):
    commands = {
        "fit": ["--output=p.safetensors"],
        "tune": ["--posterior=p.safetensors"],
        "predict": ["--posterior=p.safetensors", "--output=p.csv"],
        "spectrum": ["--examples=10", "--eigenpairs=2", "--output=out"],
    }
    results = {}
    for name, options in commands.items():
        assert main([name, *ROWS, *options, "--json"]) == 0
        captured = capsys.readouterr()
        assert len(captured.out.splitlines()) == 1
        results[name] = json.loads(captured.out)
    assert results["fit"]["num_data"] == 30
    assert results["fit"]["posterior"] == "p.safetensors"
    assert len(results["tune"]["table"]) >= 31
    low, high = results["tune"]["flat"]
    assert low <= results["tune"]["prior_precision"] <= high
    la = Laplace.load(folder / "p.safetensors", load_on_cpu(model="nets:rows", data="d.npz").model)
    assert results["tune"]["prior_precision"] == pytest.approx(float(la.prior_precision))
    assert results["predict"]["num_predictions"] == 9
    assert len(results["spectrum"]["eigenvalues"]) == 2
    assert main(["fit", *ROWS, "--output=p.safetensors", "--json"]) == 2  # because the file exists
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "add --overwrite" in captured.err


def test_without_validation_data_tune_says_what_is_possible(folder, capsys):
    content = {name: array for name, array in user_files.arrays().items() if "val" not in name}
    user_files.archive(folder / "d.npz", **content)
    assert main(["fit", *ROWS, "--output=p.safetensors"]) == 0
    assert "There is no validation data" in capsys.readouterr().out
    assert main(["tune", *ROWS, "--posterior=p.safetensors"]) == 2
    assert "--method=marglik" in capsys.readouterr().err
    assert main(["tune", *ROWS, "--posterior=p.safetensors", "--method=marglik"]) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["predict", "--posterior=no.safetensors", "--output=p.csv"],
            "Check the path",
        ),
        (["predict", "--posterior=p.safetensors", "--output=p.txt"], "ends with .parquet or .csv"),
        (["predict", "--posterior=p.safetensors", "--output=o.csv"], "add --overwrite"),
        (
            ["predict", "--posterior=p.safetensors", "--output=n.csv", "--inputs=none"],
            "The path none of --inputs does not exist",
        ),
        (
            ["predict", "--posterior=p.safetensors", "--output=n.csv", "--inputs=."],
            "inputs: . has no images",
        ),
        (
            ["predict", "--posterior=p.safetensors", "--output=n.csv", "--inputs=w.npz"],
            "inputs: w.npz has inputs of shape [3], but the network takes [4]",
        ),
        (
            ["predict", "--posterior=p.safetensors", "--output=n.csv", "--samples=0"],
            "samples is 0",
        ),
        (["fit", "--output=n.safetensors", "--sigma=1.0"], "`sigma` is the noise of a regression"),
    ],
)
def test_options_that_make_no_sense(folder, arguments, message, capsys):
    assert main(["fit", *ROWS, "--output=p.safetensors"]) == 0
    (folder / "o.csv").write_text("mine")
    np.savez(folder / "w.npz", x=np.zeros((2, 3)))
    assert main([*arguments, *ROWS]) == 2
    assert message in capsys.readouterr().err
    assert (folder / "o.csv").read_text() == "mine"
    assert not list(folder.glob("n.*"))


OWN_DATA = """
import torch
from torch.utils.data import TensorDataset

torch.manual_seed(0)
x = torch.randn(40, 4)
y = torch.arange(40) % 3
far = 9 * torch.randn(10, 4)


def labelled():
    data = TensorDataset(x, y)
    return {"train": data, "validation": data, "test": data, "ood": {"far": [(far, y[:10])]}}


def unlabelled():
    ood = {"list": [far[:4], far[4:]], "set": TensorDataset(far), "pair": [(far, None)]}
    return labelled() | {"ood": ood}


def further():
    return TensorDataset(far)
"""


def test_out_of_distribution_data_of_ones_own_need_no_labels(folder, monkeypatch, capsys):
    user_files.forget(monkeypatch, "own_data")
    (folder / "own_data.py").write_text(OWN_DATA)
    network = ["--model=nets:rows", *QUIET]
    assert main(["fit", *network, "--data=own_data:labelled", "--output=p.safetensors"]) == 0
    values = {}
    for name in ("labelled", "unlabelled"):
        capsys.readouterr()
        evaluate = ["evaluate", *network, f"--data=own_data:{name}", "--posterior=p.safetensors"]
        assert main([*evaluate, "--json"]) == 0
        for row in json.loads(capsys.readouterr().out)["rows"]:
            key = row["method"], row["metric"], row.get("score")
            values.setdefault(row["set"], {})[key] = row["value"]
    assert len(values["far"]) > 10
    for name in ("list", "set", "pair"):
        assert values[name] == pytest.approx(values["far"])
    predict = ["predict", *network, "--data=own_data:labelled", "--posterior=p.safetensors"]
    assert main([*predict, "--inputs=own_data:further", "--output=far.csv"]) == 0
    assert len(pandas.read_csv("far.csv")) == 10
    capsys.readouterr()
    assert main([*predict, "--inputs=own_data:labelled", "--output=all.csv"]) == 2
    assert "the entries ['train', 'validation', 'test', 'ood'], not" in capsys.readouterr().err


def test_a_note_about_a_search_names_the_posterior_to_tune_again(folder, capsys):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(40, 2))
    columns = {"a": x[:, 0], "b": x[:, 1], "y": 3 * x[:, 0] + rng.normal(size=40)}
    pandas.DataFrame(columns).to_csv("rows.csv", index=False)
    network = ["--model=nets:rows", "--model_args={inputs: 2, outputs: 1}"]
    data = ["--data=rows.csv", "--target=y", "--device=cpu", "--progress=false"]
    assert main(["report", *network, *data, "--output=run"]) == 0
    (note,) = (line for line in capsys.readouterr().out.splitlines() if "Tune this" in line)
    posterior = re.search(r"\((posteriors/.*?)\)", note)[1]
    option = re.search(r"--prior_precisions \S*\d", note)[0].split()
    assert main(["tune", *network, *data, f"--posterior=run/{posterior}", *option]) == 0


def test_a_damaged_image_is_named_by_a_worker_process_as_by_the_command(folder, capsys):
    images = user_files.image_folder(folder / "images")
    (image,) = sorted((images / "train" / "cat").iterdir())[1:2]
    image.write_bytes(b"no image")
    fit = ["fit", "--model=nets:build", "--data=images", "--output=p.safetensors", *QUIET]
    for workers in (0, 1):
        assert main([*fit, f"--workers={workers}"]) == 2
        error = capsys.readouterr().err
        assert f"{image.relative_to(folder)} is not a readable image" in error
        assert "ValueError" not in error
