"""Any forward pass: what the layer tap follows, and what it refuses instead of getting it wrong."""

import weakref
from collections import Counter

import oracle
import pytest
import timm
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from laplace_debias import Laplace
from laplace_debias.curvature.layers import forward_pass as forward_pass_module
from laplace_debias.curvature.layers.blocks import curvature_blocks
from laplace_debias.curvature.layers.tap import Tap
from laplace_debias.curvature.network.shared_copy import shared_copy
from laplace_debias.system.memory import MemoryCounter


class Net(nn.Module):
    """Two layers and a forward pass given by a function."""

    def __init__(self, forward, width=4):
        super().__init__()
        self.first = nn.Linear(3, width)
        self.second = nn.Linear(4, 3)
        self.function = forward

    def forward(self, x):
        return self.function(self, x)


def in_place(net, x):
    h = net.first(x)
    h += 1.0
    return net.second(F.relu(h, inplace=True))


def by_keyword(net, x):
    return net.second(input=torch.tanh(net.first(input=x)))


def skip(net, x):
    h = net.first(x)
    return net.second(h + torch.tanh(h) * 0.5)


def reused(net, x):
    h = torch.tanh(net.first(x))
    return net.second(h) + 0.5 * net.second(h.square())


def functional_view(net, x):
    return net.second(net.first(x).view(len(x), 2, 2).flatten(1).sigmoid())


def merged(net, x):
    return net.second(net.first(x.reshape(-1, 3)).view(len(x), -1, 4)).sum(1)


FORWARDS = [in_place, by_keyword, skip, reused, functional_view, merged]


@pytest.mark.parametrize("forward", FORWARDS)
def test_jacobians_and_bias_blocks_are_exact_for_any_forward(forward):
    model = Net(forward).double().eval()
    x = torch.randn(6, 2, 3).double() if forward is merged else torch.randn(6, 3).double()
    y = torch.randint(3, (6,))
    la = Laplace(model).fit_batches([(x, y)])
    for name in ("first.bias", "second.bias"):
        exact = oracle.ggn_block(model, x, "classification", name)
        torch.testing.assert_close(la.posterior.curvature.blocks[name].to_dense(), exact)
    J = oracle.flat_jacobian(model, x, la.param_names)
    covariance = la.posterior.covariance.to_dense()
    torch.testing.assert_close(la.functional(x)[1], oracle.functional_covariance(J, covariance))


class Viewed(nn.Linear):
    """A linear layer whose output is a view."""

    def forward(self, x):
        return super().forward(x).view(len(x), -1)


@pytest.mark.parametrize("layer", [nn.Linear, Viewed])
def test_output_gradients_are_exact_if_an_activation_overwrites_a_layers_output(layer):
    torch.manual_seed(0)
    layers = [layer(3, 4), nn.ELU(inplace=True), layer(4, 5), nn.ELU(inplace=True), layer(5, 3)]
    model = nn.Sequential(*layers).double().eval()
    names = [f"{index}.bias" for index in (0, 2, 4)]
    x, column = torch.randn(6, 3).double(), torch.randn(6, 3).double()
    biases = [model.get_parameter(name) for name in names]
    expected = torch.autograd.grad((model(x) * column).sum(), biases)
    tap = Tap(shared_copy(model), curvature_blocks(model, names))
    gradients = {
        record.block.name: record.output_gradients[0].sum((0, 1))
        for record in tap.forward(x).backward(column.unsqueeze(0))
    }
    for name, gradient in zip(names, expected, strict=True):
        torch.testing.assert_close(gradients[name], gradient)


def test_a_forward_pass_keeps_inputs_of_layers_but_not_their_outputs():
    layers = [nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)]
    model = nn.Sequential(*layers).double().eval()
    names = [name for name, _ in model.named_parameters()]
    tap = Tap(shared_copy(model), curvature_blocks(model, names))
    x = torch.randn(10, 3).double()
    with MemoryCounter() as memory:
        forward_pass = tap.forward(x)
        num_live_values = memory.live // x.itemsize
    assert forward_pass.outputs.shape == (10, 2)
    # The inputs of the layers, the first layer's output, which is a leaf of the graph, and the
    # outputs of the network.
    assert num_live_values == 10 * (3 + 4 + 5 + 4 + 2)


