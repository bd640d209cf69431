"""The layers of the package and what may import what, read from the source: nothing is imported.

`LAYERS` is the table. CONTRIBUTING.md shows it as text: `table_of_layers()`.
"""

import ast
import functools
import graphlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = "laplace_debias"

# Layers from top to bottom: packages with their purposes. A module may import its own package and
# the packages of lower layers; packages of one layer do not import each other. The whole package
# is the package of its `__init__.py`.
LAYERS = (
    {"commands": "the command line: one file per command"},
    {"assessment": "comparison of uncertainty methods; the run folder"},
    {"sources": "networks and data, loaded from names and paths"},
    {
        PACKAGE: "the public names",
        "integrations": "adapters to other libraries",
        "compat": "drop-in replacements under the names of other libraries",
        "report": "tables and pictures",
    },
    {
        "runs": "the records of a run: their schema, and the folder that holds them",
        "training": "curvature and hyper-parameters while a network is trained",
    },
    {"laplace": "the class Laplace, mixtures of posteriors, posteriors as priors"},
    {
        "laplace.fitting": "fitting schemes, plans, resuming, updates",
        "laplace.tuning": "prior precision, noise and temperature, by data or evidence",
    },
    {"laplace.saving": "files, published posteriors, exported programs"},
    {"laplace.prediction": "predictive distributions, their uncertainty and evaluation"},
    {"laplace.functional": "moments and samples of the linearised network's outputs"},
    {"laplace.state": "the state of a fit: model, parameters, prior, posterior"},
    {
        "laplace.links": "from Gaussian logits to probabilities",
        "laplace.wrong_names": "messages for misspelt attributes, and for laplace-torch's names",
    },
    {
        "laplace.pairwise": "the mean-field softmax, from the differences between pairs of logits",
        "quadratic": "quadratic models of a loss",
        "optim": "Hessian-free optimisation",
    },
    {"curvature.operators": "Hessian, GGN, Fisher, K-FAC, EKFAC as linear operators"},
    {"curvature.structures": "one file per posterior structure: fits, memory, tensors"},
    {"curvature.fits": "factors, directions and magnitudes from data"},
    {"curvature.layers": "the layers of a network: calls, Jacobians, checks of the blocks"},
    {"curvature.losses": "losses and likelihoods as functions of the outputs"},
    {"curvature.data": "batches of inputs and targets, from whatever a loader yields"},
    {"curvature.network": "the network: inputs, selection, copies, checks"},
    {
        "curvature.layer_rules": "one file per layer type: blocks, activations, output gradients",
        "curvature.fisher": "the types of Fisher matrices, by their names",
    },
    {"linalg": "algorithms on any operator: trace, eigenpairs, solvers"},
    {"operators": "linear operators and their algebra"},
    {"system": "files, threads, processes, random numbers"},
)
# Packages outside of the layers: which packages may import them, and what they may import.
ASIDE = {
    "metrics": (
        ("commands", "assessment", "integrations", "report", "runs", "laplace"),
        ("system",),
    )
}
# Modules that belong to a package of another name.
MEMBERS = {"cli": "commands", "__main__": "commands", "curvature": "curvature.operators"}
PACKAGES = [package for layer in LAYERS for package in layer] + list(ASIDE)


def table_of_layers():
    """The layers as text, as CONTRIBUTING.md shows them: a line for each package."""
    lines = []
    for number, layer in enumerate(reversed(LAYERS)):
        packages = [f"{number:4}  {package:22}{purpose}" for package, purpose in layer.items()]
        lines = packages + lines
    for package, (users, used) in ASIDE.items():
        lines += [f"   –  {package:22}used by {', '.join(users)}; uses {', '.join(used)}"]
    return "\n".join(lines) + "\n"


def path_of(module):
    """A module's name below the package; the package's own for its `__init__.py`."""
    return module.partition(".")[2] or PACKAGE


def package_of(module):
    """The package that a module belongs to; None if it has none."""
    path = path_of(module)
    if path in MEMBERS:
        return MEMBERS[path]
    above = [path, *(path.rsplit(".", cut)[0] for cut in range(1, path.count(".") + 1))]
    return next((package for package in above if package in PACKAGES), None)


