"""The table of docs/how-to/options.md has what each curvature can do."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from laplace_debias import Laplace, posterior_as_prior
from laplace_debias.curvature.structures import STRUCTURES

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "options.md"
REFUSALS = (ValueError, NotImplementedError)


def table():
    """The cells of each curvature's row, `yes` or `no`, by column."""
    text = PAGE.read_text(encoding="utf-8")
    block = re.search(r"<!-- capabilities:start -->\n(.*?)<!-- capabilities:end -->", text, re.S)[1]
    header, _, *rows = [
        [cell.strip().replace("`", "") for cell in line.strip("|").split("|")]
        for line in block.splitlines()
    ]
    return {row[0].split('"')[1]: dict(zip(header[1:], row[1:], strict=True)) for row in rows}


def is_possible(action):
    try:
        action()
    except REFUSALS:
        return "no"
    return "yes"


def test_the_table_has_every_curvature():
    assert table().keys() == set(STRUCTURES)


@pytest.mark.parametrize("curvature", STRUCTURES)
def test_each_cell_of_the_table_is_true(curvature, tmp_path):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).eval()
    data = TensorDataset(torch.randn(120, 4), torch.arange(120) % 3)
    loader = DataLoader(data, batch_size=40, shuffle=True)
    inputs = torch.randn(2, 4)

    def fitted(params="last_layer", **options):
        return Laplace(network, curvature=curvature, params=params).fit(loader, **options)

    for mode in ("full", "mini", "debiased", "crossfit"):
        la = fitted(mode=mode)
        la.tune(loader)
        la.tune_evidence()
    la.update(loader)
    la.save(tmp_path / "posterior.safetensors")
    for method in ("glm", "glm-mc", "nn", "map"):
        la.predict(inputs, method)
    la.sample(2)
    actions = {
        'mode="auto"': lambda: fitted(mode="auto"),
        "one prior precision per block": lambda: fitted("all").tune_evidence(per="block"),
        "thin": lambda: fitted("all").thin(inputs),
        "export (last layer)": lambda: la.export(tmp_path / "program.pt2", inputs),
        "usable as a prior for further training": lambda: Laplace(
            network, curvature=curvature, params=la.param_names, prior=posterior_as_prior(la)
        ).fit(loader),
    }
    assert table()[curvature] == {name: is_possible(action) for name, action in actions.items()}