class Patches(nn.Module):
    """A normalised convolution whose pixels become tokens, as in XCiT."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.token_norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        tokens = self.norm(self.conv(x)).flatten(2).transpose(1, 2)
        return self.head(torch.tanh(self.token_norm(tokens)).mean(1))


@pytest.mark.parametrize("params", ["all", ["conv.weight"]])
def test_one_example_has_the_variances_that_it_has_in_a_batch(params):
    """torch's own backward pass of the normalisation is wrong for one example in this layout."""
    model = Patches().double().eval()
    x = torch.randn(3, 2, 5, 5).double()
    la = Laplace(model, params=params, curvature="diag", prior_precision=0.5)
    la.fit([(x, torch.tensor([0, 2, 1]))])
    parameters = [model.get_parameter(name) for name in la.param_names]
    variance = la.posterior.precision.to_dense().diagonal().reciprocal()
    for index in range(3):
        # In a batch.
        gradients = [torch.autograd.grad(model(x)[index, c], parameters) for c in range(3)]
        J = torch.stack([torch.cat([g.flatten() for g in row]) for row in gradients])
        actual = la.functional(x[index : index + 1], diagonal=True)[1][0]
        torch.testing.assert_close(actual, J.square() @ variance)


def test_ekfac_of_a_reused_layer_measures_the_exact_curvature():
    model = Net(reused).double().eval()
    x = torch.randn(6, 3).double()
    y = torch.randint(3, (6,))
    la = Laplace(model, curvature="ekfac").fit_batches([(x, y)])
    block = la.posterior.curvature.blocks["second.weight"]
    exact = oracle.ggn_block(model, x, "classification", "second.weight")
    U = torch.kron(block.U_G.contiguous(), block.U_A.contiguous())
    measured = (U.T @ exact @ U).diag().reshape(block.magnitudes.shape)
    torch.testing.assert_close(block.magnitudes, measured)


def test_a_users_hook_on_a_layer_is_part_of_the_forward_pass():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double().eval()
    model[0].register_forward_hook(lambda module, inputs, output: 2 * output)
    x = torch.randn(6, 3).double()
    y = torch.randint(3, (6,))
    la = Laplace(model).fit_batches([(x, y)])
    exact = oracle.ggn_block(model, x, "classification", "0.bias")
    torch.testing.assert_close(la.posterior.curvature.blocks["0.bias"].to_dense(), exact)
    with pytest.raises(NotImplementedError, match=r"0 \(Linear\) has forward hooks"):
        Laplace(model, backend="backpack")


def detached(net, x):
    return net.second(net.first(x).detach())


def unused(net, x):
    net.first(x)
    return net.second(F.pad(x, (0, 1)))


def not_called(net, x):
    return net.second(F.pad(x, (0, 1)))


def without_gradients(net, x):
    with torch.no_grad():
        return net.second(net.first(x))


@pytest.mark.parametrize("forward", [detached, unused, not_called])
def test_what_the_outputs_do_not_depend_on_is_left_out(forward):
    model = Net(forward).double().eval()
    x = torch.randn(5, 3).double()
    y = torch.randint(3, (5,))
    with pytest.warns(UserWarning, match=r"do not depend on \['first.weight', 'first.bias'\]"):
        la = Laplace(model).fit_batches([(x, y)])
    assert la.param_names == ["second.weight", "second.bias"]
    alone = Laplace(model, params=la.param_names).fit_batches([(x, y)])
    assert torch.equal(la.functional(x)[1], alone.functional(x)[1])
    for named in (["first.bias", "second.bias"], lambda name, parameter: True):
        with pytest.raises(ValueError, match=r"do not depend on \['first"):
            Laplace(model, params=named).fit_batches([(x, y)])


def overwritten(net, x):
    h = torch.tanh(net.first(x))
    out = net.second(h)
    h.mul_(2)
    return out + h[:, :3]


def test_an_overwritten_activation_is_refused():
    model = Net(overwritten).eval()
    with pytest.raises(NotImplementedError, match=r"cannot differentiate.*inplace operation"):
        Laplace(model).fit_batches([(torch.randn(5, 3), torch.randint(3, (5,)))])


def test_outputs_that_depend_on_nothing_are_refused():
    model = Net(without_gradients).eval()
    with pytest.raises(ValueError, match="do not depend on"):
        Laplace(model).fit_batches([(torch.randn(5, 3), torch.randint(3, (5,)))])


