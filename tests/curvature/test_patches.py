"""Second moments of patches: the fast product equals unfolding, for every convolution."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from laplace_debias.curvature.fits.factors import input_factors
from laplace_debias.curvature.fits.gram_factor import GramFactor, gram
from laplace_debias.curvature.layer_rules import convolution, patches, row_products
from laplace_debias.curvature.layer_rules.patches import (
    fastest_moments,
    has_displacements,
    patch_moments,
)
from laplace_debias.curvature.layer_rules.row_products import has_row_products, row_moments
from laplace_debias.curvature.layers.blocks import curvature_blocks

pairs = st.tuples(st.integers(1, 4), st.integers(1, 4))


@st.composite
def convolutions(draw, has_row_products=False):
    kernel, dilation = draw(pairs), draw(st.tuples(st.integers(1, 3), st.integers(1, 3)))
    if has_row_products:
        kernel, dilation = (max(2, kernel[0]), kernel[1]), (1, dilation[1])
    padding = draw(st.one_of(st.tuples(st.integers(0, 4), st.integers(0, 4)), st.just("same")))
    stride = draw(pairs) if padding != "same" else 1
    groups = 1 if has_row_products else draw(st.integers(1, 2))
    layer = nn.Conv2d(
        2 * groups, 2 * groups, kernel, stride, padding, dilation, groups, dtype=torch.float64
    )
    # The image is at least as large as the dilated kernel.
    smallest = [(k - 1) * d + 1 for k, d in zip(kernel, dilation, strict=True)]
    height, width = (draw(st.integers(s, s + 6)) for s in smallest)
    return layer, torch.randn(3, 2 * groups, height, width, dtype=torch.float64)


def unfolded(layer, x, group):
    """Patches `[B, T, d_in]` of one group's channels, by padding and `F.unfold`."""
    channels = x.shape[1] // layer.groups
    inputs = x[:, group * channels : (group + 1) * channels]
    inputs = F.pad(inputs, layer._reversed_padding_repeated_twice)
    columns = F.unfold(inputs, layer.kernel_size, layer.dilation, 0, layer.stride)
    return columns.mT


def input_factor(layer, block, *inputs):
    """A of one block as a matrix, also where there are few rows, or one factor for each use."""
    matrices = [
        gram(factor.rows) if isinstance(factor, GramFactor) else factor
        for factor in input_factors(layer, block, inputs)
    ]
    return torch.stack(matrices).sum(0)


@settings(max_examples=60, deadline=None)
@given(convolutions())
def test_activations_and_factor_equal_torch_unfold(case):
    layer, x = case
    (block,) = curvature_blocks(layer, ["weight"])
    assert block.num_groups == layer.groups
    activations = block.rule.activations(layer, block, x)
    factor = input_factor(layer, block, x[:1], x[1:])
    for group in range(layer.groups):
        group_index = (group,) if layer.groups > 1 else ()
        expected = unfolded(layer, x, group)
        assert torch.equal(activations[(slice(None), slice(None), *group_index)], expected)
        rows = expected.flatten(0, 1)
        torch.testing.assert_close(factor[group_index], rows.T @ rows, rtol=1e-10, atol=1e-10)


