"""An exhausted memory says nothing of the model: nobody takes it for "the model cannot do this"."""

import re

import pytest
import torch
import unusual_parameters
from torch import nn

from laplace_debias import Laplace
from laplace_debias.curvature import GGN
from laplace_debias.curvature.layers import calls, resolve
from laplace_debias.curvature.layers.tap import Tap
from laplace_debias.curvature.network import chosen_positions
from laplace_debias.curvature.network import reader as next_token
from laplace_debias.curvature.network.outputs import explaining_unbatched
from laplace_debias.curvature.network.shadow import shadow
from laplace_debias.curvature.operators import linearisation
from laplace_debias.system.memory import is_out_of_memory

ERRORS = {
    "gpu": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    "cpu": RuntimeError("[enforce fail] DefaultCPUAllocator: not enough memory: you tried to"),
    "library": RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"),
    "numpy": MemoryError("Unable to allocate 2.00 GiB"),
}


@pytest.fixture(params=ERRORS)
def error(request):
    return ERRORS[request.param]


def escaped(error):
    return re.escape(str(error)[:10])


def raising(error):
    def exhausted(*_, **__):
        raise error

    return exhausted


def test_what_says_that_memory_is_exhausted():
    assert all(map(is_out_of_memory, ERRORS.values()))
    assert not is_out_of_memory(RuntimeError("shapes do not fit"))
    assert not is_out_of_memory(ValueError("not enough memory"))


def linear():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3)).double().eval()


def test_while_a_batch_is_linearised(error, monkeypatch):
    monkeypatch.setattr(linearisation, "trace", raising(error))
    A = GGN(linear(), nn.CrossEntropyLoss(), [(torch.randn(2, 4).double(), torch.tensor([0, 1]))])
    with pytest.raises(type(error), match=escaped(error)):
        A @ torch.ones(15, dtype=torch.float64)


def test_while_a_model_is_copied(error):
    class Uncopied:
        def __deepcopy__(self, memo):
            raise error

    model = linear()
    model.held = Uncopied()
    with pytest.raises(type(error), match=escaped(error)):
        shadow(model)


def test_inside_a_forward_pass_that_may_lack_the_dimension_of_examples(error):
    x = torch.randn(4).double()
    with pytest.raises(ValueError, match="unsqueeze"), explaining_unbatched(linear(), x):
        raise RuntimeError("shapes do not fit")
    with pytest.raises(type(error), match=escaped(error)), explaining_unbatched(linear(), x):
        raise error


def test_while_it_is_tried_whether_the_dimension_of_examples_lacks(error):
    model = linear()
    model.register_forward_pre_hook(raising(error))
    x = torch.randn(4).double()
    with pytest.raises(type(error), match=escaped(error)), explaining_unbatched(model, x):
        raise ValueError("shapes do not fit")


def test_while_copies_for_every_example_are_tried(error, monkeypatch):
    tap = Tap(shadow(linear()), [])
    monkeypatch.setattr(tap, "_run", raising(error))
    with pytest.raises(type(error), match=escaped(error)):
        tap._takes_copies(torch.randn(2, 4).double(), torch.zeros(2, 3))


def test_while_a_head_is_given_some_positions_alone(error, monkeypatch):
    model, x = linear(), torch.randn(2, 5, 4).double()
    monkeypatch.setattr(chosen_positions, "_takes_fewer", lambda *_: True)
    chosen = chosen_positions.choose_positions(model, x, 1)
    monkeypatch.undo()
    monkeypatch.setattr(chosen_positions, "call", raising(error))
    with pytest.raises(type(error), match=escaped(error)):
        chosen_positions._takes_fewer(model, chosen, x[:1], model(x[:1]))


def test_while_a_block_is_verified(error, monkeypatch):
    monkeypatch.setattr(resolve, "_jacobians", raising(error))
    la = Laplace(linear(), backend="hooks")
    with pytest.raises(type(error), match=escaped(error)):
        la.fit([(torch.randn(2, 4).double(), torch.tensor([0, 1]))])


def test_while_the_outputs_are_differentiated(error):
    class Exhausted(torch.autograd.Function):
        @staticmethod
        def forward(_, x):
            return x.clone()

        @staticmethod
        def backward(_, gradient):
            raise error

    x = torch.ones(2, requires_grad=True)
    with pytest.raises(type(error), match=escaped(error)):
        resolve._gradients(Exhausted.apply(x), [x], torch.ones(2))


def test_while_the_labels_of_a_language_model_are_looked_at(error, monkeypatch):
    monkeypatch.setattr(next_token, "_takes_labels", lambda model: model)
    monkeypatch.setattr(next_token, "_positions_read", raising(error))
    with pytest.raises(type(error), match=escaped(error)):
        next_token.shifts_labels(linear(), {}, torch.zeros(1, 4, dtype=torch.long))


def test_while_a_prediction_is_exported(error, monkeypatch, tmp_path):
    x = torch.randn(4, 4).double()
    la = Laplace(linear(), params="last_layer").fit([(x, torch.zeros(4, dtype=torch.long))])
    monkeypatch.setattr(torch.export, "export", raising(error))
    with pytest.raises(type(error), match=escaped(error)):
        la.export(tmp_path / "p.pt2", x)


@pytest.fixture
def entries():
    """A network with a class token, whose calls are run again under `vmap`."""
    return unusual_parameters.network("class token")


def test_calls_that_are_run_again_go_on_by_halves(entries, error, monkeypatch):
    model, x, y = entries
    options = {"curvature": "diag", "backend": "hooks"}
    expected = Laplace(model, **options).fit([(x, y)]).posterior.precision.to_dense().diagonal()
    original, tried = calls._vectorised, []

    def few(call, parameters, cotangents, part):
        tried.append(part.stop - part.start)
        if tried[-1] > 2:
            raise error
        return original(call, parameters, cotangents, part)

    monkeypatch.setattr(calls, "_vectorised", few)
    # The loop over examples, to which a module without a rule for `vmap` falls back.
    monkeypatch.setattr(calls, "_one_by_one", None)
    found = Laplace(model, **options).fit([(x, y)]).posterior.precision.to_dense().diagonal()
    assert max(tried) == len(x)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


def test_a_call_of_one_example_that_does_not_fit_is_refused(entries, error, monkeypatch):
    model, x, y = entries
    la = Laplace(model, curvature="diag", backend="hooks")
    la.fit([(x, y)])
    monkeypatch.setattr(calls, "_vectorised", raising(error))
    monkeypatch.setattr(calls, "_one_by_one", None)
    with pytest.raises((RuntimeError, MemoryError), match=r"memory|allocate|ALLOC"):
        Laplace(model, curvature="diag", backend="hooks").fit([(x, y)])