def test_a_forward_of_its_own_that_computes_the_same_is_taken():
    class Same(nn.Linear):
        def forward(self, x):
            return x @ self.weight.T + self.bias

    torch.manual_seed(0)
    x = torch.randn(4, 3).double()
    y = torch.randint(2, (4,))
    plain = nn.Linear(3, 2).double()
    same = Same(3, 2).double()
    same.load_state_dict(plain.state_dict())
    fits = [Laplace(nn.Sequential(m).eval()).fit_batches([(x, y)]) for m in (plain, same)]
    dense = [la.posterior.curvature.to_dense() for la in fits]
    torch.testing.assert_close(dense[0], dense[1])


@pytest.mark.parametrize("options", [{"padding_mode": "circular"}, {"padding": "same"}])
def test_paddings_that_backpack_gets_wrong_go_through_hooks(options):
    layer = nn.Conv2d(2, 3, 3, **({"padding": 1} | options))
    tail = [nn.Flatten(), nn.Linear(75, 3)]
    model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.Tanh(), layer, *tail).double().eval()
    x = torch.randn(4, 1, 5, 5).double()
    y = torch.randint(3, (4,))
    la = Laplace(model).fit_batches([(x, y)])
    for name in ("0.bias", "2.bias"):
        exact = oracle.ggn_block(model, x, "classification", name)
        torch.testing.assert_close(la.posterior.curvature.blocks[name].to_dense(), exact)
    with pytest.raises(NotImplementedError, match=r"2 \(Conv2d\) has padding"):
        Laplace(model, backend="backpack")


def test_callers_in_inference_mode_get_the_same():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).eval()
    x = torch.randn(6, 3)
    y = torch.randint(3, (6,))
    for backend in ("backpack", "hooks"):
        la = Laplace(model, backend=backend).fit_batches([(x, y)])
        expected = la.predict(x).probs
        with torch.inference_mode():
            inside = torch.empty_like(x).copy_(x)
            again = Laplace(model, backend=backend).fit_batches([(inside, y)])
            for method in ("glm", "map"):
                again.predict(inside, method)
            again.predict(inside, "glm-mc", samples=2)
            probs = again.predict(inside).probs
        torch.testing.assert_close(probs, expected)
        torch.testing.assert_close(again.predict(inside).probs, expected)


def test_inputs_that_require_gradients_are_accepted():
    model = nn.Sequential(nn.Linear(3, 3)).eval()
    x = torch.randn(6, 3)
    y = torch.randint(3, (6,))
    plain = Laplace(model).fit_batches([(x, y)])
    leaf = Laplace(model).fit_batches([(x.clone().requires_grad_(), y)])
    torch.testing.assert_close(leaf.predict(x).probs, plain.predict(x).probs)


def test_buffers_that_the_forward_writes_stay_as_they_were():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 3)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls += 1
            return self.layer(x)

    model = Counting().eval()
    la = Laplace(model).fit_batches([(torch.randn(4, 3), torch.randint(3, (4,)))])
    la.predict(torch.randn(2, 3))
    assert model.calls == 0


def test_different_data_get_different_monte_carlo_labels():
    """Directions and magnitudes from the same batch: the labels are drawn anew."""
    model = nn.Sequential(nn.Linear(3, 3)).double().eval()
    x = torch.randn(8, 3).double()
    y = torch.randint(3, (8,))
    la = Laplace(model, fisher="mc", params=["0.bias"])
    mini = la.fit_batches([(x, y)], generator=torch.Generator().manual_seed(0)).posterior
    debiased = la.fit_batches(
        [(x, y)], [(x, y)], generator=torch.Generator().manual_seed(0)
    ).posterior
    block = mini.curvature.blocks["0.bias"]
    debiased_block = debiased.curvature.blocks["0.bias"]
    assert torch.equal(block.U_G, debiased_block.U_G)
    assert not torch.allclose(block.magnitudes, debiased_block.magnitudes)


def test_regression_predictions_survive_wide_covariances():
    """Large variances beside tiny off-diagonals once failed torch's check of symmetry."""
    model = nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 4)).eval()
    x, y = torch.randn(40, 20), torch.randn(40, 4)
    la = Laplace(model, "regression", prior_precision=1e-4).fit_batches([(x, y)])
    assert la.predict(100 * x).variance.isfinite().all()
    assert la.predict(100 * x, "nn", samples=5).variance.isfinite().all()


def test_the_prior_precision_is_a_copy():
    model = nn.Sequential(nn.Linear(3, 3)).eval()
    delta = torch.tensor(2.0, dtype=torch.float64)
    la = Laplace(model, prior_precision=delta)
    delta *= 10
    assert la.prior_precision.item() == 2.0


