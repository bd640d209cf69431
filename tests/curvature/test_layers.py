"""Every layer type against dense float64 Jacobians, which do not depend on a layer's rule.

Three exactness regimes: the diagonal and the functional covariance, which are exact for any
network; `expand`, exact where every position has outputs of its own; `reduce`, exact where the
outputs are the mean over the positions.
"""

import oracle
import pytest
import torch
from cases import one_axis_at_a_time
from hypothesis import given, settings
from hypothesis import strategies as st
from networks_of_tokens import Attention, Bag, randomised
from torch import nn

from laplace_debias import Laplace
from laplace_debias.curvature import GGN
from laplace_debias.curvature.layers.blocks import parameter_order

BATCH = 3
CL = torch.channels_last


class HuggingFaceConv1D(nn.Module):
    """The layer of transformers' GPT-2, as its documentation describes it."""

    def __init__(self, nf, nx):
        super().__init__()
        self.nf = nf
        self.nx = nx
        self.weight = nn.Parameter(torch.randn(nx, nf))
        self.bias = nn.Parameter(torch.randn(nf))

    def forward(self, x):
        return x @ self.weight + self.bias


HuggingFaceConv1D.__module__ = "transformers.pytorch_utils"
HuggingFaceConv1D.__qualname__ = "Conv1D"


def changed(layer, **attributes):
    """Change attributes of a layer after its construction, as libraries for segmentation do."""
    for name, value in attributes.items():
        setattr(layer, name, value)
    return layer


