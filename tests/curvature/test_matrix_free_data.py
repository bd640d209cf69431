"""How network operators use their data, memory and model, and which inputs they refuse."""

import gc
import weakref

import pytest
import torch
from conformance import fingerprint, is_same
from networks import (
    BCE,
    CE,
    LABELS,
    N,
    Net,
    W,
    batches,
    build,
    close,
    dense_ggn,
    dense_hessian,
    inputs,
    probabilities,
    random_labels,
    zero_one,
)
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from laplace_debias.curvature import GGN, EmpiricalFisher, Fisher, Hessian, Jacobian
from laplace_debias.curvature.operators import linearisation
from laplace_debias.curvature.operators.network_operator import NetworkOperator

# Independence of how products are computed.


@pytest.mark.parametrize(
    ("operator", "name"),
    [
        pytest.param(Hessian, "mlp", marks=pytest.mark.slow),
        (GGN, "by value"),
        (EmpiricalFisher, "mlp"),
    ],
)
def test_memory_bound_and_chunks_do_not_matter(operator, name):
    model = build(name)
    loss = nn.CrossEntropyLoss()
    x = inputs(3)
    y = LABELS
    data = batches(x, y, 2)
    one_batch = operator(model, loss, [(x, y)])
    V = inputs(one_batch.shape[0]).T.contiguous()
    expected = one_batch @ V
    unlimited = operator(model, loss, data)
    unlimited @ V
    assert unlimited.num_bytes_kept > 0
    for bound, chunk in [
        (0, 1),
        (unlimited.num_bytes_kept // 2, 2),
        (unlimited.num_bytes_kept, 100),
    ]:
        bounded = operator(model, loss, data, memory_bound=bound, chunk_size=chunk)
        torch.testing.assert_close(bounded @ V, expected)
        assert bounded.num_bytes_kept <= bound
        torch.testing.assert_close(bounded @ V[:, 0], expected[:, 0])
    assert unlimited.num_bytes_kept == bounded.num_bytes_kept


def test_kept_batches_are_not_read_again():
    class Counted(list):
        passes = 0

        def __iter__(self):
            Counted.passes += 1
            return super().__iter__()

    model = build("mlp")
    loss = nn.CrossEntropyLoss()
    x = inputs(3)
    y = LABELS
    operator = GGN(model, loss, Counted(batches(x, y, 3)))
    v = torch.ones(operator.shape[0], dtype=torch.float64)
    first = operator @ v
    num_passes = Counted.passes
    torch.testing.assert_close(operator @ v, first)
    assert Counted.passes == num_passes


@pytest.mark.slow
def test_a_changed_model_is_linearised_again():
    model = build("conv")
    loss = nn.CrossEntropyLoss()
    x = inputs(3)
    y = LABELS
    operators = [Hessian(model, loss, [(x, y)]), GGN(model, loss, [(x, y)])]
    matrices = [operator.to_dense() for operator in operators]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loss(model(x), y).backward()
    optimizer.step()
    model[2].running_mean.add_(0.3)
    close(operators[0], dense_hessian(model, loss, x, y))
    close(operators[1], dense_ggn(model, loss, x, y))
    for operator, matrix in zip(operators, matrices, strict=True):
        assert not torch.allclose(operator.to_dense(), matrix)


class Tempered(nn.Sequential):
    """Layers whose outputs are divided by a number."""

    temperature = 1.0

    def forward(self, x):
        return super().forward(x) / self.temperature


def test_a_model_with_another_number_is_linearised_again():
    torch.manual_seed(0)
    model = Tempered(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3)).double()
    loss = nn.CrossEntropyLoss()
    x = torch.randn(5, 4, dtype=torch.float64)
    y = torch.arange(5) % 3
    operators = [Hessian(model, loss, [(x, y)]), GGN(model, loss, [(x, y)])]
    matrices = [operator.to_dense() for operator in operators]
    model.temperature = 0.5
    close(operators[0], dense_hessian(model, loss, x, y))
    close(operators[1], dense_ggn(model, loss, x, y))
    for operator, matrix in zip(operators, matrices, strict=True):
        assert not torch.allclose(operator.to_dense(), matrix)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mlp", "by value"])
