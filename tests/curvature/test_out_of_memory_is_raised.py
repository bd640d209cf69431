"""Running out of memory is reported as such, and never as a property of the model."""

import pytest
import torch
import unusual_parameters
from torch import nn

from laplace_debias import Laplace
from laplace_debias.curvature import GGN
from laplace_debias.curvature.layers import calls, reference, resolve
from laplace_debias.curvature.layers.tap import Tap
from laplace_debias.curvature.network import chosen_positions
from laplace_debias.curvature.network.outputs import explain_unbatched
from laplace_debias.curvature.network.shared_copy import shared_copy
from laplace_debias.curvature.operators import linearisation
from laplace_debias.system.memory import is_out_of_memory

ERRORS = {
    "gpu": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    "cpu": RuntimeError("[enforce fail] DefaultCPUAllocator: not enough memory: you tried to"),
    "library": RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"),
    "numpy": MemoryError("Unable to allocate 2.00 GiB"),
}


ERROR = ERRORS["gpu"]


def exhausted(*_, **__):
    raise ERROR


def test_what_says_that_memory_is_exhausted():
    assert all(map(is_out_of_memory, ERRORS.values()))
    assert not is_out_of_memory(RuntimeError("shapes do not fit"))
    assert not is_out_of_memory(ValueError("not enough memory"))


def linear():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3)).double().eval()


def linearised(patch, _):
    patch.setattr(linearisation, "trace", exhausted)
    A = GGN(linear(), nn.CrossEntropyLoss(), [(torch.randn(2, 4).double(), torch.tensor([0, 1]))])
    A @ torch.ones(15, dtype=torch.float64)


def copied(patch, _):
    class Uncopied:
        __deepcopy__ = exhausted

    model = linear()
    model.held = Uncopied()
    shared_copy(model)


def run_without_a_dimension_of_examples(patch, _):
    x = torch.randn(4).double()
    with pytest.raises(ValueError, match="unsqueeze"):
        explain_unbatched(RuntimeError("shapes do not fit"), linear(), x)
    explain_unbatched(ERROR, linear(), x)
    raise ERROR


def tried_with_a_dimension_of_examples(patch, _):
    model = linear()
    model.register_forward_pre_hook(exhausted)
    explain_unbatched(ValueError("shapes do not fit"), model, torch.randn(4).double())


def copied_for_every_example(patch, _):
    tap = Tap(shared_copy(linear()), [])
    patch.setattr(tap, "_run", exhausted)
    tap._takes_copies([(torch.randn(2, 4).double(), torch.zeros(2, 3))])


def given_some_positions_alone(patch, _):
    model = linear()
    x = torch.randn(2, 5, 4).double()
    with patch.context() as inner_patch:
        inner_patch.setattr(chosen_positions, "_takes_fewer", lambda *_: True)
        chosen = chosen_positions.choose_positions(model, x, 1)
    patch.setattr(chosen_positions, "call", exhausted)
    chosen_positions._takes_fewer(model, chosen, x[:1], model(x[:1]))


def verified(patch, _):
    patch.setattr(resolve, "_deviation", exhausted)
    la = Laplace(linear(), backend="hooks")
    la.fit([(torch.randn(2, 4).double(), torch.tensor([0, 1]))])


def differentiated(patch, _):
    class Exhausted(torch.autograd.Function):
        forward = staticmethod(lambda _, x: x.clone())
        backward = staticmethod(exhausted)

    x = torch.ones(2, requires_grad=True)
    reference._gradients(Exhausted.apply(x), [x], torch.ones(2))


def exported(patch, folder):
    x = torch.randn(4, 4).double()
    la = Laplace(linear(), params="last_layer").fit([(x, torch.zeros(4, dtype=torch.long))])
    patch.setattr(torch.export, "export", exhausted)
    la.export(folder / "p.pt2", x)


@pytest.mark.parametrize(
    "work",
    [
        *(linearised, copied, run_without_a_dimension_of_examples, copied_for_every_example),
        *(tried_with_a_dimension_of_examples, given_some_positions_alone, verified),
        *(differentiated, exported),
    ],
)
def test_it_is_raised_while_a_model_is(work, monkeypatch, tmp_path):
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        work(monkeypatch, tmp_path)


@pytest.fixture
def entries():
    """A network with a class token, whose calls are run again under `vmap`."""
    return unusual_parameters.network("class token")


def test_calls_that_are_run_again_go_on_by_halves(entries, monkeypatch):
    model, x, y = entries
    options = {"curvature": "diag", "backend": "hooks"}
    expected = Laplace(model, **options).fit([(x, y)]).posterior.precision.to_dense().diagonal()
    original = calls._gradients_in_one_run
    sizes = []

    def limited(call, parameters, cotangents, rows):
        sizes.append(rows.stop - rows.start)
        if sizes[-1] > 2:
            raise ERROR
        return original(call, parameters, cotangents, rows)

    monkeypatch.setattr(calls, "_gradients_in_one_run", limited)
    # The loop over examples, to which a module without a rule for `vmap` falls back.
    monkeypatch.setattr(calls, "_gradients_one_by_one", None)
    actual = Laplace(model, **options).fit([(x, y)]).posterior.precision.to_dense().diagonal()
    assert max(sizes) == len(x)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-14)


def test_a_call_of_one_example_that_does_not_fit_is_refused(entries, monkeypatch):
    model, x, y = entries
    la = Laplace(model, curvature="diag", backend="hooks")
    la.fit([(x, y)])
    monkeypatch.setattr(calls, "_gradients_in_one_run", exhausted)
    monkeypatch.setattr(calls, "_gradients_one_by_one", None)
    with pytest.raises(RuntimeError, match="memory"):
        Laplace(model, curvature="diag", backend="hooks").fit([(x, y)])
