"""What is concluded from the numbers of a run, in words."""

import pytest

from laplace_debias.assessment.conclusion import conclude, number


def a_run(task="classification", scaled=True, best_of_two=False, shifts=False, ood=False):
    methods = [{"key": "network", "label": "Network", "is_laplace": False, "temperature": None}]
    if scaled:
        methods.append(
            {
                "key": "temperature",
                "label": "Temperature scaling",
                "is_laplace": False,
                "temperature": 1.7,
            }
        )
    for key in ["laplace", "other"][: 1 + best_of_two]:
        methods.append({"key": key, "label": key.title(), "is_laplace": True, "temperature": None})
    sets = [{"name": "test", "role": "test", "num_examples": 1234}]
    if shifts:
        sets += [
            {"name": f"shift-{s}", "role": "shift", "severity": s, "num_examples": 1234}
            for s in (1, 5)
        ]
    if ood:
        sets.append({"name": "noise", "role": "ood", "kind": "far", "num_examples": 50})
    return {"task": task, "methods": methods, "sets": sets, "input_name": "image"}


def a_difference(method, reference, low, high, name="test"):
    value = None if low is None else (low + high) / 2
    row = {"method": method, "reference": reference, "set": name, "metric": "nll"}
    return {**row, "value": value or 0.0, "low": low, "high": high, "num_examples": 1234}


def metrics_of(*differences, rows=()):
    row = {"method": "network", "set": "test", "low": None, "high": None}
    both = [{**row, "metric": "nll", "value": 0.5}, {**row, "metric": "accuracy", "value": 0.9}]
    return {"rows": [*both, *rows], "differences": list(differences)}


BETTER, WORSE, SAME = (-0.3, -0.1), (0.1, 0.3), (-0.1, 0.1)


@pytest.mark.parametrize(
    ("scaling", "posterior", "beside", "advice"),
    [
        (BETTER, BETTER, BETTER, "Use “Laplace”."),
        (BETTER, BETTER, SAME, "Temperature scaling is as good here and costs one number"),
        (BETTER, BETTER, WORSE, "Use temperature scaling."),
        (BETTER, SAME, WORSE, "Use temperature scaling."),
        (BETTER, WORSE, WORSE, "Use temperature scaling."),
        (SAME, BETTER, SAME, "Use “Laplace”."),
        (SAME, SAME, SAME, "Nothing that was tried improves the network's probabilities"),
        (WORSE, WORSE, SAME, "Nothing that was tried improves the network's probabilities"),
    ],
)
def test_the_advice_follows_what_is_beyond_chance(scaling, posterior, beside, advice):
    found = metrics_of(
        a_difference("temperature", "network", *scaling),
        a_difference("laplace", "network", *posterior),
        a_difference("laplace", "temperature", *beside),
    )
    sentences = conclude(a_run(), found)
    assert sentences[-1].startswith(advice)
    verbs = {BETTER: "lowers", WORSE: "raises", SAME: "by no more than chance explains"}
    assert verbs[scaling] in sentences[1]
    assert verbs[posterior] in sentences[2]
    compared = {BETTER: "It is better than", WORSE: "It is worse than", SAME: "no difference"}
    assert compared[beside] in sentences[3]


def test_amounts_are_told_with_their_intervals():
    found = metrics_of(
        a_difference("temperature", "network", -0.3, -0.1),
        a_difference("laplace", "network", 0.1, 0.3),
        a_difference("laplace", "temperature", -0.1, 0.3),
    )
    told = " ".join(conclude(a_run(), found))
    assert "On 1,234 images of the test set" in told
    assert "lowers the negative log-likelihood by 0.200 nats (95 % interval 0.100 to 0.300)" in told
    assert "raises the network's negative log-likelihood by 0.200 nats" in told
    assert "beyond chance: 0.100 nats (95 % interval −0.100 to 0.300)" in told


def test_without_validation_it_says_what_is_open():
    found = metrics_of(a_difference("laplace", "network", *BETTER))
    sentences = conclude(a_run(scaled=False), found)
    assert any("hold out validation examples" in sentence for sentence in sentences)
    assert sentences[-1] == "Use “Laplace”."


def test_a_regression_is_not_told_of_temperatures():
    found = metrics_of(a_difference("laplace", "network", *SAME))
    told = conclude(a_run(task="regression", scaled=False), found)
    assert "emperature" not in " ".join(told)
    assert "constant noise" in told[-1]


def test_of_several_posteriors_the_best_is_told_and_the_harmful_ones():
    found = metrics_of(
        a_difference("laplace", "network", *WORSE), a_difference("other", "network", *BETTER)
    )
    told = conclude(a_run(scaled=False, best_of_two=True), found)
    assert "Of the Laplace approximations “Other” does best" in told[1]
    assert "Worse than the network as it is, beyond chance: “Laplace” (by 0.200 nats" in told[2]
    assert told[-1] == "Use “Other”."


def test_shifts_and_ood_sets_are_told_of():
    score = {"method": "laplace", "set": "noise", "metric": "auroc", "score": "entropy"}
    found = metrics_of(
        a_difference("laplace", "network", *SAME),
        a_difference("laplace", "network", *WORSE, name="shift-1"),
        a_difference("laplace", "network", *BETTER, name="shift-5"),
        rows=[
            {**score, "value": 0.8, "low": 0.7, "high": 0.9},
            {**score, "method": "network", "value": 0.7, "low": 0.6, "high": 0.8},
        ],
    )
    told = " ".join(conclude(a_run(scaled=False, shifts=True, ood=True), found))
    assert "corrupted at severity 5 it lowers the negative log-likelihood by 0.200 nats" in told
    assert "“noise” (far) is told from the test set best by the entropy of “Laplace”" in told
    assert "AUROC 0.800 (0.700 to 0.900)" in told


def test_a_network_alone_is_described():
    run = a_run(scaled=False)
    run["methods"] = run["methods"][:1]
    first, second = conclude(run, metrics_of())
    assert first.startswith("On 1,234 images of the test set the network")
    assert "hold out validation examples" in second


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (0.5, "0.500"), (-0.25, "−0.250"), (0.00123, "0.0012")]
)
def test_numbers_as_people_read_them(value, text):
    assert number(value) == text
