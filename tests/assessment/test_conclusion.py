"""The sentences of the conclusion, for predictions of made-up situations."""

import math
from types import SimpleNamespace

import pytest
import torch

from laplace_debias.assessment.conclusion import conclude
from laplace_debias.assessment.measures import Comparison, recommended
from laplace_debias.assessment.methods import Method, PosteriorChoice
from laplace_debias.assessment.posteriors import training_record
from laplace_debias.assessment.temperature import fit_temperature
from laplace_debias.commands.compared import _cell
from laplace_debias.curvature.losses.likelihoods import (
    Categorical,
    Gaussian,
    MultiLabel,
    likelihood_from,
)
from laplace_debias.runs.records import (
    Measurements,
    MetricRow,
    Recommendation,
    RunRecord,
    Sweep,
    from_json,
)
from laplace_debias.runs.wording import brief

CLASSES = 10
N = 1500


def table_of(logits, labels=None, index=None, extra=0.0):
    """Predictions for a set, with the columns of a run folder; missing scores are NaN."""
    probs = logits.softmax(1)
    nothing = torch.full((len(probs),), math.nan)
    columns = {
        "index": torch.arange(len(probs)) if index is None else index,
        "probs": probs,
        "entropy": torch.special.entr(probs).sum(1),
        "aleatoric": nothing,
        "mutual_information": nothing,
        "variance": torch.full_like(nothing, extra) if extra else nothing,
        **dict.fromkeys(("instability", "energy", "max_logit"), nothing),
    }
    if labels is not None:
        columns["label"] = labels
    return columns