NORMALISED = {
    "layer": (nn.LayerNorm(4), (4,)),
    "layer_over_two_dimensions": (nn.LayerNorm((3, 4)), (3, 4)),
    "rms": (nn.RMSNorm(4), (5, 4)),
    "group": (nn.GroupNorm(2, 4), (4, 3, 2)),
    "batch_1d": (nn.BatchNorm1d(4), (4,)),
    "batch_1d_positions": (nn.BatchNorm1d(4), (4, 5)),
    "batch_2d": (nn.BatchNorm2d(4), (4, 3, 2)),
    "batch_3d": (nn.BatchNorm3d(4), (4, 3, 2, 2)),
    "batch_2d_with_activation": (timm.layers.BatchNormAct2d(4), (4, 3, 2)),
    "group_with_activation": (timm.layers.GroupNormAct(4, 2), (4, 3, 2)),
}


@pytest.mark.parametrize("name", NORMALISED)
def test_scales_and_biases_of_normalisations_have_exact_blocks(name):
    norm, shape = NORMALISED[name]
    model = nn.Sequential(norm, nn.Tanh(), nn.Flatten(), nn.LazyLinear(3)).double()
    x = 2 * torch.randn(7, *shape).double() + 1
    y = torch.randint(3, (7,))
    model.train()(x)  # running statistics of their own
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.add_(torch.randn_like(parameter))
    model.eval()
    for curvature in ("kfac", "ekfac"):
        la = Laplace(model, curvature=curvature).fit_batches([(x, y)])
        for block in [n for n in la.block_names if n.startswith("0.")]:
            exact = oracle.ggn_block(model, x, "classification", block)
            torch.testing.assert_close(la.posterior.curvature.blocks[block].to_dense(), exact)
    assert la.block_names[0] == "0.weight"
    assert not any(block.calls for block in la._parameters.blocks)
    J = oracle.flat_jacobian(model, x, la.param_names)
    covariance = la.posterior.covariance.to_dense()
    torch.testing.assert_close(la.functional(x)[1], oracle.functional_covariance(J, covariance))


def test_a_copy_of_an_output_is_released_once_the_forward_pass_has_used_it():
    copies = []
    network = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).requires_grad_(False)
    network[1].register_forward_pre_hook(lambda _, inputs: copies.append(weakref.ref(inputs[0])))
    tap = Tap(network, curvature_blocks(network, ["0.weight", "2.weight"]))
    forward_pass = tap.forward(torch.randn(5, 3))
    (copy,) = copies
    assert copy() is None
    assert forward_pass.last_layer().layer == "2"


class Branched(nn.Module):
    """Convolutions, the last of which does not affect the outputs."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(2, 3, 3)
        self.second = nn.Conv2d(3, 4, 3)
        self.unused = nn.Conv2d(3, 4, 3)
        self.head = nn.Linear(4, 5)

    def forward(self, x):
        """Shape `[B, 5]`."""
        h = self.first(x).tanh()
        self.unused(h)
        return self.head(self.second(h).tanh().mean((2, 3)))


class CountedCalls(TorchDispatchMode):
    """Counts the calls of torch's operations."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.counts[operation] += 1
        return operation(*args, **(kwargs or {}))


@pytest.mark.parametrize("most_bytes", [2**22, 0])
def test_convolutions_differentiate_few_numbers_of_all_columns_together(monkeypatch, most_bytes):
    monkeypatch.setattr(forward_pass_module, "_MOST_BYTES_TOGETHER", most_bytes)
    model = Branched().double()
    names = [name for name, _ in model.named_parameters() if name.endswith("weight")]
    network = shared_copy(model)
    tap = Tap(network, curvature_blocks(network, names))
    x = torch.randn(2, 2, 7, 7, dtype=torch.float64)
    columns = torch.randn(6, 2, 5, dtype=torch.float64)
    with CountedCalls() as counted:
        records = tap.forward(x).backward(columns)
        gradients = {record.block.name: record.output_gradients[0] for record in records}
    num_calls = counted.counts[torch.ops.aten.convolution_backward.default]
    assert num_calls == (1 if most_bytes else len(columns))
    assert gradients.keys() == {"first.weight", "second.weight", "head.weight"}
    values = {}
    for name in ("first", "second", "head"):
        layer = model.get_submodule(name)
        layer.register_forward_hook(lambda _, inputs, z, name=name: values.update({name: z}))
    outputs = model(x)
    for index, column in enumerate(columns):
        expected = torch.autograd.grad(outputs, list(values.values()), column, retain_graph=True)
        for name, gradient in zip(values, expected, strict=True):
            oracle.close(gradients[f"{name}.weight"][index], gradient, 1e-12)


