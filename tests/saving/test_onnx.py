"""Exported ONNX models, run by onnxruntime, against dense float64 matrices."""

import copy
import re
import sys

import oracle
import pytest
import torch
from torch import nn

from laplace_debias import Laplace

DELTA = 0.7


@pytest.fixture
def onnxruntime():
    pytest.importorskip("onnxscript")
    return pytest.importorskip("onnxruntime")


def vectors(n, seed=1):
    return torch.randn(n, 3, generator=torch.Generator().manual_seed(seed))


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).eval()


def convolutional():
    torch.manual_seed(0)
    layers = (nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 2))
    return nn.Sequential(*layers).eval()


def run(onnxruntime, path, **inputs):
    """Run an exported model; return its outputs by name."""
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    arrays = {name: x.numpy() for name, x in inputs.items()}
    names = [output.name for output in session.get_outputs()]
    outputs = session.run(names, arrays)
    return {name: torch.tensor(array) for name, array in zip(names, outputs, strict=True)}


def dense_covariance(la, x):
    """J P⁻¹ Jᵀ for each input, in float64, with P from the posterior's curvature."""
    model = copy.deepcopy(la.model).double()
    J = oracle.flat_jacobian(model, x.double(), la.param_names)
    precision = la.posterior.precision.to_dense().double()
    return J @ torch.linalg.inv(precision) @ J.mT


def relative_error(value, expected):
    return float((value.double() - expected).abs().max() / expected.abs().max())


@pytest.mark.slow
@pytest.mark.parametrize("curvature", ["kfac", "diag"])
def test_mean_and_covariance_are_the_dense_ones(onnxruntime, curvature, tmp_path, unchecked):
    x = vectors(20)
    la = Laplace(mlp(), "regression", curvature, "last_layer", DELTA, sigma=[0.5, 0.8])
    la.fit([(x, vectors(20, 2)[:, :2])])
    path = tmp_path / "predictive.onnx"
    la.export(path, x[:1])
    for size in (1, 7):
        new = vectors(size, 3)
        outputs = run(onnxruntime, path, input=new)
        assert set(outputs) == {"mean", "variance", "covariance"}
        mean = copy.deepcopy(la.model).double()(new.double()).detach()
        covariance = dense_covariance(la, new)
        covariance = covariance + torch.tensor([0.25, 0.64], dtype=torch.float64).diag()
        assert relative_error(outputs["mean"], mean) < 1e-5
        assert relative_error(outputs["covariance"], covariance) < 1e-5
        variance = covariance.diagonal(dim1=1, dim2=2)
        assert relative_error(outputs["variance"], variance) < 1e-5


@pytest.mark.slow
def test_probabilities_of_images_are_those_of_predict(onnxruntime, tmp_path, unchecked):
    images = torch.randn(20, 1, 4, 4)
    la = Laplace(convolutional(), params="last_layer", prior_precision=DELTA)
    la.fit([(images, torch.arange(20) % 2)])
    path = tmp_path / "predictive.onnx"
    la.export(path, images[:3], link="probit")
    outputs = run(onnxruntime, path, input=images)
    variance = dense_covariance(la, images).diagonal(dim1=1, dim2=2)
    logits = copy.deepcopy(la.model).double()(images.double()).detach()
    assert relative_error(outputs["logits"], logits) < 1e-5
    assert relative_error(outputs["variance"], variance) < 1e-5
    expected = (logits / (1 + torch.pi / 8 * variance).sqrt()).softmax(-1)
    assert relative_error(outputs["probs"], expected) < 1e-5


@pytest.mark.slow
def test_inputs_keep_their_names(onnxruntime, tmp_path, unchecked):
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(6, 4)
            self.head = nn.Linear(4, 3)

        def forward(self, tokens, mask):
            return self.head((self.embed(tokens) * mask.unsqueeze(-1)).sum(1))

    torch.manual_seed(0)
    x = {"tokens": torch.randint(6, (9, 4)), "mask": torch.rand(9, 4)}
    la = Laplace(Named().eval(), params="last_layer").fit([(x, torch.arange(9) % 3)])
    la.export(tmp_path / "predictive.onnx", x)
    outputs = run(onnxruntime, tmp_path / "predictive.onnx", **x)
    assert relative_error(outputs["probs"], la.predict(x).probs.double()) < 1e-5


class Unsupported(nn.Module):
    """torch.linalg.eigvalsh has no ONNX operator."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(3, 2)

    def forward(self, x):
        return self.head(torch.linalg.eigvalsh(x.unsqueeze(-1) * x.unsqueeze(-2)))


@pytest.mark.slow
def test_an_operation_without_an_onnx_operator_is_refused(onnxruntime, tmp_path, unchecked):
    la = Laplace(Unsupported(), params="last_layer").fit([(vectors(9), torch.arange(9) % 2)])
    with pytest.raises(NotImplementedError, match=r"cannot be written as ONNX .*\.pt2 file"):
        la.export(tmp_path / "predictive.onnx", vectors(2))
    assert list(tmp_path.iterdir()) == []


class HalfFeatures(nn.Module):
    """Features in bfloat16 below a head in single precision."""

    def __init__(self):
        super().__init__()
        self.features = nn.Linear(3, 5).bfloat16()
        self.head = nn.Linear(5, 2)

    def forward(self, x):
        return self.head(self.features(x.bfloat16()).float().tanh())


@pytest.mark.slow
@pytest.mark.parametrize("activation", [nn.Mish, None])
def test_what_onnxruntime_cannot_run_is_refused(onnxruntime, activation, tmp_path, unchecked):
    x = vectors(9)
    model = HalfFeatures()
    if activation is not None:
        # There is no softplus in double precision.
        model = nn.Sequential(nn.Linear(3, 5), activation(), nn.Linear(5, 2)).double()
        x = x.double()
    la = Laplace(model.eval(), params="last_layer").fit([(x, torch.arange(9) % 2)])
    with pytest.raises(NotImplementedError, match=r"onnxruntime cannot run .*\.pt2 file"):
        la.export(tmp_path / "predictive.onnx", x[:2])
    assert list(tmp_path.iterdir()) == []
    la.export(tmp_path / "predictive.pt2", x[:2])


def test_inputs_in_bfloat16_are_refused(onnxruntime, tmp_path, unchecked):
    x = vectors(9).bfloat16()
    la = Laplace(mlp().bfloat16(), params="last_layer").fit([(x, torch.arange(9) % 2)])
    with pytest.raises(NotImplementedError, match=r"Inputs in bfloat16 .*\.pt2 file"):
        la.export(tmp_path / "predictive.onnx", x[:2])


def test_onnx_needs_its_extra(monkeypatch, tmp_path):
    la = Laplace(mlp(), params="last_layer").fit([(vectors(9), torch.arange(9) % 2)])
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    message = "onnxscript is not installed. Run pip install 'laplace-debias[onnx]'"
    with pytest.raises(ImportError, match=re.escape(message)):
        la.export(tmp_path / "predictive.onnx", vectors(2))