def test_a_model_that_is_changed_behind_torchs_back_is_linearised_again(name):
    model = build(name)
    loss = nn.CrossEntropyLoss()
    x = inputs(3)
    y = LABELS
    operators = [Hessian(model, loss, [(x, y)]), GGN(model, loss, [(x, y)])]
    [operator.to_dense() for operator in operators]
    # torch's version counter does not count changes through `.data`.
    for parameter in model.parameters():
        parameter.data.mul_(-3)
    close(operators[0], dense_hessian(model, loss, x, y))
    close(operators[1], dense_ggn(model, loss, x, y))
    # A parameter is replaced by another object.
    module = next(module for module in model.modules() if isinstance(module, nn.Linear))
    module.weight = nn.Parameter(module.weight.detach() + 1)
    close(operators[0], dense_hessian(model, loss, x, y))
    close(operators[1], dense_ggn(model, loss, x, y))
    # The entries are only permuted.
    parameter.data.copy_(parameter.data.flip(0))
    close(operators[0], dense_hessian(model, loss, x, y))
    close(operators[1], dense_ggn(model, loss, x, y))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mlp", "by value"])
@pytest.mark.parametrize("operator", [GGN, Hessian])
def test_batches_that_are_not_kept_are_linearised_one_at_a_time(operator, name, monkeypatch):
    references = []
    num_alive = []
    original = NetworkOperator._make

    def watched(self, batch):
        gc.collect()
        num_alive.append(sum(reference() is not None for reference in references))
        item = original(self, batch)
        references.append(weakref.ref(item.linearisation))
        return item

    monkeypatch.setattr(NetworkOperator, "_make", watched)
    model = build(name)
    data = batches(inputs(3), LABELS, 2)
    A = operator(model, nn.CrossEntropyLoss(), data, memory_bound=0)
    J = Jacobian(model, data, memory_bound=0)
    A @ torch.ones(A.shape[0], dtype=torch.float64)
    J @ torch.ones(J.shape[1], dtype=torch.float64)
    J.T @ torch.ones(J.shape[0], dtype=torch.float64)
    assert len(num_alive) == 3 * len(data)
    assert max(num_alive) == 0


@pytest.mark.parametrize("operator", [GGN, Hessian])
def test_an_exhausted_memory_is_not_taken_for_a_model_that_cannot_be_recorded(
    operator, monkeypatch
):
    def exhausted(*_):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(linearisation, "trace", exhausted)
    A = operator(build("mlp"), nn.CrossEntropyLoss(), batches(inputs(3), LABELS, 2))
    with pytest.raises(torch.OutOfMemoryError):
        A @ torch.ones(A.shape[0], dtype=torch.float64)


def test_sequences_of_several_lengths():
    torch.manual_seed(1)
    model = nn.Conv1d(2, 3, 1).double()
    x = inputs(2, 4)
    y = random_labels(4)
    data = [(x[:3, :, :4], y[:3, :4]), (x[3:, :, :2], y[3:, :2])]
    loss = nn.CrossEntropyLoss()
    padded = y.clone()
    padded[3:, 2:] = -100
    close(GGN(model, loss, data), dense_ggn(model, loss, x, padded))
    with pytest.raises(ValueError, match="the same shape"):
        Jacobian(model, data).to_dense()
    wrong = [data[0], (x[3:, :, :2], y[3:, :3])]
    with pytest.raises(ValueError, match="class indices of shape"):
        GGN(model, loss, wrong).to_dense()


