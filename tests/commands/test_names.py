"""Registries list their names without importing the classes; options take the names from them."""

import subprocess
import sys
from pathlib import Path

from laplace_debias.cli import main
from laplace_debias.commands import evaluate
from laplace_debias.curvature.losses.likelihoods import LIKELIHOODS
from laplace_debias.curvature.structures import STRUCTURES
from laplace_debias.laplace.fitting.modes import MODES


def test_names_are_listed_without_torch():
    source = """
import sys
from laplace_debias.curvature.losses.likelihoods import LIKELIHOODS
from laplace_debias.curvature.structures import STRUCTURES
from laplace_debias.laplace.fitting.modes import MODES
assert "auto" in MODES
assert "poisson" in LIKELIHOODS and "kfac" in STRUCTURES
assert list(STRUCTURES) and list(LIKELIHOODS)
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", source], check=True)


def test_each_class_has_the_name_under_which_it_is_registered():
    for registry in (LIKELIHOODS, STRUCTURES):
        assert [registry[name].name for name in registry] == list(registry)


def test_the_command_line_offers_every_name(capsys):
    assert main(["fit", "--help"]) == 0
    text = "".join(capsys.readouterr().out.split())
    for registry in (STRUCTURES, MODES, LIKELIHOODS):
        assert "|".join(registry) in text


def test_posteriors_have_keys_of_their_own():
    """Letters of a file's name that cannot be in a path of a run are replaced."""
    names = ["p 1", "p-1", "P.1", "é", "è"]
    keys = evaluate._keys([Path(f"{name}.safetensors") for name in names])
    assert [path.stem for path in keys.values()] == names
    assert list(keys) == [
        "posterior-p-1",
        "posterior-p-1-2",
        "posterior-p.1",
        "posterior--",
        "posterior---2",
    ]