def exact(n=N, seed=0, noise=1.0):
    """Draw labels, and logits `[n, classes]` whose softmax is the posterior of the labels."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (n,), generator=generator)
    x = 2.6 * torch.eye(CLASSES)[labels] + torch.randn(n, CLASSES, generator=generator) * noise
    return 2.6 * x.double(), labels


def verdict(
    tables,
    temperature=1.0,
    task="classification",
    training=None,
    recommended=None,
    num_validation=None,
    **laplace_fields,
):
    """The sentences about tables, which are stored by method and set; `network` is first."""
    keys = list(dict.fromkeys(key for key, _ in tables))
    names = list(dict.fromkeys(name for _, name in tables))
    roles = {name: name.split("-")[0] if name != "test" else "test" for name in names}
    likelihood = likelihood_from(task)
    compared = Comparison(tables, roles, likelihood)
    if recommended is not None:
        recommended = Recommendation(**recommended)
    measurements = Measurements(compared.rows(), list(compared.differences()), recommended)
    run = {
        "format": 1,
        "task": task,
        "input_name": "image" if task == "classification" else "row",
        "methods": [method_entry(key, temperature, num_validation, laplace_fields) for key in keys],
        "sets": [
            set_entry(name, role, num_examples=len(tables[keys[0], name]["index"]))
            for name, role in roles.items()
        ],
        "training": training,
    }
    return conclude(from_json(RunRecord, run), measurements)


def method_entry(key, temperature, num_validation, laplace_fields):
    """The entry of a method in `run.json`; only Laplace methods have the further fields."""
    entry = {
        "key": key,
        "label": key.replace("-", " ").capitalize(),
        "is_laplace": key.startswith("laplace"),
        "temperature": temperature if key == "temperature" else None,
        "num_validation": num_validation,
    }
    if entry["is_laplace"]:
        entry |= laplace_fields
    return entry


def set_entry(name, role, num_examples):
    """The entry of a data set in `run.json`."""
    severity = 5 if role == "shift" else None
    return {"name": name, "role": role, "severity": severity, "num_examples": num_examples}


def trained(accuracy=0.95, gap=0.0, nll=0.2, num_examples=1000):
    rows = {"accuracy": accuracy, "overconfidence": gap, "nll": nll}
    return {
        "rows": [
            {"metric": metric, "value": value, "low": value - 0.02, "high": value + 0.02}
            for metric, value in rows.items()
        ],
        "num_classes": CLASSES,
        "uniform_nll": math.log(CLASSES),
        "num_examples": num_examples,
    }


def judged(best, **factors):
    """The sentences about methods, whose logits are the exact ones times a factor per method."""
    logits, labels = exact()
    tables = {(key, "test"): table_of(factor * logits, labels) for key, factor in factors.items()}
    return verdict(tables, best, training=trained())


CHECKS = (
    "First check the order of the classes, the size and normalisation of the images and the "
    "checkpoint"
)


# ------------------------------------------------------------------- six situations


def test_an_overconfident_network_and_what_mends_it():
    sentences = judged(2.5, network=2.5, temperature=1, laplace=1.5)
    assert 2 <= len(sentences) <= 5
    assert sentences[0].startswith(
        "On 1,500 images of the test set, the network has an accuracy of"
    )
    assert "over-confident by" in sentences[0]
    assert sentences[1].startswith(
        "Use “Temperature”. On the same 1,500 images, it lowers the NLL by"
    )
    assert "Brier score by" in sentences[1]
    assert "difference between confidence and accuracy by" in sentences[1]
    assert "It is not significantly over- or under-confident" in sentences[1]
    assert sentences[2].startswith("Compared with “Temperature”, “Laplace” raises the NLL by")


def test_what_turns_overconfidence_around_is_not_recommended_by_the_nll_alone():
    """The temperature lowers the NLL, but the network then is as far off in the other direction."""
    sentences = judged(3.0, network=1.55, temperature=0.5, laplace=1.1)
    assert sentences[1].startswith("Use “Laplace”")
    assert "“Temperature” raises the NLL by" in sentences[2]
    assert "and is under-confident by" in sentences[2]


def test_an_underconfident_network():
    sentences = judged(0.4, network=0.4, temperature=1)
    assert "under-confident by" in sentences[0]
    assert sentences[1].startswith("Use “Temperature”")


def test_a_calibrated_network_is_left_as_it_is():
    sentences = judged(0.99, network=1, temperature=1.01, laplace=0.6)
    assert "not significantly over- or under-confident" in sentences[0]
    assert sentences[1].startswith("No method improves the network significantly")
    assert (
        "NLL, Brier score and difference between confidence and accuracy together" in sentences[1]
    )
    assert "Compared with the network, “Laplace” raises" in sentences[2]
    assert "No significant difference from the network was found for “Temperature”." in sentences[2]


@pytest.mark.parametrize("number", [1, 2, 19])
def test_few_test_examples_allow_no_conclusion(number):
    logits, labels = exact(n=number)
    tables = {
        (key, name): table_of(factor * logits, labels)
        for key, factor in (("network", 9), ("laplace", 1))
        for name in ("test", "shift-5", "ood-far")
    }
    recommended = {"method": "laplace", "score": "entropy"}
    (sentence,) = verdict(tables, training=trained(), recommended=recommended)
    images = "1 image" if number == 1 else f"{number} images"
    assert sentence.startswith(f"The test set of {images} is too small for a conclusion")


@pytest.mark.parametrize("number", [1, 19])
def test_few_rows_do_not_show_that_standard_deviations_fit(number):
    target = torch.arange(number).double()
    spread = {"epistemic": 0 * target, "standard_deviation": 1 + 0 * target}
    table = {"index": torch.arange(number), "mean": target + 1, "target": target}
    (sentence,) = verdict({("network", "test"): table | spread}, task="regression")
    assert "too small for a conclusion" in sentence
    assert "an RMSE of 1.000 and an NLL of 1.419 nats" in sentence


def test_a_set_of_few_unfamiliar_inputs_allows_no_conclusion():
    logits, labels = exact()
    tables = {
        ("network", "test"): table_of(logits, labels),
        ("network", "ood-far"): table_of(logits[:3]),
    }
    last = verdict(tables, training=trained())[-1]
    assert last == "“ood-far” has only 3 images, too few for a conclusion."


@pytest.mark.parametrize(("num_validation", "has_doubts"), [(2, False), (20, True)])
def test_a_temperature_from_few_examples_raises_no_doubts(num_validation, has_doubts):
    logits, labels = exact()
    tables = {(key, "test"): table_of(logits, labels) for key in ("network", "temperature")}
    training = trained(accuracy=0, num_examples=19)
    sentences = verdict(tables, 1000.0, training=training, num_validation=num_validation)
    assert sentences[0].startswith(CHECKS) == has_doubts


@pytest.mark.parametrize("others", [{}, {"laplace": 1}])
def test_a_temperature_without_an_optimum_is_not_recommended(others):
    logits = 5 * torch.eye(CLASSES)[torch.arange(N) % CLASSES].double()
    labels = logits.argmax(1)
    temperature = fit_temperature(logits, labels, "classification")
    factors = {"network": 1, "temperature": 1 / temperature, **others}
    tables = {(key, "test"): table_of(factor * logits, labels) for key, factor in factors.items()}
    sentences = verdict(tables, temperature, training=trained())
    assert not any(sentence.startswith("Use") for sentence in sentences)
    assert not any(sentence.startswith("Only the network") for sentence in sentences)
    assert any(
        sentence.startswith(
            "“Temperature” has no optimum. The network predicts all validation images correctly"
        )
        for sentence in sentences
    )
    assert " ".join(sentences).count("“Temperature”") == 1


def test_classes_in_another_order_are_named_first():
    logits, labels = exact()
    wrong = (labels + 3) % CLASSES
    tables = {
        ("network", "test"): table_of(4 * logits, wrong),
        ("temperature", "test"): table_of(logits / 144, wrong),
    }
    sentences = verdict(tables, 577.0, training=trained(accuracy=0.05, gap=0.9, nll=22.3))
    assert sentences[0].startswith(CHECKS)
    assert "Its accuracy on its own training images is 0.050, near chance" in sentences[0]
    assert (
        "NLL on its own training images is 22.300 nats, worse than the 2.303 of a uniform guess"
        in sentences[0]
    )
    assert "the temperature of “Temperature” is 577" in sentences[0]
    assert not any(sentence.startswith("Use") for sentence in sentences)


def test_a_wrong_normalisation_is_named_first():
    """A network is rarely very over-confident on the images that it was trained on."""
    logits, labels = exact(noise=1.6)
    tables = {
        ("network", "test"): table_of(1.3 * logits, labels),
        ("temperature", "test"): table_of(0.6 * logits, labels),
    }
    sentences = verdict(tables, 2.2, training=trained(accuracy=0.52, gap=0.25, nll=1.4))
    assert sentences[0].startswith(CHECKS)
    assert "On its own training images it is over-confident by 25.0 points" in sentences[0]
    assert not any(sentence.startswith("Use") for sentence in sentences)


@pytest.mark.parametrize(
    ("shift", "message"), [(-0.22, "too low by 0.2"), (0.22, "too high by 0.2")]
)
def test_a_biased_regression_hears_of_it(shift, message):
    generator = torch.Generator().manual_seed(0)
    target = torch.randn(400, generator=generator).double()
    noise = torch.randn(400, generator=generator)
    mean = target + 0.5 * (noise - noise.mean()) + shift
    table = {
        "index": torch.arange(400),
        "mean": mean,
        "target": target,
        "epistemic": torch.zeros(400),
    }
    tables = {
        ("network", "test"): table | {"standard_deviation": torch.full((400,), 0.2).double()},
        ("laplace", "test"): table | {"standard_deviation": torch.full((400,), 0.55).double()},
    }
    sentences = verdict(tables, task="regression")
    assert f"Its predictions are {message}" in sentences[0]
    assert "Its standard deviations are too small" in sentences[0]
    assert sentences[1].startswith("Use “Laplace”. On the same 400 rows, it lowers the NLL by")
    assert "misfit of the standard deviations by" in sentences[1]


@pytest.mark.parametrize("unit", [1e-9, 1.0, 1e9])
@pytest.mark.parametrize(
    ("factor", "opening"),
    [(1 + 1e-5, "No method improves the network"), (1.02, "Use “Laplace”")],
)
def test_a_gain_of_the_size_of_rounding_is_no_reason_to_use_a_method(factor, opening, unit):
    """Every example has the gain, so it is significant; its size does not depend on the unit."""
    generator = torch.Generator().manual_seed(0)
    target = torch.randn(400, generator=generator).double()
    error = 0.5 * torch.randn(400, generator=generator).double()
    shifted = {"test": target, "shift-5": target + 1}
    tables = {}
    for name, targets in shifted.items():
        for method, scale in (("network", 1.0), ("laplace", factor)):
            tables[method, name] = {
                "index": torch.arange(400),
                "mean": unit * (target + error - error.mean()),
                "target": unit * targets,
                "epistemic": torch.zeros(400).double(),
                "standard_deviation": torch.full((400,), 0.2 * scale * unit).double(),
            }
    sentences = verdict(tables, task="regression")
    assert sentences[1].startswith(opening)
    if factor < 1.01:
        assert "For “Laplace”" not in sentences[-1]


def test_a_negligible_change_on_shifted_inputs_is_not_reported_as_one():
    """The method is better on the test set, and on the shifted inputs it changes nearly nothing."""
    logits, labels = exact()
    hard, hard_labels = exact(noise=2.0, seed=1)
    tables = {
        ("network", "test"): table_of(2.5 * logits, labels),
        ("laplace", "test"): table_of(logits, labels),
        ("network", "shift-5"): table_of(2.5 * hard, hard_labels),
        ("laplace", "shift-5"): table_of(2.49 * hard, hard_labels),
    }
    last = verdict(tables, training=trained())[-1]
    assert last.endswith("For “Laplace”, this is not significantly different.")


# --------------------------------------------------------------------- fair comparisons


def test_methods_are_compared_on_the_examples_of_both():
    """A method does not win because it predicts fewer and easier examples."""
    logits, labels = exact()
    sure = logits.softmax(1).amax(1).argsort(descending=True)[:300].sort().values
    tables = {
        ("network", "test"): table_of(2.5 * logits, labels),
        ("laplace-head", "test"): table_of(1.002 * logits, labels),
        ("laplace", "test"): table_of(logits[sure], labels[sure], index=sure),
    }
    sentences = verdict(tables, training=trained())
    assert sentences[1].startswith("Use “Laplace head”. On the same 1,500 images")
    assert "No significant difference from “Laplace head” was found for “Laplace”" in sentences[2]
    differences = Comparison(tables, {"test": "test"}, Categorical()).differences()
    rows = [
        row for row in differences if (row.method, row.reference) == ("laplace", "laplace-head")
    ]
    assert {row.num_examples for row in rows} == {300}


def test_foreign_inputs_are_noticed_by_a_score_or_not():
    logits, labels = exact()
    generator = torch.Generator().manual_seed(1)
    far = torch.randn(200, CLASSES, generator=generator).double()
    variance = {"variance": torch.rand(200, generator=generator).double() + 2}
    inside = {"variance": torch.rand(N, generator=generator).double()}
    tables = {
        ("network", "test"): table_of(2.5 * logits, labels),
        ("laplace", "test"): table_of(logits, labels) | inside,
        ("network", "ood-sure"): table_of(50 * far),
        ("laplace", "ood-sure"): table_of(50 * far) | variance,
        ("network", "ood-odd"): table_of(0.3 * far),
        ("laplace", "ood-odd"): table_of(0.3 * far) | {"variance": variance["variance"] - 1.5},
    }
    last = verdict(tables, training=trained())[-1]
    assert "is higher by" not in last
    recommended = {"method": "laplace", "score": "variance"}
    last = verdict(tables, training=trained(), recommended=recommended)[-1]
    assert "use the variance of “Laplace”." in last
    entropy = "The network's entropy"
    assert f"{entropy} does not separate “ood-sure” from test images, with an AUROC of 0" in last
    assert "On the same 200 images, the AUROC of the recommended score is higher by" in last
    assert f"{entropy} separates “ood-odd” from test images, with an AUROC of 1.000" in last
    assert last.count("is higher by") == 1
    assert "the recommended score is lower by" in last
    first = {"method": "network", "score": "entropy"}
    assert (
        "higher by" not in verdict(tables, training=trained(), recommended=recommended | first)[-1]
    )


def ood_tables(factors):
    """Tables of the network and a posterior, for the test set and for OOD sets.

    Args:
        factors: Factors of the logits of each OOD set, for the network and for the posterior.
    """
    logits, labels = exact()
    tables = {
        ("network", "test"): table_of(2.5 * logits, labels),
        ("laplace", "test"): table_of(logits, labels),
    }
    for name, (by_network, by_posterior) in factors.items():
        far, _ = exact(400, seed=3)
        tables["network", f"ood-{name}"] = table_of(2.5 * by_network * far)
        tables["laplace", f"ood-{name}"] = table_of(by_posterior * far)
    return tables


def test_a_detector_at_chance_or_worse_is_not_recommended():
    """A detector below chance is useless, even if it is better than the network's entropy."""
    recommended = {"method": "laplace", "score": "entropy"}
    # Predictions for the OOD set are surer than for the test set, and surest by the network.
    last = verdict(ood_tables({"sure": (8, 2)}), training=trained(), recommended=recommended)[-1]
    assert "To detect" not in last
    assert "higher by" not in last
    assert "No score that was chosen beforehand detects “ood-sure”. The AUROC is 0." in last
    assert "for the entropy of “Laplace”" in last
    # The OOD set has the distribution of the test set, so the interval contains 0.5.
    last = verdict(ood_tables({"same": (1, 1)}), training=trained(), recommended=recommended)[-1]
    assert "To detect" not in last
    assert "No score that was chosen beforehand detects “ood-same”" in last


