"""The table of architectures: the contents of a row, and the report of a failure."""

import pytest
import torch
from torch import nn

from benchmarks.architectures import page
from benchmarks.architectures.__main__ import main
from benchmarks.architectures.architecture import CLASSES, Architecture, images, narrow
from benchmarks.architectures.dense import dense_variances
from benchmarks.architectures.measurement import measure_architecture
from benchmarks.settings import Settings

ONCE = Settings(repetitions=1, threads=1)


class Small(nn.Module):
    """A class token before the mean, and a scale that the outputs do not depend on."""

    def __init__(self, error=None):
        super().__init__()
        self.embed = nn.Linear(3, 4)
        self.head = nn.Linear(4, CLASSES)
        self.token = nn.Parameter(torch.zeros(1, 1, 4))
        self.unused = nn.Parameter(torch.ones(5))
        self.error = error

    def forward(self, x):
        if self.error is not None:
            raise self.error
        tokens = self.embed(x.flatten(2).transpose(1, 2))
        return self.head(torch.cat([self.token.expand(len(x), -1, -1), tokens], 1).tanh().mean(1))


def architecture(**options):
    return Architecture("small", "own", lambda: Small(**options), images(2))


def test_a_row_says_what_works_what_is_covered_and_what_is_left_out():
    row = measure_architecture(architecture(), ONCE)
    assert (row.works, row.message) == (True, "")
    assert row.parameters == 16 + 4 + 5 + 15
    assert row.covered == 35 / 40
    assert (row.of_layers, row.of_calls) == (4, 1)
    assert "unused" in row.left_out
    assert row.disagreement < 1e-12
    for ratios in (row.fit, row.predict):
        assert len(ratios) == 1
        assert ratios[0] > 0
    text = page.page([row], ["a machine"])
    assert "1 of 1 architectures" in text
    assert "- `small`: 87.5 % of the parameters are part of a block of the curvature. " in text


def test_a_failure_is_told_and_counted(tmp_path):
    row = measure_architecture(architecture(error=RuntimeError("no rule\nfor this")), ONCE)
    assert not row.works
    assert "default: RuntimeError: no rule" in row.message
    page.write(tmp_path / "row.json", row, "a machine", {"torch": "2"})
    read, set_up = page.read(tmp_path / "row.json")
    assert read == row
    text = page.page([read], [set_up])
    assert "0 of 1 architectures" in text
    assert "no rule for this" in text


def test_the_reference_is_the_formula_for_a_linear_network():
    """Outputs `W x`: J of output c is x in row c, so both sums can be written down."""
    model = nn.Linear(2, CLASSES, bias=False).double()
    x = torch.randn(2, 2).double()
    p = model(x).softmax(1).detach()
    diagonal = (p * (1 - p)).T @ x.square()
    expected = x.square() @ (diagonal + diagonal.mean()).reciprocal().T
    reference = dense_variances(model, x)
    torch.testing.assert_close(reference.variances, expected)
    assert reference.prior_precision == pytest.approx(float(diagonal.mean()))


def test_narrow_divides_channels_and_leaves_images_and_classes():
    with narrow(8):
        layers = [nn.Conv2d(3, 64, 1), nn.Conv2d(64, 64, 1, groups=64), nn.Linear(1024, CLASSES)]
        norm = nn.BatchNorm2d(64)
    shapes = [tuple(layer.weight.shape) for layer in layers]
    assert shapes == [(8, 3, 1, 1), (8, 1, 1, 1), (CLASSES, 128)]
    assert norm.num_features == norm.weight.numel() == 8
    assert nn.Conv2d(64, 64, 1).in_channels == 64


def test_unknown_names_are_refused(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["--only", "resnet1"])
    assert "resnet1" in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_writes_a_page(tmp_path):
    assert main(["--only", "vit_b_16", "--results", str(tmp_path)]) == 0
    text = (tmp_path / "architectures.md").read_text(encoding="utf-8")
    assert "1 of 1 architectures work with the defaults" in text
    assert "| vit_b_16 " in text