def may_import(importing, imported_package):
    """Whether a module of one package may import one of another."""
    if importing == imported_package:
        return True
    if imported_package in ASIDE:
        return importing.partition(".")[0] in ASIDE[imported_package][0]
    if importing in ASIDE:
        return imported_package in ASIDE[importing][1]
    positions = {name: number for number, layer in enumerate(LAYERS) for name in layer}
    return positions[importing] < positions[imported_package]


@functools.cache
def sources():
    """The syntax tree of every module of the package, by the module's name."""
    trees = {}
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        components = path.relative_to(ROOT).with_suffix("").parts
        module = ".".join(components[:-1] if components[-1] == "__init__" else components)
        trees[module] = ast.parse(path.read_text(encoding="utf-8"))
    return trees


def imported(node):
    """The dotted names that an import statement takes: modules, or what they hold."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        assert node.level == 0, f"line {node.lineno}: write the import from {PACKAGE} on"
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


@functools.cache
def graph():
    """The modules of the package that each of them imports, wherever the statement stands."""
    modules = sources()
    imported_modules = {}
    for module, tree in modules.items():
        names = {name for node in ast.walk(tree) for name in imported(node)}
        names = {name if name in modules else name.rpartition(".")[0] for name in names}
        imported_modules[module] = sorted(names & set(modules))
    return imported_modules


def test_every_module_has_a_package():
    assert [module for module in sources() if package_of(module) is None] == []
    assert {package_of(module) for module in sources()} <= set(PACKAGES)


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_only_go_down(package):
    upward = [
        f"{module} -> {imported_module}"
        for module, imported_modules in graph().items()
        if package_of(module) == package
        for imported_module in imported_modules
        if not may_import(package, package_of(imported_module))
    ]
    assert not upward, "\n".join(upward)


def test_no_module_imports_itself_in_a_circle():
    try:
        graphlib.TopologicalSorter(graph()).prepare()
    except graphlib.CycleError as error:
        pytest.fail(" -> ".join(reversed(error.args[1])))


def test_functions_import_only_third_party_packages():
    """An import of our own within a function hides a circle. The command line starts fast by it."""
    ours = {PACKAGE, *sys.stdlib_module_names}
    hidden = []
    for module, tree in sources().items():
        if package_of(module) == "commands":
            continue
        for function in ast.walk(tree):
            if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            for node in ast.walk(function):
                for name in imported(node):
                    if name.partition(".")[0] in ours:
                        hidden.append(f"{module}, line {node.lineno}: {name}")
    assert not hidden, "\n".join(hidden)


@pytest.mark.parametrize("package", ["operators", "linalg"])
def test_linear_algebra_does_not_use_torch_nn(package):
    uses = [
        f"{module}, line {node.lineno}"
        for module, tree in sources().items()
        if package_of(module) == package
        for node in ast.walk(tree)
        if any(f"{name}.".startswith("torch.nn.") for name in imported(node))
        or (isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.nn")
    ]
    assert not uses, "\n".join(uses)


def test_contributing_shows_the_table_of_layers():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert f"```text\n{table_of_layers()}```" in text, (
        f"CONTRIBUTING.md should have\n\n{table_of_layers()}"
    )


@pytest.mark.parametrize(
    ("importing", "imported_package", "is_allowed"),
    [
        ("laplace", "curvature.network", True),
        ("curvature.network", "laplace", False),
        ("linalg", "metrics", False),
        ("metrics", "system", True),
        ("metrics", "operators", False),
        ("system", "operators", False),
    ],
)
def test_what_the_table_says(importing, imported_package, is_allowed):
    assert may_import(importing, imported_package) is is_allowed


@pytest.mark.parametrize(
    ("module", "package"),
    [
        (PACKAGE, PACKAGE),
        (f"{PACKAGE}.cli", "commands"),
        (f"{PACKAGE}.curvature", "curvature.operators"),
        (f"{PACKAGE}.laplace.functional.blocks", "laplace.functional"),
        (f"{PACKAGE}.curvature.nowhere", None),
    ],
)
def test_the_package_of_a_module(module, package):
    assert package_of(module) == package


@pytest.mark.slow
def test_what_is_slow_to_import_is_imported_where_it_is_used():
    slow = (
        "torchmetrics",
        "torchvision",
        "backpack",
        "scipy.stats",
        "scipy.sparse",
        "scipy.linalg",
    )
    code = f"""
import sys, laplace_debias.metrics, laplace_debias.linalg, laplace_debias.curvature
laplace_debias.curvature.GGN
print([module for module in {slow} if module in sys.modules])
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