@pytest.mark.slow
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", ["mlp", "by value"])
def test_modes_that_switch_differentiation_off(mode, name):
    model = build(name)
    loss = nn.CrossEntropyLoss()
    y = LABELS
    expected = dense_ggn(model, loss, inputs(3), y).sum(1)
    H = dense_hessian(model, loss, inputs(3), y).sum(1)
    with mode():
        x = inputs(3) + 0
        v = torch.ones(31, dtype=torch.float64)
        torch.testing.assert_close(GGN(model, loss, [(x, y)]) @ v, expected)
        torch.testing.assert_close(Hessian(model, loss, [(x, y)]) @ v, H)
    torch.testing.assert_close(GGN(model, loss, [(x, y)]) @ v, expected)


# The model stays untouched.


@pytest.mark.parametrize(
    ("operator", "name"),
    [(Hessian, "conv"), (GGN, "tied"), (EmpiricalFisher, "by value"), (Hessian, "by value")],
)
def test_the_model_is_untouched(operator, name):
    model = build(name)
    loss = nn.CrossEntropyLoss()
    x = inputs(3)
    y = LABELS
    fingerprint_before = fingerprint(model)
    op = operator(model, loss, batches(x, y, 3))
    op @ torch.ones(op.shape[0], dtype=torch.float64)
    assert is_same(fingerprint_before, fingerprint(model))
    x[0, 0] = torch.nan
    with pytest.raises(ValueError, match="NaN"):
        operator(model, loss, [(x, y)])
    assert is_same(fingerprint_before, fingerprint(model))


# Bad input.


def good():
    return {
        "model": build("mlp"),
        "loss": nn.CrossEntropyLoss(),
        "data": batches(inputs(3), LABELS, 3),
    }


def random_net():
    return Net(
        lambda self, x: self.one(x) + torch.rand(3, dtype=torch.float64), one=nn.Linear(3, 3)
    ).double()


class Shared:
    """A loader whose passes share an iterator: each pass continues where the last one ended."""

    def __init__(self):
        self.batches = iter(batches(inputs(3), LABELS, 3))

    def __iter__(self):
        return self.batches


def broken():
    model = build("mlp")
    model[0].weight.data[0, 0] = torch.nan
    return model


class Mean(nn.CrossEntropyLoss):
    """A subclass of a loss, whose forward pass might compute anything."""

    def forward(self, outputs, targets):
        return super().forward(outputs, targets)


