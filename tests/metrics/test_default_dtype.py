"""Metrics do not depend on torch's default dtype, or are refused."""

import pytest
import torch

from laplace_debias.metrics import evaluate, evaluate_ood, evaluate_regression


@pytest.fixture(params=[torch.float64, torch.bfloat16], ids=str)
def set_other_dtype(request):
    """A function that sets another default dtype."""
    yield lambda: torch.set_default_dtype(request.param)
    torch.set_default_dtype(torch.float32)


def with_ends(report):
    """Each metric's value and the ends of its interval, by name."""
    return {name: (float(value), value.low, value.high) for name, value in report.items()}


def test_metrics_do_not_depend_on_the_default_dtype(set_other_dtype):
    generator = torch.Generator().manual_seed(0)
    probs = torch.randn(3000, 5, generator=generator).mul(2).softmax(-1)
    labels = torch.randint(5, (3000,), generator=generator)
    means, targets = torch.randn(2, 2000, generator=generator)
    deviations = 0.1 + torch.rand(2000, generator=generator)
    expected = evaluate(probs, labels), evaluate_regression(means, deviations, targets)
    set_other_dtype()
    reports = evaluate(probs, labels), evaluate_regression(means, deviations, targets)
    for report, expected_report in zip(reports, expected, strict=True):
        assert repr(with_ends(report)) == repr(with_ends(expected_report))


def test_detection_is_not_counted_in_half_precision(set_other_dtype):
    """torchmetrics sums its counts in the default dtype, and bfloat16 has none beyond 256."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(2, 1000, generator=generator) + torch.tensor([[0.0], [0.5]])
    expected = evaluate_ood(*scores)
    set_other_dtype()
    if torch.get_default_dtype() == torch.bfloat16:
        with pytest.raises(
            ValueError, match=r"default dtype of torch, which is torch\.bfloat16.*set_default_dtype"
        ):
            evaluate_ood(*scores)
    else:
        assert dict(evaluate_ood(*scores)) == pytest.approx(dict(expected), abs=1e-6)
