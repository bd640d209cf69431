"""The torchmetrics classes over batches, after a reset, and over processes."""

import inspect

import pytest
import torch
import torch.multiprocessing as mp
from torchmetrics import Metric

from laplace_debias import metrics
from laplace_debias.metrics import modules

CLASSIFICATION_METRICS = {
    modules.Accuracy: metrics.accuracy,
    modules.NLL: metrics.nll,
    modules.Brier: metrics.brier,
    modules.ECE: metrics.ece,
    modules.EqualMassECE: metrics.ece_equal_mass,
    modules.MCE: metrics.mce,
    modules.ClasswiseECE: metrics.classwise_ece,
    modules.SmoothECE: metrics.smooth_ece,
    modules.AURC: metrics.aurc,
}
OOD_METRICS = {
    modules.AUROC: metrics.auroc,
    modules.AUPR: metrics.aupr,
    modules.AuprIn: metrics.aupr_in,
    modules.FPR95: metrics.fpr95,
}
GAUSSIAN_METRICS = {
    modules.GaussianNLL: metrics.gaussian_nll,
    modules.CRPS: metrics.crps,
}


def data():
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(70, 4, generator=generator, dtype=torch.float64)
    labels = torch.multinomial(logits.softmax(1), 1, generator=generator)[:, 0]
    scores = torch.randn(70, generator=generator, dtype=torch.float64)
    is_ood = (scores + torch.randn(70, generator=generator) > 0).long()
    return logits.softmax(1), labels, scores, is_ood


def cases():
    """Yield each class, its arguments, and the value of the function of the same metric."""
    probs, labels, scores, is_ood = data()
    for kind, function in CLASSIFICATION_METRICS.items():
        yield kind, (probs, labels), function(probs, labels)
    for kind, function in OOD_METRICS.items():
        expected = function(scores[is_ood == 0], scores[is_ood == 1])
        yield kind, (scores, is_ood), expected
    mean = probs[:, :2]
    y = scores[:, None].expand(70, 2)
    for kind, function in GAUSSIAN_METRICS.items():
        yield kind, (mean, 1 + mean, y), function(mean, 1 + mean, y)
    low, high = metrics.gaussian_interval(mean, 1 + mean)
    yield modules.IntervalCoverage, (low, high, y), metrics.interval_coverage(low, high, y)
    yield modules.IntervalWidth, (low, high), metrics.interval_width(low, high)
    pit = metrics.gaussian_pit(mean, 1 + mean, y)
    yield modules.QuantileCalibrationError, (pit,), metrics.quantile_calibration_error(pit)


def test_every_class_is_tested():
    assert {kind.__name__ for kind, *_ in cases()} == set(modules.__all__)


@pytest.mark.parametrize(
    ("kind", "arguments", "expected"), list(cases()), ids=[kind.__name__ for kind, *_ in cases()]
)
@pytest.mark.filterwarnings("ignore:The ``compute`` method")
def test_batches_and_resets(kind, arguments, expected):
    metric = kind()
    assert isinstance(metric, Metric)
    for _ in range(2):
        with pytest.raises(ValueError, match="has no example"):
            metric.compute()
        metric.reset()
        for start, stop in ((0, 1), (1, 50), (50, 70)):
            # A training loop logs the value of this batch only.
            batch = [argument[start:stop] for argument in arguments]
            if kind not in OOD_METRICS:
                metric(*batch)
            else:
                metric.update(*batch)
        torch.testing.assert_close(metric.compute().double(), expected.double())
        metric.reset()


def test_options_have_an_effect():
    probs, labels, *_ = data()
    for kind in (modules.ECE, modules.EqualMassECE, modules.MCE, modules.ClasswiseECE):
        metric = kind(num_bins=3)
        metric.update(probs, labels)
        expected = CLASSIFICATION_METRICS[kind](probs, labels, 3)
        torch.testing.assert_close(metric.compute(), expected)
        with pytest.raises(ValueError, match="num_bins must be at least 1"):
            kind(num_bins=0)
    pit = probs[:, 0]
    metric = modules.QuantileCalibrationError(num_levels=3)
    metric.update(pit)
    torch.testing.assert_close(metric.compute(), metrics.quantile_calibration_error(pit, 3))
    with pytest.raises(ValueError, match="num_levels must be at least 1"):
        modules.QuantileCalibrationError(num_levels=0)