# A layer and the shape of one example's input.
LAYERS = {
    "linear": (lambda: nn.Linear(3, 4), (3,)),
    "linear_positions": (lambda: nn.Linear(3, 4), (5, 3)),
    "linear_more_positions": (lambda: nn.Linear(3, 2), (2, 4, 3)),
    "hugging_face_conv1d": (lambda: HuggingFaceConv1D(4, 3), (5, 3)),
    "conv1d": (lambda: nn.Conv1d(2, 3, 3, stride=2, padding=1), (2, 7)),
    "conv2d": (lambda: nn.Conv2d(2, 3, (3, 2), dilation=(1, 2), padding=1), (2, 4, 5)),
    "conv2d_channels_last": (lambda: nn.Conv2d(4, 6, 3, 2).to(memory_format=CL), (4, 5, 7)),
    "conv2d_circular": (lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"), (2, 4, 4)),
    "conv2d_grouped": (lambda: nn.Conv2d(4, 6, 3, groups=2, bias=True), (4, 4, 5)),
    "conv2d_depthwise": (lambda: nn.Conv2d(3, 3, 3, groups=3, padding="same"), (3, 4, 4)),
    "conv2d_dilated_later": (
        lambda: changed(nn.Conv2d(2, 3, 3, 2, 1), stride=(1, 1), dilation=(2, 2), padding=(2, 2)),
        (2, 4, 5),
    ),
    "conv2d_same_dilated_later": (
        lambda: changed(nn.Conv2d(2, 3, (3, 2), padding="same"), dilation=2),
        (2, 4, 5),
    ),
    "conv2d_new_kernel": (
        lambda: changed(
            nn.Conv2d(2, 3, 3, padding=1), weight=nn.Parameter(torch.randn(3, 2, 2, 1)), padding=0
        ),
        (2, 4, 3),
    ),
    "conv2d_single_number": (lambda: changed(nn.Conv2d(2, 3, 3), padding=(1,)), (2, 4, 5)),
    "conv1d_numbers": (lambda: changed(nn.Conv1d(2, 3, 3), stride=2, padding=2), (2, 7)),
    "conv3d": (lambda: nn.Conv3d(2, 2, 2, padding=1), (2, 2, 3, 2)),
    "transposed1d": (lambda: nn.ConvTranspose1d(2, 3, 3, 2, 2, output_padding=1), (2, 4)),
    "transposed1d_numbers": (
        lambda: changed(nn.ConvTranspose1d(2, 3, 3, padding=2), stride=2, output_padding=1),
        (2, 4),
    ),
    "transposed2d": (
        lambda: nn.ConvTranspose2d(2, 3, (3, 2), stride=(2, 1), padding=(1, 0), dilation=(1, 2)),
        (2, 3, 4),
    ),
    "transposed2d_grouped": (lambda: nn.ConvTranspose2d(4, 6, 2, stride=2, groups=2), (4, 2, 3)),
    "transposed3d": (lambda: nn.ConvTranspose3d(2, 2, 2, stride=2), (2, 2, 1, 2)),
    "layer_norm": (lambda: nn.LayerNorm((2, 3)), (4, 2, 3)),
    "rms_norm": (lambda: nn.RMSNorm(3), (4, 3)),
    "group_norm": (lambda: nn.GroupNorm(2, 4), (4, 3)),
    "batch_norm": (lambda: nn.BatchNorm2d(3), (3, 2, 2)),
}
MATRICES = [name for name in LAYERS if "norm" not in name]


def inside_a_network(name):
    """A layer between nonlinearities, with three outputs."""
    make, shape = LAYERS[name]
    layer = make()
    body = nn.Sequential(nn.Tanh(), layer, nn.Tanh(), nn.Flatten())
    width = body(torch.zeros(1, *shape)).shape[1]
    model = randomised(nn.Sequential(body, nn.Linear(width, 3)))
    torch.manual_seed(1)
    return model, torch.randn(BATCH, *shape).double(), torch.randint(3, (BATCH,))


def dense_curvature(la):
    """The fitted curvature in the order of the parameters."""
    order = parameter_order(la.model, la.param_names, la._parameters.blocks)
    dense = la.posterior.curvature.to_dense()
    if order is None:
        return dense
    unordered = torch.empty_like(dense)
    unordered[order[:, None], order] = dense
    return unordered


def exact_ggn(model, x, likelihood, names):
    return oracle.ggn(model, x, likelihood, names, 1.0 if likelihood == "regression" else None)


def block_mask(la):
    """Which entries of the dense curvature lie inside a block."""
    order = parameter_order(la.model, la.param_names, la._parameters.blocks)
    # No two groups of a convolution share an output.
    sizes = [
        block.size // block.num_groups
        for block in la._parameters.blocks
        for _ in range(block.num_groups)
    ]
    mask = torch.block_diag(*(torch.ones(n, n) for n in sizes)).bool()
    if order is not None:
        unordered = torch.empty_like(mask)
        unordered[order[:, None], order] = mask
        mask = unordered
    return mask


def assert_equal(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_the_diagonal_is_exact(name, joint):
    model, x, y = inside_a_network(name)
    la = Laplace(model, curvature="diag", joint=joint).fit_batches([(x, y)])
    ggn = exact_ggn(model, x, "classification", la.param_names)
    assert_equal(dense_curvature(la), torch.diag(ggn.diagonal()))


@pytest.mark.parametrize(
    ("curvature", "joint"),
    [
        ("kfac", True),
        ("diag", False),
        pytest.param("kfac", False, marks=pytest.mark.slow),
        pytest.param("diag", True, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("name", LAYERS)
def test_the_functional_covariance_is_that_of_dense_jacobians(name, curvature, joint):
    model, x, y = inside_a_network(name)
    la = Laplace(model, curvature=curvature, joint=joint, prior_precision=0.3)
    la.fit_batches([(x, y)], num_data=7)
    precision = 7 * dense_curvature(la) + 0.3 * torch.eye(len(la.mean)).double()
    J = oracle.flat_jacobian(model, x, la.param_names)
    expected = J @ torch.linalg.inv(precision) @ J.mT
    mean, covariance = la.functional(x)
    assert_equal(mean, model(x).detach())
    assert_equal(covariance, expected)
    assert_equal(la.functional(x, diagonal=True)[1], expected.diagonal(dim1=1, dim2=2))
    outputs = torch.tensor([[2, 0], [1, 2], [0, 1]])
    output_covariance = torch.stack(
        [covariance[index][:, index] for covariance, index in zip(expected, outputs, strict=True)]
    )
    assert_equal(la.functional(x, outputs=outputs)[1], output_covariance)


@pytest.mark.parametrize("name", MATRICES)
def test_ekfac_directions_carry_the_exact_curvature(name):
    """The trace is the exact one, and so is the curvature along every direction."""
    model, x, y = inside_a_network(name)
    la = Laplace(model, curvature="ekfac").fit_batches([(x, y)])
    ggn = exact_ggn(model, x, "classification", la.param_names)
    assert_equal(dense_curvature(la).trace(), ggn.trace())
    # Directions of equal curvature are free to mix; what is measured along them is not.
    measured = (ggn @ dense_curvature(la)).trace()
    assert_equal(measured, dense_curvature(la).square().sum())


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("name", MATRICES)
def test_expand_is_exact_where_every_position_has_its_own_outputs(name, joint):
    make, shape = LAYERS[name]
    model = randomised(nn.Sequential(make(), nn.Flatten()))
    x = torch.randn(BATCH, *shape).double()
    la = Laplace(model, "regression", params="all" if joint else "weights", joint=joint)
    la.fit_batches([(x, model(x).detach())])
    exact = exact_ggn(model, x, "regression", la.param_names)
    assert_equal(dense_curvature(la), exact * block_mask(la))


class UsedTwice(nn.Module):
    """A network that applies a layer to each column, and joins the outputs."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return torch.cat([self.layer(column).flatten(1) for column in x.unbind(1)], 1)


@pytest.mark.parametrize("name", ["linear", "linear_more_positions", "conv2d", "conv2d_grouped"])
def test_expand_is_exact_where_every_use_has_its_own_outputs(name):
    make, shape = LAYERS[name]
    model = randomised(UsedTwice(make()))
    x = torch.randn(BATCH, 2, *shape).double()
    la = Laplace(model, "regression", params="weights").fit_batches([(x, model(x).detach())])
    exact = exact_ggn(model, x, "regression", la.param_names)
    assert_equal(dense_curvature(la), exact * block_mask(la))


class MeanOverPositions(nn.Module):
    def __init__(self, layer, channels_first):
        super().__init__()
        self.layer = layer
        self.channels_first = channels_first

    def forward(self, x):
        z = self.layer(x)
        return z.flatten(2).mean(2) if self.channels_first else z.flatten(1, -2).mean(1)


@pytest.mark.parametrize(
    ("name", "joint"), one_axis_at_a_time([n for n in MATRICES if n != "linear"], [False, True])
)
def test_reduce_is_exact_where_the_outputs_are_the_mean_over_positions(name, joint):
    make, shape = LAYERS[name]
    channels_first = "conv" in name or "transposed" in name
    channels_first = channels_first and not name.startswith("hugging")
    model = randomised(MeanOverPositions(make(), channels_first))
    x = torch.randn(BATCH, *shape).double()
    params = "all" if joint else "weights"
    fits = [
        Laplace(model, "regression", params=params, joint=joint, sharing=sharing).fit_batches(
            [(x, model(x).detach())]
        )
        for sharing in ("reduce", {"layer": "reduce"}, "expand")
    ]
    exact = exact_ggn(model, x, "regression", fits[0].param_names) * block_mask(fits[0])
    assert_equal(dense_curvature(fits[0]), exact)
    assert_equal(dense_curvature(fits[1]), exact)
    is_always_exact = "depthwise" in name
    assert torch.allclose(dense_curvature(fits[2]), exact, atol=1e-11) == is_always_exact


# ------------------------------------------------------------------------------- embeddings


@pytest.mark.parametrize("padding_idx", [None, 2])
@pytest.mark.parametrize("curvature", ["kfac", "ekfac", "diag"])
def test_embeddings_have_exact_jacobians(curvature, padding_idx):
    model = randomised(Bag(padding_idx))
    x, y = torch.tensor([[0, 2, 2, 5], [1, 1, 1, 2], [4, 0, 5, 0]]), torch.tensor([0, 2, 1])
    la = Laplace(model, curvature=curvature, prior_precision=0.3)
    # These options change the training but not the function.
    model.table.sparse = model.table.scale_grad_by_freq = True
    la.fit_batches([(x, y)], num_data=5)
    G = GGN(model, nn.CrossEntropyLoss(), [(x, y)]).to_dense()
    model.table.sparse = model.table.scale_grad_by_freq = False
    precision = 5 * dense_curvature(la) + 0.3 * torch.eye(len(la.mean)).double()
    J = oracle.flat_jacobian(model, x, la.param_names)
    assert_equal(la.functional(x)[1], J @ torch.linalg.inv(precision) @ J.mT)
    ggn = exact_ggn(model, x, "classification", la.param_names)
    # The row of `padding_idx` has no derivative in forward mode either.
    assert_equal(G, ggn)
    if curvature != "kfac":
        assert_equal(dense_curvature(la).trace(), ggn.trace())


def test_kfac_of_an_embedding_is_exact_where_every_token_has_its_own_outputs():
    model = randomised(Bag(head=False))
    x = torch.tensor([[0, 2, 3, 5], [1, 1, 1, 2], [4, 0, 5, 0]])
    la = Laplace(model, "regression").fit_batches([(x, model(x).detach())])
    assert_equal(dense_curvature(la), exact_ggn(model, x, "regression", la.param_names))


# -------------------------------------------------------------------------------- attention


@pytest.mark.parametrize(
    ("options", "bias", "curvature"),
    one_axis_at_a_time(
        [{}, {"cross": True}, {"cross": True, "kdim": 3}], [True, False], ["kfac", "ekfac", "diag"]
    ),
)
def test_attention_has_exact_jacobians(curvature, options, bias):
    model = randomised(Attention(bias=bias, **options))
    x = torch.randn(BATCH, 5, 4).double()
    y = torch.tensor([0, 2, 1])
    la = Laplace(model, curvature=curvature, prior_precision=0.3)
    la.fit_batches([(x, y)], num_data=5)
    precision = 5 * dense_curvature(la) + 0.3 * torch.eye(len(la.mean)).double()
    J = oracle.flat_jacobian(model, x, la.param_names)
    assert_equal(la.functional(x)[1], J @ torch.linalg.inv(precision) @ J.mT)
    if curvature != "kfac":
        ggn = exact_ggn(model, x, "classification", la.param_names)
        assert_equal(dense_curvature(la).trace(), ggn.trace())


def test_a_transformer_encoder_is_seen_layer_by_layer():
    """In evaluation mode torch would run it in one fused call."""
    encoder = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.1, batch_first=True)
    model = nn.Sequential(encoder, nn.Flatten(), nn.Linear(20, 3))
    model = randomised(model)
    x = torch.randn(BATCH, 5, 4).double()
    y = torch.tensor([0, 2, 1])
    la = Laplace(model, curvature="diag").fit_batches([(x, y)])
    ggn = exact_ggn(model, x, "classification", la.param_names)
    assert_equal(dense_curvature(la).diagonal(), ggn.diagonal())
    assert torch.backends.mha.get_fastpath_enabled()


@pytest.mark.parametrize("method", ["glm-mc", "nn"])
def test_sampling_predictives_see_into_attention(method):
    model = randomised(Attention())
    x = torch.randn(BATCH, 5, 4).double()
    y = torch.tensor([0, 2, 1])
    la = Laplace(model, prior_precision=1e14).fit_batches([(x, y)])
    probs = la.predict(x, method, samples=3).probs
    torch.testing.assert_close(probs, model(x).detach().softmax(-1), rtol=1e-5, atol=1e-5)


# ------------------------------------------------------------------------------ random layers


@st.composite
def geometries(draw):
    """A convolution of any kind that fits its input."""
    dims = draw(st.integers(1, 2))
    sizes = st.tuples(*[st.integers(1, 3)] * dims)
    kernel, stride, dilation = draw(sizes), draw(sizes), draw(sizes)
    padding = draw(st.tuples(*[st.integers(0, 2)] * dims))
    groups = draw(st.integers(1, 2))
    length = draw(st.tuples(*[st.integers(1, 4)] * dims))
    options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    channels = 2 * groups
    if draw(st.booleans()):
        kind = (nn.ConvTranspose1d, nn.ConvTranspose2d)[dims - 1]
        options["output_padding"] = tuple(
            draw(st.integers(0, max(s, d) - 1)) for s, d in zip(stride, dilation, strict=True)
        )
    else:
        kind = (nn.Conv1d, nn.Conv2d)[dims - 1]
    layer = kind(channels, groups * draw(st.integers(1, 2)), kernel, **options)
    return layer, (channels, *length)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(geometries(), st.booleans())
def test_any_convolution_is_exact_in_both_regimes(geometry, joint):
    assert_exact_in_both_regimes(geometry, joint)


@pytest.mark.slow
@settings(max_examples=60, deadline=None, derandomize=True)
@given(geometries(), st.booleans())
def test_many_convolutions_are_exact_in_both_regimes(geometry, joint):
    assert_exact_in_both_regimes(geometry, joint)


def assert_exact_in_both_regimes(geometry, joint):
    layer, shape = geometry
    torch.manual_seed(0)
    x = torch.randn(2, *shape).double()
    model = randomised(nn.Sequential(layer, nn.Flatten()))
    try:
        outputs = model(x).detach()
    except RuntimeError:
        return  # The kernel is larger than the padded input, or nothing is left of the output.
    if outputs.numel() == 0:
        return
    for curvature in ("kfac", "diag"):
        la = Laplace(model, "regression", curvature, joint=joint).fit_batches([(x, outputs)])
        exact = exact_ggn(model, x, "regression", la.param_names)
        expected = exact * block_mask(la) if curvature == "kfac" else exact.diagonal().diag()
        assert_equal(dense_curvature(la), expected)