X = inputs(3)
BAD_MODELS = {
    "dropout": (nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5)).double(), ValueError, "model.eval"),
    "batch norm": (nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), ValueError, "model.eval"),
    "random": (random_net(), ValueError, "deterministic"),
    "model": (F.relu, TypeError, "nn.Module"),
    "nan parameter": (broken(), ValueError, "0.weight contains NaN"),
}
SHUFFLED = DataLoader(TensorDataset(X, LABELS), 3, shuffle=True, generator=torch.Generator())
BAD_DATA = {
    "iterator": (iter(batches(X, LABELS, 3)), TypeError, "only once"),
    "generator": ((b for b in batches(X, LABELS, 3)), TypeError, "only once"),
    "no iterable": (3, TypeError, "iterable"),
    "empty": ([], ValueError, "empty"),
    "no pairs": ([X], TypeError, "pairs"),
    "sizes": ([(X, LABELS[:3])], ValueError, "its targets have the shape"),
    "shared iterator": (Shared, TypeError, "Shared yielded no batch in the second pass"),
    "nan": ([(X / 0 * 0, LABELS)], ValueError, "NaN"),
    "dtype": ([(X.float(), LABELS)], TypeError, "Convert"),
    "shuffled": (SHUFFLED, ValueError, "shuffle=False"),
    "all ignored": ([(X, torch.full_like(LABELS, -100))], ValueError, "ignore_index"),
    "labels": ([(X, LABELS + 1)], ValueError, "between 0 and 2"),
    "one-hot": ([(X, F.one_hot(LABELS))], ValueError, "class indices of shape"),
    "bool": ([(X, LABELS > 0)], TypeError, "must be integers"),
}
BAD_LOSSES = {
    "loss class": (CE, LABELS, TypeError, "instance"),
    "none": (CE(reduction="none"), LABELS, ValueError, "scalar loss"),
    "no reduction": (F.cross_entropy, LABELS, ValueError, "reduction="),
    "weighted mean": (nn.NLLLoss(weight=W), LABELS, ValueError, 'reduction="sum"'),
    "weight": (CE(weight=W[:2]), LABELS, ValueError, "`weight` of shape"),
    "negative weight": (CE(weight=-W), LABELS, ValueError, "`weight` of the loss must be"),
    "pos_weight": (BCE(pos_weight=W[:2]), zero_one(3), ValueError, "`pos_weight` of shape"),
    "weight rows": (BCE(weight=W[:2, None]), zero_one(3), ValueError, "To weight examples"),
    "ignored": (CE(ignore_index=1), probabilities(3), ValueError, "ignore_index=1"),
    "shape": (nn.MSELoss(), inputs(1), ValueError, "shape of the outputs"),
    "integers": (nn.MSELoss(), random_labels(3), TypeError, "float"),
    "range": (BCE(), X, ValueError, "between 0 and 1"),
}
NAMES = r"got a list of Parameter. Pass names, such as \['0.weight', [^=]*$"
BAD_ARGUMENTS = {
    **{
        name: ({"model": model}, error, message)
        for name, (model, error, message) in BAD_MODELS.items()
    },
    **{name: ({"data": data}, error, message) for name, (data, error, message) in BAD_DATA.items()},
    **{
        name: ({"loss": loss, "data": [(X, y)]}, error, message)
        for name, (loss, y, error, message) in BAD_LOSSES.items()
    },
    "num_data": ({"num_data": 7}, ValueError, "has 6 examples"),
    "two reductions": ({"reduction": "sum"}, ValueError, "Remove the operator.s `reduction=`"),
    "not scalar": ({"loss": lambda f, y: f, "reduction": "sum"}, TypeError, "scalar"),
    "params": ({"params": ["5.weight"]}, ValueError, "5.weight"),
    "tensors as params": ({"params": list(build("mlp").parameters())}, TypeError, NAMES),
    "memory_bound": ({"memory_bound": -1}, ValueError, "memory_bound"),
    "chunk_size": ({"chunk_size": 0}, ValueError, "chunk_size"),
}
# The Jacobian has no loss, so it accepts these.
BAD_FOR_A_LOSS_ONLY = {"labels", "one-hot", "bool", "all ignored"}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("name", BAD_ARGUMENTS)
def test_bad_input_is_refused_before_work(name):
    change, error, message = BAD_ARGUMENTS[name]
    for operator in (GGN, EmpiricalFisher, Jacobian):
        arguments = {**good(), **change}
        if arguments["data"] is Shared:
            arguments["data"] = Shared()
        if operator is Jacobian:
            if name in BAD_FOR_A_LOSS_ONLY or set(change) & {"loss", "reduction"}:
                continue
            del arguments["loss"]
        with pytest.raises(error, match=message):
            operator(**arguments)


@pytest.mark.usefixtures("unchecked")
def test_fisher_refuses_what_it_cannot_draw():
    for change, error, message in [
        ({"fisher": "empirical"}, ValueError, "EmpiricalFisher"),
        ({"mc_samples": 3}, ValueError, 'fisher="mc"'),
        ({"generator": torch.Generator()}, ValueError, 'fisher="mc"'),
        ({"fisher": "mc", "mc_samples": 0}, ValueError, "at least 1"),
        ({"loss": lambda f, y: f.exp().sum(), "reduction": "sum"}, TypeError, "distribution"),
    ]:
        with pytest.raises(error, match=message):
            Fisher(**{**good(), **change})