def test_batches_may_be_passed_by_the_names_of_the_function():
    """`help` shows these names; the first argument of OOD detection has both kinds of scores."""
    for kind, arguments, expected in cases():
        names = list(inspect.signature(kind.update).parameters)[1:]
        metric = kind()
        metric.update(**dict(zip(names, arguments, strict=True)))
        torch.testing.assert_close(metric.compute().double(), expected.double())
        metric.reset()
        metric(**dict(zip(names, arguments, strict=True)))
        torch.testing.assert_close(metric.compute().double(), expected.double())
        if kind in OOD_METRICS:
            assert names == ["scores", "is_ood"]
            continue
        function = {
            modules.IntervalCoverage: metrics.interval_coverage,
            modules.IntervalWidth: metrics.interval_width,
            modules.QuantileCalibrationError: metrics.quantile_calibration_error,
        }.get(kind) or {**CLASSIFICATION_METRICS, **GAUSSIAN_METRICS}[kind]
        assert names == list(inspect.signature(function).parameters)[: len(names)]


@pytest.mark.usefixtures("unchecked")
def test_bad_batches_are_refused_when_they_come():
    probs, labels, scores, is_ood = data()
    with pytest.raises(ValueError, match="softmax"):
        modules.ECE().update(9 * probs, labels)
    with pytest.raises(ValueError, match="values other than 0 and 1"):
        modules.AUROC().update(scores, 2 * is_ood)
    with pytest.raises(ValueError, match=r"`is_ood` has shape .* Pass 0 or 1"):
        modules.AUROC().update(scores, is_ood[1:])
    with pytest.raises(ValueError, match="NaN"):
        modules.AUROC().update(scores / 0 * 0, is_ood)
    with pytest.raises(ValueError, match="must be positive"):
        modules.CRPS().update(scores, 0 * scores, scores)
    with pytest.raises(ValueError, match="`high` is below `low`"):
        modules.IntervalCoverage().update(scores, 0.5 * scores, scores)
    with pytest.raises(ValueError, match="`high` is below `low`"):
        modules.IntervalWidth().update(scores, 0.5 * scores)
    with pytest.raises(ValueError, match="`pit` has values from"):
        modules.QuantileCalibrationError().update(scores)


def compute_on_rank(rank, size, folder):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size
    )
    # Processes have different numbers of examples, so that nothing relies on equal numbers.
    borders = [0, 11, 40, 70]
    values = {}
    for kind, arguments, _ in cases():
        metric = kind()
        metric.update(*(argument[borders[rank] : borders[rank + 1]] for argument in arguments))
        values[kind.__name__] = metric.compute().item()
    torch.save(values, f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


def test_three_processes_have_the_values_of_one(tmp_path):
    mp.start_processes(compute_on_rank, (3, str(tmp_path)), nprocs=3, start_method="fork")
    expected = {kind.__name__: value.item() for kind, _, value in cases()}
    for rank in range(3):
        assert torch.load(tmp_path / f"{rank}.pt") == pytest.approx(expected, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("cls", OOD_METRICS)
def test_a_batch_of_one_kind_has_no_value_but_counts(cls):
    scores = torch.tensor([0.2, 0.1, 0.4, 0.9, 0.3])
    is_ood = torch.tensor([0, 0, 1, 1, 0])
    metric = cls()
    assert metric(scores[:2], is_ood[:2]).isnan()
    assert metric(scores[2:4], is_ood[2:4]).isnan()
    metric(scores[4:], is_ood[4:])
    expected = OOD_METRICS[cls](scores[is_ood == 0], scores[is_ood == 1])
    torch.testing.assert_close(metric.compute(), expected)
    metric.reset()
    metric.update(scores[:2], is_ood[:2])
    with pytest.raises(ValueError, match="empty"):
        metric.compute()
