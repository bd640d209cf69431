"""The documentation site has every page, each public module one; CI builds it strictly."""

import importlib
import inspect
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from public_names import MODULES

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
CONFIG = ROOT / "mkdocs.yml"
NEEDS_MKDOCS = "the documentation's packages are not installed: pip install -e '.[docs]'"


class Loader(yaml.SafeLoader):
    """Reads the configuration without the Python objects in it."""


Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)


def pages_in(nav):
    """The paths at the leaves of a navigation."""
    if isinstance(nav, str):
        return [nav]
    entries = nav.values() if isinstance(nav, dict) else nav
    return [page for entry in entries for page in pages_in(entry)]


def test_the_navigation_has_every_page():
    named = pages_in(yaml.load(CONFIG.read_text(encoding="utf-8"), Loader)["nav"])
    written = {
        path.relative_to(DOCS).as_posix()
        for pattern in ("*.md", "*.ipynb")
        for path in DOCS.rglob(pattern)
    }
    assert len(named) == len(set(named))
    assert set(named) == written | {
        "changelog.md",
        "contributing.md",
        "reference/command-line.md",
    }


def reference_page(module):
    """The page of a public module."""
    return DOCS / "reference" / f"{module.removeprefix('laplace_debias.')}.md"


def test_every_public_module_has_a_reference_page():
    pages = {reference_page(module): module for module in MODULES}
    assert set((DOCS / "reference").glob("*.md")) == set(pages)
    for page, module in pages.items():
        text = page.read_text(encoding="utf-8")
        assert text.startswith(f"# {module}\n\n")
        assert f"\n::: {module}\n" in text


def test_classes_with_a_page_of_their_own_are_left_out_of_the_page_of_their_module():
    for module in MODULES:
        text = reference_page(module).read_text(encoding="utf-8")
        with_pages = re.findall(r"\]\(classes/(\w+)\.md\)", text)
        assert set(with_pages) <= set(importlib.import_module(module).__all__)
        if with_pages:
            assert f"!^({'|'.join(with_pages)})$" in text
        for name in with_pages:
            page = DOCS / "reference" / "classes" / f"{name}.md"
            assert f"\n::: {module}.{name}\n" in page.read_text(encoding="utf-8")


def test_the_page_of_metric_modules_lists_every_class_with_its_arguments():
    modules = importlib.import_module("laplace_debias.metrics.modules")
    text = reference_page("laplace_debias.metrics.modules").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `(\w+)\((\w*)=?\)` \| `metrics\.(\w+)` \| `(.*)` \|$", text, re.M)
    assert sorted(name for name, *_ in listed) == sorted(modules.__all__)
    for name, option, function, arguments in listed:
        cls = getattr(modules, name)
        assert arguments.split(", ") == list(inspect.signature(cls.update).parameters)[1:]
        assert list(cls._option_defaults) == ([option] if option else [])
        assert hasattr(importlib.import_module("laplace_debias.metrics"), function)


def test_ci_builds_the_site():
    steps = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    assert any("make" in step and "docs" in step.split() for step in steps)
    if shutil.which("make"):
        run = subprocess.run(
            ["make", "-n", "docs"], cwd=ROOT, capture_output=True, text=True, check=True
        )
        assert "mkdocs build --strict" in run.stdout


@pytest.mark.parametrize(
    ("document", "link", "translated"),
    [
        ("docs/scale.md", "../examples/spectrum.py", "source/examples/spectrum.py.md"),
        ("docs/experiments/bias.md", "../../CONTRIBUTING.md#words", "../contributing.md#words"),
        ("docs/experiments/bias.md", "../debiasing.md", "../debiasing.md"),
        ("CHANGELOG.md", "docs/how-to/tune.md#tune", "how-to/tune.md#tune"),
        ("docs/scale.md", "missing.md", "missing.md"),
        ("docs/scale.md", "https://semver.org", "https://semver.org"),
    ],
)
def test_links_lead_to_the_pages_of_files(document, link, translated):
    pytest.importorskip("mkdocs", reason=NEEDS_MKDOCS)
    from website import root_pages

    assert root_pages.translate_links(f"[a]({link})", document) == f"[a]({translated})"


def test_formulas_become_mathml():
    pytest.importorskip("latex2mathml", reason=NEEDS_MKDOCS)
    from website import mathml

    inline = mathml.on_page_content(r'so <span class="arithmatex">\(a &lt; x^2\)</span>.')
    formula = r'<math [^>]*display="inline">.*<msup><mi>x</mi><mn>2</mn></msup>.*</math>'
    assert re.fullmatch(rf'so <span class="formula">{formula}</span>\.', inline)
    assert "<mo>&#x0003C;</mo>" in inline  # once escaped, not twice
    block = mathml.on_page_content('<div class="arithmatex">\\[\nx\n\\]</div>')
    assert 'display="block"' in block
    assert "arithmatex" not in block


def build(docs, folder):
    """Builds the site of a folder of documents as `make docs` does."""
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    config = load_config(str(CONFIG), docs_dir=str(docs), site_dir=str(folder))
    config.plugins.on_startup(command="build", dirty=False)
    try:
        build(config)
    finally:
        config.plugins.on_shutdown()


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("mkdocs", reason=NEEDS_MKDOCS)
    folder = tmp_path_factory.mktemp("site")
    build(DOCS, folder)
    return folder