def test_a_score_is_recommended_for_the_sets_that_it_detects():
    recommended = {"method": "laplace", "score": "entropy"}
    tables = ood_tables({"sure": (8, 2), "odd": (0.3, 0.1)})
    last = verdict(tables, training=trained(), recommended=recommended)[-1]
    assert "To detect inputs like those of “ood-odd”, use the entropy of “Laplace”." in last
    assert "The network's entropy separates “ood-odd” from test images" in last
    assert "No score that was chosen beforehand detects “ood-sure”" in last
    only = verdict(ood_tables({"odd": (0.3, 0.1)}), training=trained(), recommended=recommended)[-1]
    assert only.startswith("To detect out-of-distribution inputs, use the entropy of “Laplace”. ")
    assert "No score" not in only


def test_the_last_posterior_is_recommended():
    posterior = PosteriorChoice()
    network = Method(key="network", label="n", describes="n.")
    last = Method(key="laplace", label="l", describes="l.", posterior=posterior)
    ensemble = Method(key="ensemble", label="e", describes="e.", uses_all_checkpoints=True)
    recommendation = recommended([network, last, ensemble], Categorical())
    assert recommendation == Recommendation("laplace", "entropy")
    assert recommended([network, ensemble], MultiLabel()).method == "network"
    assert recommended([network, last], Gaussian()) is None