class ReadsNumbers(torch.autograd.Function):
    """An identity whose backward pass reads a number, which `torch.vmap` cannot."""

    @staticmethod
    def forward(ctx, h):
        """Copy the values."""
        return h.clone()

    @staticmethod
    def backward(ctx, gradient):
        """Copy the gradient, unless it is zero."""
        return gradient.clone() if gradient.abs().sum().item() > 0 else None


def reading_hook(gradient):
    """A hook of a tensor whose code reads a number, as a logger of gradients does."""
    return gradient * (2.0 if gradient.abs().max().item() > 0 else 1.0)


def branching_hook(gradient):
    """A hook of a tensor with a branch on a gradient."""
    return gradient * 2.0 if gradient.abs().max() > 0 else gradient


def functions_in_python(h):
    return ReadsNumbers.apply(h)


def hooks_of_tensors(h):
    if h.requires_grad:
        h.register_hook(reading_hook)
    return h


def hooks_with_branches(h):
    if h.requires_grad:
        h.register_hook(branching_hook)
    return h


@pytest.mark.parametrize("reads_numbers", [hooks_of_tensors, hooks_with_branches])
def test_other_networks_with_hooks_that_read_numbers_are_refused_with_a_remedy(reads_numbers):
    class Net(nn.Sequential):
        def forward(self, x):
            """Shape `[B, 5]`."""
            return self[1](reads_numbers(self[0](x).tanh()))

    data = [(torch.randn(4, 3), torch.arange(4))]
    with pytest.raises(NotImplementedError, match=r"reads a number from a gradient.*Remove"):
        Laplace(Net(nn.Linear(3, 6), nn.Linear(6, 5)).eval()).fit(data)


class CopiesInPlace(torch.autograd.Function):
    """An identity whose backward pass fills a new tensor, which `torch.vmap` cannot."""

    @staticmethod
    def forward(ctx, h):
        """Copy the values."""
        return h.clone()

    @staticmethod
    def backward(ctx, gradient):
        """Copy the gradient into an empty tensor."""
        copied = torch.empty(gradient.shape, dtype=gradient.dtype)
        copied[:] = gradient
        return copied


@pytest.mark.parametrize("function", [ReadsNumbers, CopiesInPlace])
@pytest.mark.parametrize("curvature", ["kfac", "full"])
def test_functions_that_vmap_does_not_support_differentiate_one_column_after_the_other(
    function, curvature
):
    class Net(nn.Sequential):
        def forward(self, x):
            """Shape `[B, 5]`."""
            h = self[0](x).tanh()
            return self[1](function.apply(h) if self.has_function else h)

    posteriors = []
    model = Net(nn.Linear(3, 6), nn.Linear(6, 5)).double().eval()
    data = [(torch.randn(4, 3).double(), torch.arange(4))]
    for has_function in (True, False):
        model.has_function = has_function
        posteriors.append(Laplace(model, curvature=curvature).fit(data).posterior)
    actual, expected = (posterior.curvature.to_dense() for posterior in posteriors)
    oracle.close(actual, expected, 1e-12)


@pytest.mark.parametrize(
    "reads_numbers", [functions_in_python, hooks_of_tensors, hooks_with_branches]
)
def test_convolutions_with_code_that_reads_numbers_differentiate_one_column_after_the_other(
    reads_numbers,
):
    class Net(Branched):
        def forward(self, x):
            """Shape `[B, 5]`."""
            h = reads_numbers(self.first(x).tanh())
            return self.head(self.second(h).tanh().mean((2, 3)))

    torch.manual_seed(0)
    model = Net().double().eval()
    names = [f"{layer}.weight" for layer in ("first", "second", "head")]
    data = [(torch.randn(4, 2, 7, 7, dtype=torch.float64), torch.arange(4))]
    la = Laplace(model, curvature="diag", params=names).fit(data)
    x = torch.randn(1, 2, 7, 7, dtype=torch.float64)
    parameters = [model.get_parameter(name) for name in la.param_names]
    rows = []
    for output in model(x)[0]:
        gradients = torch.autograd.grad(output, parameters, retain_graph=True)
        rows.append(torch.cat([gradient.flatten() for gradient in gradients]))
    J = torch.stack(rows)
    covariance = J @ torch.linalg.inv(la.posterior.precision.to_dense()) @ J.T
    oracle.close(la.functional(x)[1][0], covariance, 1e-10)