def test_outputs_that_are_nan_name_the_remedy():
    model = Net(lambda self, x: self.one(x).log(), one=nn.Linear(3, 3)).double()
    with pytest.raises(ValueError, match="scale"):
        GGN(model, nn.CrossEntropyLoss(), [(inputs(3), LABELS)])


def test_data_that_changes_between_products_is_refused():
    data = batches(inputs(3), LABELS, 3)
    operator = GGN(build("mlp"), nn.CrossEntropyLoss(), data, memory_bound=0)
    v = torch.ones(operator.shape[0], dtype=torch.float64)
    operator @ v
    data[1] = (data[1][0].flip(1), data[1][1])
    with pytest.raises(ValueError, match="Batch 2 is not the same"):
        operator @ v
    del data[1:]
    with pytest.raises(ValueError, match="Batch 2 is not the same"):
        operator @ v


@pytest.mark.parametrize("entry", ["first target", "first input", "last input"])
@pytest.mark.parametrize("size", [1, 3])
def test_any_entry_that_changes_between_products_is_noticed(size, entry):
    data = [(x.clone(), y.clone()) for x, y in batches(inputs(3), LABELS, size)]
    operator = GGN(build("mlp"), nn.CrossEntropyLoss(), data, memory_bound=0)
    v = torch.ones(operator.shape[0], dtype=torch.float64)
    operator @ v
    x, y = data[1]
    if entry == "first target":
        y[0] = (y[0] + 1) % 3
    else:
        x.view(-1)[0 if entry == "first input" else -1] += 0.1
    with pytest.raises(ValueError, match="Batch 2 is not the same"):
        operator @ v


def test_masks_may_hold_minus_infinity_and_no_outputs_may():
    def attend(self, x, mask):
        return self.two((x * mask.softmax(1)).tanh())

    model = Net(attend, two=nn.Linear(3, 3)).double()
    x = inputs(3)
    mask = torch.zeros(N, 3).double()
    y = LABELS
    mask[:, 2] = -torch.inf
    mask[0, 1] = -torch.inf
    loss = nn.CrossEntropyLoss()
    by_name = [({"x": x[i : i + 3], "mask": mask[i : i + 3]}, y[i : i + 3]) for i in (0, 3)]
    plain = nn.Sequential(nn.Tanh(), model.two)
    expected = dense_ggn(plain, loss, x * mask.softmax(1), y)
    close(GGN(model, loss, by_name), expected)
    for bad in (torch.inf, torch.nan):
        wrong = mask.clone()
        wrong[1, 1] = bad
        with pytest.raises(ValueError, match="NaN"):
            GGN(model, loss, [({"x": x, "mask": wrong}, y)])
    x[0, 0] = -torch.inf
    with pytest.raises(ValueError, match="NaN or Inf"):
        GGN(model.two, loss, [(x, y)])


@pytest.mark.parametrize(
    "loss", [nn.NLLLoss(), Mean(), F.cross_entropy, F.nll_loss], ids=lambda loss: str(loss)[:12]
)
def test_a_mean_that_leaves_targets_out_is_refused(loss):
    ignored = LABELS.clone()
    ignored[4] = -100
    reduction = None if isinstance(loss, nn.Module) else "mean"
    model = nn.Sequential(build("mlp"), nn.LogSoftmax(1))
    GGN(model, loss, batches(inputs(3), LABELS, 3), reduction=reduction)
    with pytest.raises(ValueError, match=r'ignore_index=-100.*reduction="sum"'):
        GGN(model, loss, batches(inputs(3), ignored, 3), reduction=reduction)


def test_the_mean_over_a_batch_of_the_kl_divergence_is_that_over_the_examples():
    model = nn.Sequential(build("mlp"), nn.LogSoftmax(1))
    x = inputs(3)
    y = probabilities(3)
    loss = nn.KLDivLoss(reduction="batchmean")
    close(Hessian(model, loss, batches(x, y, 2)), dense_hessian(model, loss, x, y))