@settings(max_examples=30, deadline=None)
@given(convolutions())
def test_output_positions_are_counted_from_shapes(case):
    layer, x = case
    (block,) = curvature_blocks(layer, ["weight"])
    assert block.rule.num_positions(layer, x) == layer(x).shape[2:].numel()


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.ConvTranspose2d(2, 3, (3, 2), (2, 3), (1, 0), (1, 2), dilation=(2, 1)), (7, 5)),
        (nn.ConvTranspose1d(2, 3, 4, 3, 2), (6,)),
        (nn.Conv3d(2, 3, (2, 3, 1), (1, 2, 2), (1, 0, 2), dilation=(2, 1, 1)), (5, 6, 4)),
        (nn.Conv1d(2, 3, 4, padding="same"), (9,)),
        (nn.Linear(4, 3), (5, 4)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_positions_of_further_layers_are_counted_from_shapes(layer, shape):
    x = torch.randn(2, 2, *shape)
    (block,) = curvature_blocks(layer, ["weight"])
    assert block.rule.num_positions(layer, x) == layer(x).numel() // (2 * 3)


@settings(max_examples=60, deadline=None)
@given(convolutions())
def test_displaced_products_equal_unfolding(case):
    layer, x = case
    assume(has_displacements(layer) and layer.groups == 1)
    rows = unfolded(layer, x, 0).flatten(0, 1)
    torch.testing.assert_close(patch_moments(layer, x), rows.T @ rows, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("numbers_at_once", [1, row_products._NUMBERS_AT_ONCE])
@settings(max_examples=60, deadline=None)
@given(convolutions(has_row_products=True))
def test_products_of_rows_of_the_image_equal_unfolding(numbers_at_once, case):
    layer, x = case
    assert has_row_products(layer)
    patch_rows = unfolded(layer, x, 0).flatten(0, 1)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(row_products, "_NUMBERS_AT_ONCE", numbers_at_once)
        actual = row_moments(layer, x)
    torch.testing.assert_close(actual, patch_rows.T @ patch_rows, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("limit", [0, math.inf])
@pytest.mark.parametrize("joint", [False, True])
@settings(max_examples=15, deadline=None)
@given(convolutions(), st.sampled_from(["zeros", "reflect"]))
def test_kernel_gradients_of_examples_are_products_of_patches(limit, joint, case, padding_mode):
    layer, x = case
    assume(layer.groups == 1 and max(layer.kernel_size) > 1)
    if isinstance(layer.padding, tuple) and padding_mode == "reflect":
        assume(layer.padding[0] < x.shape[2] and layer.padding[1] < x.shape[3])
        layer.padding_mode = padding_mode
        patches_of_images = F.unfold(
            F.pad(x, layer._reversed_padding_repeated_twice, mode="reflect"),
            layer.kernel_size,
            layer.dilation,
            0,
            layer.stride,
        ).mT
    else:
        patches_of_images = unfolded(layer, x, 0)
    g = torch.randn(2, *layer(x).shape, dtype=torch.float64)
    block = curvature_blocks(layer, ["weight", "bias"], joint=joint)[0]
    expected = torch.einsum("kbot,btd->bkod", g.flatten(3), patches_of_images)
    if joint:
        expected = torch.cat([expected, g.flatten(3).sum(-1).transpose(0, 1).unsqueeze(-1)], -1)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(convolution, "_CHEAP_IF_NARROW", limit)
        rows = block.rule.summed_products(layer, block, x, g)
    torch.testing.assert_close(rows, expected.flatten(1, 2), rtol=1e-12, atol=1e-12)


def test_one_dimensional_convolutions():
    layer = nn.Conv1d(3, 2, 4, padding=2, dilation=2, dtype=torch.float64)
    x = torch.randn(5, 3, 17, dtype=torch.float64)
    (block,) = curvature_blocks(layer, ["weight"])
    rows = block.rule.activations(layer, block, x).flatten(0, 1)
    torch.testing.assert_close(patch_moments(layer, x), rows.T @ rows)


def test_wide_rows_use_their_symmetry_exactly():
    layer = nn.Linear(700, 2, dtype=torch.float64)
    x = torch.randn(400, 700, dtype=torch.float64)
    (block,) = curvature_blocks(layer, ["weight"])
    (factor,) = input_factors(layer, block, [x])
    torch.testing.assert_close(factor, x.T @ x)


def test_padding_modes_are_followed():
    for mode in ("reflect", "replicate", "circular"):
        layer = nn.Conv2d(2, 3, 3, padding=1, padding_mode=mode, dtype=torch.float64)
        x = torch.randn(2, 2, 6, 5, dtype=torch.float64)
        (block,) = curvature_blocks(layer, ["weight"])
        product = block.rule.activations(layer, block, x) @ layer.weight.flatten(1).T + layer.bias
        torch.testing.assert_close(product.mT.reshape(2, 3, 6, 5), layer(x))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(("groups", "joint"), [(1, False), (1, True), (4, False), (4, True)])
def test_rows_are_the_patches_of_all_examples_and_columns_in_memory(groups, joint, layout):
    layer = nn.Conv2d(8, 8, (3, 2), (2, 1), (1, 0), (1, 2), groups, dtype=torch.float64)
    x = torch.randn(4, 8, 6, 5, dtype=torch.float64)
    block = curvature_blocks(layer, ["weight", "bias"], joint)[0]
    rows = block.rule.activation_rows(layer, block, x.contiguous(memory_format=layout))
    patches = F.unfold(x, (3, 2), (1, 2), (1, 0), (2, 1)).mT.flatten(0, 1)
    expected = patches.unflatten(1, (*block.groups, -1))
    if joint:
        expected = F.pad(expected, (0, 1), value=1.0)
    assert torch.equal(rows, expected)
    assert rows.stride(0) == 1


@pytest.mark.parametrize(("groups", "joint"), [(1, False), (1, True), (4, False), (4, True)])
def test_small_and_large_products_give_the_same_factor(monkeypatch, groups, joint):
    layer = nn.Conv2d(8, 8, 3, padding=1, groups=groups, dtype=torch.float64)
    x = torch.randn(4, 8, 6, 5, dtype=torch.float64)
    names = ["weight", "bias"]
    factors = []
    for way in (None, patch_moments, row_moments):
        monkeypatch.setattr(convolution, "fastest_moments", lambda *_, choice=way: choice)
        block = curvature_blocks(layer, names, joint)[0]
        factors.append(input_factor(layer, block, x))
        assert len(factors[-1]) == (groups if groups > 1 else 72 + joint)
    torch.testing.assert_close(factors[1], factors[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(factors[2], factors[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("channels", "kernel", "size", "stride", "padding", "fastest"),
    [
        (1, 5, 28, 1, 0, row_moments),
        (6, 5, 12, 1, 0, row_moments),
        (20, 5, 12, 1, 0, row_moments),
        (3, 7, 64, 2, 3, row_moments),
        (3, 11, 64, 4, 2, row_moments),
        (64, 3, 56, 2, 1, patch_moments),
        (96, 3, 32, 1, 1, patch_moments),
        (192, 3, 16, 1, 1, patch_moments),
        (512, 3, 7, 1, 1, patch_moments),
    ],
)
def test_the_way_to_a_factor_is_that_of_the_least_time(
    channels, kernel, size, stride, padding, fastest
):
    """The two ways differ by a factor of at least 1.5 in benchmarks/patch_shapes.py."""
    layer = nn.Conv2d(channels, 4, kernel, stride, padding)
    x = torch.zeros(64, channels, size, size)
    assert fastest_moments(layer, 1, x) is fastest


@settings(max_examples=60, deadline=None)
@given(convolutions())
def test_border_products_are_counted_as_they_are_formed(case):
    layer, x = case
    assume(has_displacements(layer) and layer.groups == 1)
    num_products = 0

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
            nonlocal num_products
            num_products += operation in (torch.ops.aten.bmm.default, torch.ops.aten.mm.default)
            return operation(*args, **(kwargs or {}))

    with Counting():
        patch_moments(layer, x)
    axes = patches._axes(layer, tuple(x.shape[2:]))
    num_counted = patches._count_products(*axes).num_border_products
    if all(axis.num_pixels(phase) for axis in axes for phase in axis.phases):
        assert num_products == num_counted
    else:
        # Phases without pixels are counted, although they need no product.
        assert num_products <= num_counted
