"""Batches as loaders and collators yield them: all the same fit, or an error."""

import dataclasses
from collections import namedtuple

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from laplace_debias import Categorical, Laplace, OneArgument, Quadratic
from laplace_debias.curvature import EKFAC, GGN, KFAC, EmpiricalFisher, Fisher, Hessian, Jacobian

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Y = torch.tensor([0, 2, 1, 0, 1, 2])
MASK = torch.randn(6, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


class Named(nn.Module):
    """A network of two inputs that are passed by name; with `labels` it would compute a loss."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, pixels, mask=None, labels=None):
        assert labels is None, "the model was given the targets"
        return self.layer(pixels if mask is None else pixels * mask)


@dataclasses.dataclass
class Record:
    pixels: torch.Tensor
    mask: torch.Tensor
    labels: torch.Tensor


Pair = namedtuple("Pair", ["x", "y"])


def model():
    torch.manual_seed(0)
    return Named().double().eval()


def precision(la):
    return la.posterior.precision.to_dense()


def expected(inputs=(X,)):
    """The posterior's precision at N = 6 and δ = 1, from the Jacobian written out."""
    network = model()
    x = inputs[0] if len(inputs) == 1 else inputs[0] * inputs[1]
    p = network(*inputs).softmax(1)
    J = torch.stack([torch.cat([torch.kron(torch.eye(3), v[None]), torch.eye(3)], 1) for v in x])
    H = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    C = torch.einsum("nci,ncd,ndj->ij", J.double(), H, J.double())
    return C + torch.eye(15, dtype=torch.float64)


ONE_INPUT = {
    "pair": ((X, Y), None),
    "list": ([X, Y], None),
    "named tuple": (Pair(X, Y), None),
    "image and label": ({"image": X, "label": Y}, None),
    "by its name": ({"pixels": X, "labels": Y}, None),
    "targets": ({"x": X, "targets": Y}, None),
    "y": ({"x": X, "y": Y}, None),
    "an index too": ((X, Y, torch.arange(6)), lambda batch: batch[:2]),
    "odd names": ({"a": X, "b": Y}, lambda batch: (batch["a"], batch["b"])),
    "a pair the other way": ((Y, X), lambda batch: (batch[1], batch[0])),
}


@pytest.mark.parametrize("form", ONE_INPUT)
def test_every_form_of_a_batch_is_the_same_fit(form):
    batch, hook = ONE_INPUT[form]
    la = Laplace(model(), curvature="full", batch=hook).fit_batches([batch])
    torch.testing.assert_close(precision(la), expected())
    plain = Laplace(model(), curvature="full").fit_batches([(X, Y)])
    assert la.evaluate([batch]) == plain.evaluate([(X, Y)])
    tuned = la.tune([batch], grid=[0.1, 1.0, 10.0])
    assert tuned.table == plain.tune([(X, Y)], grid=[0.1, 1.0, 10.0]).table


@pytest.mark.parametrize(
    "batch",
    [
        {"pixels": X, "mask": MASK, "labels": Y},
        Record(X, MASK, Y),
        ({"mask": MASK, "pixels": X}, Y),
        ((X, MASK), Y),
    ],
)
def test_several_inputs_go_to_the_model_by_name(batch):
    la = Laplace(model(), curvature="full").fit_batches([batch])
    torch.testing.assert_close(precision(la), expected((X, MASK)))


@pytest.mark.usefixtures("batches_apart")
def test_a_loader_of_dicts_is_fitted_in_every_mode():
    data = [{"pixels": x, "label": y} for x, y in zip(X, Y, strict=True)]
    pairs = list(zip(X, Y, strict=True))
    for mode in ("full", "mini", "debiased", "crossfit"):
        from_dicts = Laplace(model()).fit(DataLoader(data, batch_size=3), mode)
        from_pairs = Laplace(model()).fit(DataLoader(pairs, batch_size=3), mode)
        assert from_dicts.num_data == 6
        torch.testing.assert_close(precision(from_dicts), precision(from_pairs), rtol=0, atol=0)


def test_a_batch_is_predicted_for_without_its_targets():
    la = Laplace(model()).fit_batches([(X, Y)])
    probs = la.predict(X).probs
    for batch in ({"pixels": X}, {"pixels": X, "labels": Y}, {"image": X, "label": Y}):
        torch.testing.assert_close(la.predict(batch).probs, probs, rtol=0, atol=0)
        torch.testing.assert_close(la.functional(batch)[0], la.functional(X)[0], rtol=0, atol=0)
    with_mask = la.predict(Record(X, MASK, Y)).probs
    torch.testing.assert_close(with_mask, la.predict((X, MASK)).probs, rtol=0, atol=0)


def test_an_input_that_is_called_target_stays_an_input():
    class Conditional(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x, target):
            return self.layer(x + target)

    torch.manual_seed(0)
    la = Laplace(Conditional().double().eval()).fit_batches([((X, MASK), Y)])
    by_name = la.predict({"x": X, "target": MASK}).probs
    torch.testing.assert_close(by_name, la.predict((X, MASK)).probs, rtol=0, atol=0)


OPERATORS = {
    "GGN": lambda data, **kw: GGN(model(), nn.CrossEntropyLoss(), data, **kw),
    "Hessian": lambda data, **kw: Hessian(model(), nn.CrossEntropyLoss(), data, **kw),
    "Fisher": lambda data, **kw: Fisher(model(), nn.CrossEntropyLoss(), data, **kw),
    "EmpiricalFisher": lambda data, **kw: EmpiricalFisher(
        model(), nn.CrossEntropyLoss(), data, **kw
    ),
    "Jacobian": lambda data, **kw: Jacobian(model(), data, **kw),
    "KFAC": lambda data, **kw: KFAC(model(), nn.CrossEntropyLoss(), data, magnitudes=data, **kw),
    "EKFAC": lambda data, **kw: EKFAC(model(), nn.CrossEntropyLoss(), data, **kw),
    "Quadratic": lambda data, **kw: (
        Quadratic.from_data(model(), nn.CrossEntropyLoss(), data, **kw).matrix
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OPERATORS)
def test_operators_read_the_same_batches(name):
    make = OPERATORS[name]
    from_pairs = make([(X, Y)]).to_dense()
    from_dicts = make([{"image": X, "label": Y}]).to_dense()
    hooked = make([(X, Y, "file.png")], batch=lambda batch: batch[:2]).to_dense()
    torch.testing.assert_close(from_dicts, from_pairs, rtol=0, atol=0)
    torch.testing.assert_close(hooked, from_pairs, rtol=0, atol=0)


def test_a_loaded_posterior_takes_a_hook(tmp_path):
    Laplace(model()).fit_batches([(X, Y)]).save(tmp_path / "p.safetensors")
    la = Laplace.load(tmp_path / "p.safetensors", model(), batch=lambda batch: batch[:2])
    assert la.evaluate([(X, Y, 0)]) == la.evaluate([(X, Y, 1)])


@pytest.mark.parametrize(
    ("batch", "hook", "error", "message"),
    [
        ((X, Y, 0), None, TypeError, r"pass `batch=`.*batch\[0\], batch\[1\]"),
        ((X, Y, 0, 0), None, TypeError, "tuple of length 4. For other batches, pass `batch=`"),
        (X, None, TypeError, "got Tensor of length 6"),
        (
            {"image": X},
            None,
            ValueError,
            r"entries \['image'\], and none of them",
        ),
        ({"x": X, "y": Y, "label": Y}, None, ValueError, r"several .* \['label', 'y'\]"),
        (
            {"pixels": X, "index": torch.arange(6), "label": Y},
            None,
            ValueError,
            r"entries \['index'\], which are.* parameters are \['pixels', 'mask', 'labels'\]",
        ),
        ({"pixels": X, "labels": Y.tolist()}, None, TypeError, 'return_tensors="pt"'),
        (
            {"pixels": X, "labels": Y[:5]},
            None,
            ValueError,
            r"6 inputs, but its targets have the shape \(5,\)",
        ),
        ((X, Y), lambda batch: batch[0], TypeError, r"returned Tensor.* Return a pair"),
    ],
)
def test_what_is_not_clear_is_asked(batch, hook, error, message):
    with pytest.raises(error, match=message):
        Laplace(model(), batch=hook).fit_batches([batch], num_data=6)
    with pytest.raises(error, match=message):
        GGN(model(), Categorical(), [batch], batch=hook)


def test_the_remedy_for_a_model_that_takes_the_whole_batch_works():
    class TakesABatch(Named):
        def forward(self, batch):
            return super().forward(batch["pixels"], batch["mask"])

    named = Named().double().eval()
    model = TakesABatch().double().eval()
    model.load_state_dict(named.state_dict())
    inputs = {"pixels": X, "mask": MASK}
    batch = {**inputs, "labels": Y}
    for wrong in (batch, (inputs, Y), ({"pixels": X}, Y)):
        for build in (lambda data: Laplace(model).fit(data), lambda data: Jacobian(model, data)):
            with pytest.raises(
                ValueError, match=r"pass pairs `\(OneArgument\(inputs\), targets\)`"
            ):
                build([wrong])
    la = Laplace(model).fit([(OneArgument(batch), batch["labels"])])
    expected = Laplace(named).fit([batch]).predict({"pixels": X, "mask": MASK})
    torch.testing.assert_close(la.predict(OneArgument(batch)).probs, expected.probs)


def test_a_hook_must_be_a_function(unchecked):
    with pytest.raises(TypeError, match=r"batch must be Callable or None, got str"):
        Laplace(model(), batch="label")


class Image(torch.Tensor):
    """A tensor of a data library, whose operations keep its class."""


@pytest.mark.parametrize("params", ["all", "last_layer"])
@pytest.mark.parametrize("curvature", ["kfac", "full"])
def test_tensors_of_a_subclass_are_fitted_and_predicted_like_plain_ones(curvature, params):
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 3, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(48, 3)]
    network = nn.Sequential(*layers).double().eval()
    x = torch.randn(12, 1, 4, 4, dtype=torch.float64)
    y = torch.randint(3, (12,))
    plain = Laplace(network, curvature=curvature, params=params).fit([(x, y)])
    images, labels = x.as_subclass(Image), y.as_subclass(Image)
    la = Laplace(network, curvature=curvature, params=params).fit([(images, labels)])
    expected = plain.posterior.curvature.to_dense()
    assert type(la.posterior.curvature.to_dense()) is torch.Tensor
    torch.testing.assert_close(la.posterior.curvature.to_dense(), expected)
    covariance = la.functional(images)[1]
    assert type(covariance) is torch.Tensor
    torch.testing.assert_close(covariance, plain.functional(x)[1])
    torch.testing.assert_close(la.predict(images).probs, plain.predict(x).probs)


class Reusing:
    """A loader that writes every batch into the same memory."""

    def __init__(self, batches):
        self.batches = batches

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        x, y = (torch.empty_like(tensor) for tensor in self.batches[0])
        for inputs, targets in self.batches:
            x.copy_(inputs)
            y.copy_(targets)
            yield x, y


@pytest.mark.parametrize("mode", ["full", "mini", "debiased", "crossfit", "auto"])
def test_a_loader_may_write_every_batch_into_the_same_memory(mode):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double().eval()
    x = torch.randn(32, 4, dtype=torch.float64)
    batches = list(zip(x.split(8), torch.randint(3, (32,)).split(8), strict=True))
    expected, actual = (
        Laplace(network).fit(data, mode=mode, num_data=32) for data in (batches, Reusing(batches))
    )
    torch.testing.assert_close(
        actual.posterior.curvature.to_dense(), expected.posterior.curvature.to_dense()
    )


@pytest.mark.parametrize("mode", ["mini", "debiased"])
def test_a_batch_may_hold_what_cannot_be_copied(mode, tmp_path):
    torch.manual_seed(0)
    network = nn.Linear(4, 3)
    with open(tmp_path / "log", "w") as file:
        batches = ({"x": X.float(), "labels": Y, "log": file} for _ in range(2))
        la = Laplace(network, batch=lambda batch: (batch["x"], batch["labels"]))
        la.fit(batches, mode=mode, num_data=12)
    expected = Laplace(network).fit([(X.float(), Y)] * 2, mode=mode, num_data=12)
    assert la.posterior.curvature.to_dense().equal(expected.posterior.curvature.to_dense())