def test_the_hardest_shift_is_told():
    logits, labels = exact()
    hard, hard_labels = exact(seed=1, noise=3.0)
    tables = {
        ("network", "test"): table_of(2.5 * logits, labels),
        ("laplace", "test"): table_of(logits, labels),
        ("network", "shift-5"): table_of(2.5 * hard, hard_labels),
        ("laplace", "shift-5"): table_of(0.3 * hard, hard_labels),
    }
    last = verdict(tables, training=trained())[-1]
    assert last.startswith("On shifted inputs of severity 5, the network has an accuracy of")
    assert "“Laplace” lowers the difference between confidence and accuracy by" in last


def test_without_validation_it_says_what_is_open():
    logits, labels = exact()
    tables = {("network", "test"): table_of(logits, labels)}
    assert "Add a method to compare it with." in verdict(tables)[1]


# ------------------------------------------------------------------------- its sources


def test_a_search_that_got_better_up_to_its_end_is_named():
    logits, labels = exact()
    tables = {
        ("network", "test"): table_of(logits, labels),
        ("laplace", "test"): table_of(logits, labels),
    }
    sentences = verdict(tables, training=trained(), prior_precision_at_limit=True)
    assert sentences[0].startswith(CHECKS)
    assert "prior precision of “Laplace” is at the end of the range" in sentences[0]

    def sweep(*values):
        rows = [
            {"prior_precision": 10.0**i, "value": v, "low": v - 0.1, "high": v + 0.1}
            for i, v in enumerate(values)
        ]
        best = min(rows, key=lambda row: row["value"])
        return from_json(Sweep, {"rows": rows, "chosen": best["prior_precision"]})

    assert sweep(3.0, 2.0, 1.0).is_at_limit
    assert not sweep(3.0, 1.0001, 1.0).is_at_limit
    assert not sweep(3.0, 1.0, 2.0).is_at_limit
    assert not from_json(Sweep, {"rows": [], "chosen": [1.0]}).is_at_limit


