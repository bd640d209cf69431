"""Grouped convolutions: all groups in one block, equal to one convolution for each group.

A depthwise kernel's block is exact. It is held against the dense GGN; the Kronecker blocks of wider
groups against the oracle's factors of an equal network with a convolution for every group.
"""

import oracle
import pytest
import torch
from networks_of_tokens import randomised
from torch import nn

from laplace_debias import Laplace

BATCH = 5
# A layer with one output channel a group, and the shape of one example's input.
DEPTHWISE = {
    "plain": (lambda: nn.Conv2d(4, 4, 3, groups=4), (4, 5, 4)),
    "strided": (lambda: nn.Conv2d(3, 3, 3, stride=2, padding=1, groups=3), (3, 6, 5)),
    "dilated": (lambda: nn.Conv2d(3, 3, 2, stride=(2, 1), dilation=2, groups=3), (3, 6, 5)),
    "same": (lambda: nn.Conv2d(3, 3, (4, 3), padding="same", groups=3), (3, 4, 5)),
    "reflected": (
        lambda: nn.Conv2d(2, 2, 3, padding=1, padding_mode="reflect", groups=2),
        (2, 4, 3),
    ),
    "two channels a group": (lambda: nn.Conv2d(6, 3, 2, groups=3), (6, 3, 3)),
    "one dimension": (lambda: nn.Conv1d(3, 3, 3, stride=3, padding=2, groups=3), (3, 9)),
    "three dimensions": (lambda: nn.Conv3d(2, 2, 2, groups=2), (2, 3, 2, 3)),
    "transposed": (lambda: nn.ConvTranspose2d(3, 3, 3, stride=2, groups=3), (3, 2, 3)),
}  # fmt: skip


def network(layer, shape):
    """A layer between nonlinearities, with three outputs, and inputs and labels."""
    body = nn.Sequential(nn.Tanh(), layer, nn.Tanh(), nn.Flatten())
    width = body(torch.zeros(1, *shape)).shape[1]
    model = randomised(nn.Sequential(body, nn.Linear(width, 3)))
    g = torch.Generator().manual_seed(1)
    x = torch.randn(BATCH, *shape, generator=g, dtype=torch.float64)
    return model, x, torch.randint(3, (BATCH,), generator=g)


