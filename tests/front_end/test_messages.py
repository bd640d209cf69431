"""Models and inputs that cannot be worked with: a sentence that says what to do."""

import warnings

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from laplace_debias import Laplace
from laplace_debias.curvature import GGN

X = torch.randn(8, 4)
Y = torch.tensor([0, 2, 1, 0, 1, 2, 2, 0])


def network():
    return nn.Sequential(nn.Linear(4, 3)).eval()


def convolutions():
    layers = [nn.Conv2d(2, 3, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 3)]
    return nn.Sequential(*layers).eval()


def refused(model, error, says):
    with pytest.raises(error, match=says):
        Laplace(model)
    with pytest.raises(error, match=says):
        GGN(model, nn.CrossEntropyLoss(), [(X, Y)])


def test_a_model_without_values_is_refused():
    with torch.device("meta"):
        model = network()
    refused(model, ValueError, "0.weight is on the device .meta., .* Load the checkpoint")


def test_a_device_without_double_precision_is_refused():
    model = nn.Module()
    with FakeTensorMode():  # no Apple GPU is needed
        model.weight = nn.Parameter(torch.empty(3, 4, device="mps"))
    refused(model, NotImplementedError, r"weight is on the device 'mps', .* Call `model\.cpu\(\)`")


@pytest.mark.parametrize("make", [torch.jit.script, lambda m: torch.jit.trace(m, X)])
def test_torchscript_is_refused(make):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is on its way out
        scripted = make(network())
    refused(scripted, TypeError, "The model is TorchScript .* Pass the Python module")
    refused(nn.Sequential(scripted), TypeError, "^0 is TorchScript")


def test_a_frozen_model_is_refused():
    model = network().requires_grad_(False)
    refused(model, ValueError, r"has no trainable parameters\. Call requires_grad_\(True\)")


def test_what_is_no_module_is_refused(unchecked):
    refused(lambda x: x, TypeError, "`model` is a function. Pass a torch.nn.Module")


def test_the_outputs_of_the_users_batch_are_named():
    """Not those of the one example that is run first."""
    with pytest.raises(ValueError, match=r"class_dim=2.* outputs have shape \[batch, 3\]"):
        Laplace(network(), class_dim=2).fit_batches([(X, Y)])


def test_outputs_that_lose_the_examples_are_refused():
    model = nn.Sequential(network(), nn.Flatten(0)).eval()
    with pytest.raises(ValueError, match=r"of shape \(3,\)\. .* in a module that flattens"):
        Laplace(model).fit_batches([(X, Y)])


def test_outputs_without_examples_are_named():
    class Mean(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x):
            return self.layer(x).mean()

    with pytest.raises(ValueError, match=r"of shape \(\)\. .* Wrap .* keeps a dimension"):
        Laplace(Mean().eval()).fit_batches([(X, Y)])


CASES = {
    "vector": (network, X),
    "image": (convolutions, torch.randn(8, 2, 6, 5)),
    "tokens": (
        lambda: nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(20, 3)).eval(),
        torch.randint(9, (8, 5)),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_one_example_without_a_dimension_for_the_examples(name):
    build, x = CASES[name]
    la = Laplace(build()).fit_batches([(x, Y)])
    shape = ", ".join(map(str, x.shape[1:]))
    says = (
        rf"shape \({shape},?\) are one example, .* Pass `x.unsqueeze\(0\)`, of shape \(1, {shape}\)"
    )
    for method in ("glm", "glm-mc", "nn", "map"):
        with pytest.raises(ValueError, match=says):
            la.predict(x[0], method)
    with pytest.raises(ValueError, match=says):
        la.functional(x[0])
    expected = la.predict(x[:1]).probs
    torch.testing.assert_close(la.predict(x[0].unsqueeze(0)).probs, expected, rtol=0, atol=0)


def test_an_error_of_another_kind_comes_as_it_is():
    la = Laplace(network()).fit_batches([(X, Y)])
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        la.predict(torch.randn(2, 5))
    with pytest.raises(ValueError, match="NaN or Inf"):
        la.predict(torch.full((2, 4), torch.nan))
