"""Files with a block for every group of a convolution, written before all groups made one block."""

import json
from pathlib import Path

import oracle
import pytest
import same_numbers
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from laplace_debias import Laplace
from laplace_debias.laplace.files.sealed import read_sealed, write_sealed

DATA = Path(__file__).parents[1] / "data"
OLD = {
    name: DATA / f"posterior_of_groups_{name}.safetensors"
    for name in ("kfac", "ekfac_joint", "diag")
}
# One prior precision for every group, all different.
PER_GROUP = DATA / "posterior_of_groups_per_group.safetensors"
BLOCKS = {
    "kfac": ["0.weight", "0.bias", "2.weight", "2.bias", "4.weight", "4.bias"],
    "ekfac_joint": [f"{layer}.weight+{layer}.bias" for layer in (0, 2, 4)],
}
BLOCKS["diag"] = BLOCKS["kfac"]


def grouped():
    """Grouped, depthwise and transposed convolutions."""
    return same_numbers.with_parameters(
        nn.Sequential(
            nn.Conv2d(2, 4, 2, groups=2), nn.Tanh(), nn.Conv2d(4, 4, 2, groups=4), nn.Tanh(),
            nn.ConvTranspose2d(4, 4, 2, groups=2), nn.Tanh(), nn.Flatten(), nn.Linear(36, 2),
        )
    )  # fmt: skip


def inputs():
    g = torch.Generator().manual_seed(12)
    return torch.randn(3, 2, 4, 4, generator=g, dtype=torch.float64)


def groups_of(name):
    """A block's parameters and the group that it is, None for all, from its name in the file."""
    title, _, group = name.partition("[")
    return title.split("+"), int(group[:-1]) if group else None


def entries(layer, parameters, group, positions):
    """Where a group's matrix `[d_out, d_in]` lies among all parameters, by hand."""
    weight = positions[parameters[0]]
    if parameters[0].endswith("bias"):
        return weight.flatten()[:, None]
    if group is None:
        matrix, rows = weight.flatten(1), slice(None)
    elif isinstance(layer, nn.ConvTranspose2d):
        matrix = weight.chunk(layer.groups)[group].transpose(0, 1).flatten(1)
    else:
        matrix = weight.chunk(layer.groups)[group].flatten(1)
    if len(parameters) == 2:
        bias = positions[parameters[1]]
        rows = bias if group is None else bias.chunk(layer.groups)[group]
        matrix = torch.cat([matrix, rows[:, None]], dim=1)
    return matrix


def dense_covariance(path, model, names):
    """P⁻¹ from the tensors of the file alone, in the model's order."""
    with safe_open(path, "pt") as file:
        header = json.loads(file.metadata()["header"])
    tensors = load_file(path)
    positions, start = {}, 0
    for name in names:
        parameter = model.get_parameter(name)
        positions[name] = torch.arange(start, start + parameter.numel()).view(parameter.shape)
        start += parameter.numel()
    covariance = torch.zeros(start, start, dtype=torch.float64)
    for index, name in enumerate(header["block_names"]):
        parameters, group = groups_of(name)
        layer = model.get_submodule(parameters[0].rpartition(".")[0])
        at = entries(layer, parameters, group, positions).flatten()
        magnitudes = tensors[f"{index}.magnitudes"]
        U_G, U_A = (
            tensors.get(f"{index}.{side}", torch.eye(size, dtype=torch.float64))
            for side, size in zip(("U_G", "U_A"), magnitudes.shape, strict=True)
        )
        delta = tensors["prior_precision"].expand(len(header["block_names"]))[index]
        U = torch.kron(U_G.contiguous(), U_A.contiguous())
        along = 1 / (header["num_data"] * magnitudes.flatten() + delta)
        covariance[at[:, None], at] = U @ along.diag() @ U.T
    return covariance


@pytest.mark.parametrize("name", OLD)
def test_the_posterior_is_that_of_the_tensors_in_the_file(name):
    model, x = grouped(), inputs()
    la = Laplace.load(OLD[name], model)
    assert la.block_names[: len(BLOCKS[name])] == BLOCKS[name]
    covariance = dense_covariance(OLD[name], model, la.param_names)
    eye = torch.eye(len(la.mean), dtype=torch.float64)
    torch.testing.assert_close(la.posterior.covariance @ eye, covariance, rtol=1e-9, atol=1e-12)
    J = oracle.flat_jacobian(model, x, la.param_names)
    torch.testing.assert_close(la.functional(x)[1], J @ covariance @ J.mT, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", OLD)
def test_what_is_loaded_is_saved_with_one_block_for_all_groups(name, tmp_path):
    model, x = grouped(), inputs()
    la = Laplace.load(OLD[name], model)
    la.save(tmp_path / "again.safetensors")
    again = Laplace.load(tmp_path / "again.safetensors", model)
    assert again.block_names == la.block_names
    assert torch.equal(again.prior_precision, la.prior_precision)
    assert torch.equal(again.functional(x)[1], la.functional(x)[1])
    shapes = {key: value.shape for key, value in load_file(tmp_path / "again.safetensors").items()}
    index = la.block_names.index(BLOCKS[name][-1 if "joint" in name else 4])
    assert shapes[f"{index}.magnitudes"] == (2, 2, 8 + ("joint" in name))


def test_the_prior_precision_of_a_layer_is_that_of_all_its_groups():
    la = Laplace.load(OLD["ekfac_joint"], grouped())
    assert la.prior_precision.tolist() == [1.0, 2.0, 3.0, 4.0]


def test_different_prior_precisions_of_groups_are_refused():
    with pytest.raises(ValueError, match=r"for every group of 0\.weight, from 1 to 1\.08"):
        Laplace.load(PER_GROUP, grouped())


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda tensors: tensors.pop("4.U_A"), "'4.U_A'"),
        (lambda tensors: tensors.update({"4.U": tensors["0.U_A"]}), "'4.U'"),
        (lambda tensors: tensors.update({"1.U_A": tensors["0.U_G"]}), "'1.U_A'"),
        (lambda tensors: tensors["1.U_A"].mul_(2), "not orthonormal"),
        (lambda tensors: tensors["4.magnitudes"].neg_(), "negative magnitudes"),
        (lambda tensors: tensors.pop("prior_precision"), "'prior_precision'"),
    ],
)
def test_a_damaged_part_of_one_group_is_refused(change, told, tmp_path):
    texts, tensors = read_sealed(OLD["kfac"], {"laplace-debias/4": True})
    change(tensors)
    write_sealed(tmp_path / "damaged.safetensors", texts, tensors)
    with pytest.raises(ValueError, match=told):
        Laplace.load(tmp_path / "damaged.safetensors", grouped())


def test_a_file_of_format_3_is_read(tmp_path):
    texts, tensors = read_sealed(OLD["kfac"], {"laplace-debias/4": True})
    header = json.loads(texts["header"])
    plain = {key: value for key, value in header.items() if key not in ("class_dim", "mode")}
    old = {"format": "laplace-debias/3", "header": json.dumps(plain)}
    write_sealed(tmp_path / "old.safetensors", old, tensors)
    expected = Laplace.load(OLD["kfac"], grouped()).functional(inputs())[1]
    found = Laplace.load(tmp_path / "old.safetensors", grouped()).functional(inputs())[1]
    assert torch.equal(found, expected)