def exact_blocks(model, x, names, num_groups):
    """Each group's diagonal block of the GGN, weights before the bias, `[g, d, d]`."""
    ggn = oracle.ggn(model, x, "classification", names, None)
    sizes = [model.get_parameter(name).numel() // num_groups for name in names]
    starts = [sum(model.get_parameter(n).numel() for n in names[:i]) for i in range(len(names))]
    blocks = []
    for group in range(num_groups):
        positions = torch.cat(
            [start + group * n + torch.arange(n) for start, n in zip(starts, sizes, strict=True)]
        )
        blocks.append(ggn[positions[:, None], positions])
    return torch.stack(blocks)


def dense_groups(block):
    """The groups' matrices of a fitted block, `[g, d, d]`."""
    size = block.shape[0] // len(block.magnitudes)
    dense = block.to_dense().unflatten(0, (-1, size)).unflatten(2, (-1, size))
    groups = torch.arange(len(block.magnitudes))
    diagonal_blocks = dense[groups, :, groups].clone()
    dense[groups, :, groups] = 0
    assert not dense.any(), "entries between groups are not zero"
    return diagonal_blocks


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("name", DEPTHWISE)
def test_the_block_of_a_depthwise_kernel_is_exact(name, joint):
    make, shape = DEPTHWISE[name]
    model, x, y = network(make(), shape)
    names = ["0.1.weight", "0.1.bias"] if joint else ["0.1.weight"]
    la = Laplace(model, params=names, joint=joint).fit_batches([(x[:2], y[:2]), (x[2:], y[2:])])
    (block,) = la.posterior.curvature.blocks.values()
    expected = exact_blocks(model, x, names, model[0][1].groups)
    torch.testing.assert_close(dense_groups(block), expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("name", DEPTHWISE)
def test_in_single_precision_it_is_exact_to_rounding(name, joint):
    """On processors with fast convolutions, these replace the patches."""
    make, shape = DEPTHWISE[name]
    model, x, y = network(make(), shape)
    names = ["0.1.weight", "0.1.bias"] if joint else ["0.1.weight"]
    expected = exact_blocks(model, x, names, model[0][1].groups)
    la = Laplace(model.float(), params=names, joint=joint).fit_batches([(x.float(), y)])
    (block,) = la.posterior.curvature.blocks.values()
    atol = 1e-5 * expected.abs().max().item()
    torch.testing.assert_close(dense_groups(block).double(), expected, rtol=1e-4, atol=atol)


# ------------------------------------------------------------------------------ wider groups


class OneByOne(nn.Module):
    """A grouped convolution as a separate convolution for each group."""

    def __init__(self, grouped):
        super().__init__()
        self.groups = nn.ModuleList()
        g = grouped.groups
        weights = grouped.weight.detach().chunk(g)
        biases = grouped.bias.detach().chunk(g)
        for weight, bias in zip(weights, biases, strict=True):
            convolution = type(grouped)(
                grouped.in_channels // g, grouped.out_channels // g, grouped.kernel_size,
                grouped.stride, grouped.padding, dilation=grouped.dilation,
            ).to(weight)  # fmt: skip
            convolution.weight.data = weight.clone()
            convolution.bias.data = bias.clone()
            self.groups.append(convolution)

    def forward(self, x):
        chunks = x.chunk(len(self.groups), dim=1)
        outputs = [layer(chunk) for layer, chunk in zip(self.groups, chunks, strict=True)]
        return torch.cat(outputs, dim=1)


WIDE = {
    "conv2d": (lambda: nn.Conv2d(4, 6, 3, padding=1, groups=2), (4, 4, 3)),
    "strided": (lambda: nn.Conv2d(6, 6, 2, stride=2, groups=3), (6, 4, 4)),
    "more outputs than inputs": (lambda: nn.Conv2d(3, 6, 2, groups=3), (3, 3, 3)),
    "conv1d": (lambda: nn.Conv1d(4, 4, 3, dilation=2, groups=2), (4, 7)),
    "transposed": (lambda: nn.ConvTranspose2d(4, 6, 2, stride=2, groups=2), (4, 2, 3)),
}


def pair(name):
    """A network with a grouped convolution, one with separate convolutions, and data."""
    make, shape = WIDE[name]
    model, x, y = network(make(), shape)
    split = nn.Sequential(nn.Sequential(*model[0]), model[1])
    split[0][1] = OneByOne(model[0][1])
    torch.testing.assert_close(split(x), model(x))
    return model, split, x, y


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("name", [name for name in WIDE if name != "transposed"])
def test_factors_of_every_group_are_the_oracles(name, sharing):
    model, split, x, y = pair(name)
    la = Laplace(model, params=["0.1.weight"], sharing=sharing).fit_batches([(x, y)])
    blocks = dense_groups(la.posterior.curvature.blocks["0.1.weight"])
    for group, block in enumerate(blocks):
        path = f"0.1.groups.{group}"
        factors = oracle.kfac_factors(split, x, "classification", path, None, sharing)
        expected = torch.kron(factors["G"], factors["A"])
        torch.testing.assert_close(block, expected, rtol=1e-9, atol=1e-11)


def by_groups(model, split, x, y, **options):
    """Dense blocks `[g, d, d]` of the grouped convolution, and those of the separate ones."""
    mode = options.pop("mode", "full")
    params = options.pop("params", lambda name, _: name.startswith("0.1."))
    weight_blocks = []
    for network in (model, split):
        la = Laplace(network, params=params, **options)
        half = len(x) // 2
        if mode == "debiased":
            la.fit_batches([(x[:half], y[:half])], [(x[half:], y[half:])])
        else:
            la.fit_batches([(x, y)], folds=2 if mode == "crossfit" else None)
        blocks = la.posterior.curvature.blocks
        weight_blocks.append([block for name, block in blocks.items() if "weight" in name])
    (grouped,), separate = weight_blocks
    return dense_groups(grouped), torch.stack([block.to_dense() for block in separate])


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("mode", ["full", "debiased", "crossfit"])
@pytest.mark.parametrize("curvature", ["kfac", "ekfac", "diag"])
def test_every_fit_equals_that_of_separate_convolutions(curvature, mode, joint):
    model, split, x, y = pair("conv2d")
    actual, expected = by_groups(model, split, x, y, curvature=curvature, mode=mode, joint=joint)
    torch.testing.assert_close(actual, expected, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("name", WIDE)
def test_every_layer_equals_separate_convolutions(name, sharing):
    model, split, x, y = pair(name)
    actual, expected = by_groups(model, split, x, y, sharing=sharing, joint=True)
    torch.testing.assert_close(actual, expected, rtol=1e-7, atol=1e-9)


class Sentences(nn.Module):
    """Tokens through a convolution over positions, averaged over the real ones."""

    def __init__(self, layer):
        super().__init__()
        self.table = nn.Embedding(7, 4, padding_idx=0)
        self.layer = layer
        self.head = nn.Linear(4, 3)

    def forward(self, tokens):
        h = self.layer(self.table(tokens).mT).tanh().mT
        is_real = (tokens != 0).unsqueeze(-1)
        return self.head((h * is_real).sum(1) / is_real.sum(1))


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_positions_of_padding_count_in_no_group(sharing):
    model = randomised(Sentences(nn.Conv1d(4, 4, 1, groups=2)))
    split = Sentences(OneByOne(model.layer)).double().eval()
    split.table = model.table
    split.head = model.head
    tokens = torch.tensor([[1, 2, 3, 0], [4, 5, 0, 0], [6, 1, 2, 3]])
    options = {"params": lambda name, _: name.startswith("layer"), "sharing": sharing}
    actual, expected = by_groups(model, split, tokens, torch.tensor([0, 1, 2]), **options)
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-11)
    # Further padding changes nothing.
    longer = torch.cat([tokens, torch.zeros(3, 2, dtype=torch.long)], dim=1)
    again, _ = by_groups(model, split, longer, torch.tensor([0, 1, 2]), **options)
    torch.testing.assert_close(again, actual, rtol=1e-9, atol=1e-11)
