"""The files that a hosted repository reads: workflows, hooks, the citation."""

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def read_yaml(path):
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def project():
    """The table `project` of pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def commands_in(workflow):
    """The shell commands that a workflow runs."""
    return [
        step["run"]
        for job in read_yaml(workflow)["jobs"].values()
        for step in job["steps"]
        if "run" in step
    ]


def make_commands(workflow):
    """The calls of make in a workflow, without GitHub's expressions."""
    lines = [line for command in commands_in(workflow) for line in command.splitlines()]
    return [re.sub(r"\$\{\{.*?\}\}", "", line) for line in lines if line.startswith("make ")]


def test_the_citation_has_the_version_of_the_package():
    assert read_yaml(ROOT / "CITATION.cff")["version"] == project()["version"]


def test_the_citation_is_the_readmes():
    paper = read_yaml(ROOT / "CITATION.cff")["preferred-citation"]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    authors = [f"{author['family-names']}, {author['given-names']}" for author in paper["authors"]]
    assert f"author    = {{{' and '.join(authors)}}}" in readme
    assert f"title     = {{{paper['title']}}}" in readme
    assert f"booktitle = {{{paper['collection-title']}}}" in readme
    assert f"year      = {{{paper['year']}}}" in readme


def test_the_workflows_test_every_supported_python_and_the_lowest_versions():
    matrix = read_yaml(ROOT / ".github/workflows/tests.yml")["jobs"]["versions"]["strategy"]
    lowest = project()["requires-python"].removeprefix(">=")
    assert matrix["matrix"]["python"][0] == lowest
    assert matrix["matrix"]["include"] == [{"python": lowest, "lowest": "1"}]


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_call_targets_of_the_makefile(workflow):
    commands = make_commands(workflow)
    assert commands
    for command in commands:
        target = command.split()[1]
        run = subprocess.run(
            ["make", "--dry-run", target], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert run.returncode == 0, f"{workflow.name}: {command}: {run.stderr}"


def test_the_workflows_run_what_contributors_run():
    commands = [command for workflow in WORKFLOWS for command in make_commands(workflow)]
    targets = {command.split()[1] for command in commands}
    assert targets >= {"lint", "docs", "demo", "test-all", "test-python", "package"}


def test_hooks_run_the_tools_of_make_lint():
    tool = r"/(ruff format|ruff check|mypy|python website/word_rules.py)"
    hooks = read_yaml(ROOT / ".pre-commit-config.yaml")["repos"][0]["hooks"]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    recipe = re.search(r"^lint:.*\n((?:\t.*\n)+)", makefile, re.MULTILINE)[1]
    tools = re.findall(r"\$\(BIN\)" + tool, recipe)
    assert len(tools) == len(recipe.splitlines())
    assert [re.match(r"\.venv/bin" + tool, hook["entry"])[1] for hook in hooks] == tools


def test_only_the_upload_can_act_for_the_project_on_pypi():
    workflow = read_yaml(ROOT / ".github" / "workflows" / "release.yml")
    assert workflow["permissions"] == {"contents": "read"}
    writers = {
        name
        for name, job in workflow["jobs"].items()
        if job.get("permissions", {}).get("id-token") == "write"
    }
    assert writers == {"publish"}
    # YAML 1.1 reads the key `on` as true.
    assert workflow[True] == {"push": {"tags": ["v*"]}}