@pytest.mark.usefixtures("unchecked")
def test_the_network_is_judged_on_its_first_training_examples():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1500, 4, generator=generator)
    y = (x[:, 0] > 0).long()
    model = torch.nn.Linear(4, 2).double()
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[0.0, 0, 0, 0], [9.0, 0, 0, 0]]))
    batches = list(zip(x.double().split(400), y.split(400), strict=True))
    loaded = SimpleNamespace(model=model, likelihood=Categorical(), train=batches)
    record = training_record(loaded)
    assert (record.num_examples, record.num_classes) == (1000, 2)
    assert record.uniform_nll == pytest.approx(math.log(2))
    expected = (model(x[:1000].double()).argmax(1) == y[:1000]).double().mean().item()
    assert record.rows[0].value == pytest.approx(expected)
    loaded = SimpleNamespace(
        model=model, likelihood=Gaussian(), train=[(a, model(a).detach() * 2) for a, _ in batches]
    )
    assert training_record(loaded).rows[0].value < 1


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (0.5, "0.500"), (-0.25, "−0.250"), (0.00123, "0.0012")]
)
def test_numbers_as_people_read_them(value, text):
    assert brief(value) == text


def test_large_numbers_have_no_decimals_and_zero_no_sign():
    assert brief(-19413.733) == "−19,414"
    assert brief(999.5) == "999.500"
    interval = {"value": 19413.733, "low": -0.0001, "high": 0.2}
    row = MetricRow(method="network", set_name="test", metric="nll", **interval)
    assert _cell(row, with_interval=True) == "19,414 (−0.0001–0.200)"
