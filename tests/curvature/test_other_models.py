"""A mapping as one argument, as other libraries pass it to a model."""

import pytest
import torch
from networks import (
    LABELS,
    N,
    batches,
    build,
    close,
    dense_ggn,
    dense_hessian,
    dense_jacobian,
    inputs,
)
from torch import nn
from torch.utils.data import DataLoader

from laplace_debias import Laplace, OneArgument
from laplace_debias.curvature import GGN, KFAC, Hessian, Jacobian

# ------------------------------------------------------------ one mapping as one argument


class OfAMapping(nn.Module):
    """`model(batch)` with a mapping of two tensors, one of which adds to the other's features."""

    def __init__(self):
        super().__init__()
        self.net = build("mlp")

    def forward(self, batch):
        assert type(batch) is dict
        return self.net(batch["a"] + batch["b"].double())


def mapping(x):
    """x as a mapping of its rounded values and the remainders."""
    return OneArgument(a=x - x.round(), b=x.round().long(), flag="kept")


def test_operators_take_a_mapping_whole():
    model = OfAMapping()
    x = inputs(3)
    y = LABELS
    data = [(mapping(a), b) for a, b in batches(x, y, 2)]
    plain = model.net
    close(GGN(model, nn.CrossEntropyLoss(), data), dense_ggn(plain, nn.CrossEntropyLoss(), x, y))
    expected = dense_hessian(plain, nn.CrossEntropyLoss(), x, y)
    close(Hessian(model, nn.CrossEntropyLoss(), data), expected)
    close(Jacobian(model, data), dense_jacobian(plain, x).flatten(0, 1))
    expected = KFAC(plain, nn.CrossEntropyLoss(), batches(x, y, 2)).to_dense()
    close(KFAC(model, nn.CrossEntropyLoss(), data), expected)


@pytest.mark.parametrize("mode", ["full", "mini", "debiased", "crossfit"])
def test_a_laplace_takes_a_mapping_whole(mode):
    model = OfAMapping()
    x = inputs(3)
    y = LABELS
    data = [(mapping(a), b) for a, b in batches(x, y, 3)]
    la = Laplace(model).fit(data, mode=mode, num_data=N)
    plain = Laplace(model.net).fit(batches(x, y, 3), mode=mode, num_data=N)
    options = [{}, {"method": "map"}]
    options += [{"method": method, "samples": 3} for method in ("glm", "glm-mc", "nn")]
    for option in options:
        generators = [torch.Generator().manual_seed(0) for _ in range(2)]
        if option.get("method", "glm") == "map" or not option:
            generators = [None, None]
        ours = la.predict(mapping(x), generator=generators[0], **option).probs
        theirs = plain.predict(x, generator=generators[1], **option).probs
        torch.testing.assert_close(ours, theirs)
    tuned = la.tune(data, grid=[0.1, 10.0])
    assert tuned.value == pytest.approx(plain.tune(batches(x, y, 3), grid=[0.1, 10.0]).value)


def test_a_mapping_goes_through_a_loader_and_an_exported_program(tmp_path):
    model = OfAMapping()
    x = inputs(3)
    y = LABELS
    examples = [
        (OneArgument(a=a - a.round(), b=a.round().long()), b) for a, b in zip(x, y, strict=True)
    ]
    la = Laplace(model, params="last_layer").fit(DataLoader(examples, batch_size=4))
    plain = Laplace(model.net, params="last_layer").fit(batches(x, y, 4), num_data=N)
    torch.testing.assert_close(la.predict(mapping(x)).probs, plain.predict(x).probs)
    la.export(tmp_path / "predictive.pt2", OneArgument(a=x - x.round(), b=x.round().long()))
    program = torch.export.load(tmp_path / "predictive.pt2").module()
    probs = program(a=x - x.round(), b=x.round().long())["probs"]
    torch.testing.assert_close(probs, plain.predict(x).probs)
