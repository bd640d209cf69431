"""The documents: their code and commands run, their links lead somewhere, their words are plain."""

import contextlib
import doctest
import importlib
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import yaml
from torch.utils.data import DataLoader, TensorDataset

from examples.paper.__main__ import main as paper
from examples.study.__main__ import main as study
from laplace_debias import Laplace
from laplace_debias.cli import main
from laplace_debias.curvature.layer_rules import LAYER_RULES
from laplace_debias.curvature.losses.likelihoods import LIKELIHOODS
from laplace_debias.curvature.structures import STRUCTURES
from laplace_debias.laplace.links import FORMULAS
from website import word_rules

ROOT = Path(__file__).parents[2]
COMMAND_LINE = ROOT / "docs" / "how-to" / "command-line.md"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def blocks_of(page, language):
    """The fenced blocks of one language on a page."""
    text = page.read_text(encoding="utf-8")
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def names_of_a_user(page="guide"):
    """The names that how-to pages take from the set-up of the guide: a classifier and data."""
    setup, *_ = blocks_of(ROOT / "docs" / f"{page}.md", "python")
    names = {}
    exec(compile(setup, page, "exec"), names)
    return names


def lines_of_integrations():
    """The lines of code in the table of docs/integrations.md, by library."""
    text = (ROOT / "docs" / "integrations.md").read_text(encoding="utf-8")
    section = text.partition("## Two lines per library")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| ([^|`]+) \| (`.*) \|$", section, re.MULTILINE)
    return [
        pytest.param("\n".join(re.findall(r"`([^`]+)`", cell)), id=library)
        for library, cell in rows
    ]


def trainer_of_a_user(folder):
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=8, hidden_size=4, num_hidden_layers=1, num_attention_heads=1, intermediate_size=4
    )
    arguments = transformers.TrainingArguments(output_dir=str(folder), report_to="none")
    examples = [{"input_ids": torch.arange(4), "labels": torch.tensor(label)} for label in (0, 1)]
    return transformers.Trainer(
        model=transformers.BertForSequenceClassification(config),
        args=arguments,
        train_dataset=examples,
        eval_dataset=examples,
    )


def adapters_of_a_user():
    """A small network with a quantised layer, and where its adapters go."""
    quantization = pytest.importorskip("torchao.quantization")
    peft = pytest.importorskip("peft")
    network = names_of_a_user()["model"]
    quantization.quantize_(network[0], quantization.Int8WeightOnlyConfig())
    config = peft.LoraConfig(r=2, target_modules=["0"], init_lora_weights=False)
    return {"peft": peft, "quantised_model": network, "lora_config": config}


def skorch_net_of_a_user():
    skorch = pytest.importorskip("skorch")
    network = names_of_a_user()["model"]
    return skorch.NeuralNetClassifier(network, criterion=torch.nn.CrossEntropyLoss, verbose=0)


def classifier_of_a_user(X, y):
    integration = pytest.importorskip("laplace_debias.integrations.sklearn")
    return integration.LaplaceClassifier(names_of_a_user()["model"]).fit(X, y)


@contextlib.contextmanager
def process_group_of_a_user(folder):
    """A process group of one process, and what the lines use of `torch.distributed`."""
    fsdp = importlib.import_module("torch.distributed.fsdp")
    mesh = importlib.import_module("torch.distributed.device_mesh")
    store = torch.distributed.FileStore(str(folder / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield {"fully_shard": fsdp.fully_shard, "mesh": mesh.init_device_mesh("cpu", (1,))}
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("lines", lines_of_integrations())
def test_the_lines_of_integrations_run(lines, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    user = names_of_a_user()
    inputs = torch.randn(60, 4)
    targets = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    names = {
        **user,
        "Laplace": Laplace,
        "X": inputs.numpy(),
        "X_held_out": inputs.numpy(),
        "y_held_out": (torch.arange(60) % 3).numpy(),
        "y": (torch.arange(60) % 3).numpy(),
        "la": Laplace(user["model"], params="last_layer").fit(user["train_loader"]),
        "regression": torch.nn.Linear(4, 1),
        "regression_loader": DataLoader(targets, batch_size=20),
    }
    if "onnxruntime" in lines:
        names["onnxruntime"] = pytest.importorskip("onnxruntime")
    if "trainer" in lines:
        names["trainer"] = trainer_of_a_user(tmp_path)
    if "peft" in lines:
        names |= adapters_of_a_user()
    if "skorch" in lines:
        names["skorch_net"] = skorch_net_of_a_user()
    if "mapie" in lines:
        pytest.importorskip("mapie")
        names["classifier"] = classifier_of_a_user(names["X"], names["y"])
    if "timm" in lines:
        names["timm"] = pytest.importorskip("timm")
        names["image_loader"] = [(torch.randn(4, 3, 32, 32), torch.arange(4) % 3)]
    if "accelerate" in lines:
        names["accelerate"] = pytest.importorskip("accelerate")
    assert len(lines.splitlines()) == 2
    with contextlib.ExitStack() as stack:
        if "fully_shard" in lines:
            names |= stack.enter_context(process_group_of_a_user(tmp_path))
        exec(compile(lines, "integrations.md", "exec"), names)


def test_every_integration_has_lines_on_its_page():
    lines = "\n".join(case.values[0] for case in lines_of_integrations())
    files = (ROOT / "laplace_debias/integrations").glob("*.py")
    modules = {path.stem for path in files if "imports_of_extra(" in path.read_text("utf-8")}
    assert {name for name in modules if f"integrations.{name} " in lines} == modules


def test_every_library_that_tests_use_has_lines_on_the_page():
    libraries = {case.id for case in lines_of_integrations()}
    assert libraries >= {
        "scikit-learn",
        "skorch",
        "MAPIE",
        "Lightning",
        "Hugging Face's Trainer",
        "the Hugging Face Hub",
        "PEFT, QLoRA",
        "timm",
        "accelerate",
        "FSDP2",
        "ONNX, torch.export",
        "BoTorch",
    }


PAGES_WITH_CODE = [page for page in PAGES if blocks_of(page, "python")]


@pytest.mark.parametrize("page", PAGES_WITH_CODE, ids=lambda page: page.stem)
def test_code_on_a_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # Entries that a page adds to a registry are removed after this page.
    for registry in (LIKELIHOODS, STRUCTURES):
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    names = {}
    if page.stem == "README":
        names = names_of_a_user("quick-start")
    elif "guide.md#set-up)" in page.read_text(encoding="utf-8"):
        names = names_of_a_user()
    # A page is read from its beginning: later blocks use the names of earlier ones.
    with patch.dict(FORMULAS), patch.dict(LAYER_RULES):
        exec(compile("\n".join(blocks_of(page, "python")), page.name, "exec"), names)
    saves = ".save(" in page.read_text(encoding="utf-8")
    assert (tmp_path / "posterior.safetensors").exists() == saves


def test_the_readme_shows_the_output_of_the_quick_start():
    """They have the same network and data; the quick start's first block defines the names."""
    shown = "".join(blocks_of(ROOT / "README.md", "text"))
    quick_start = "".join(blocks_of(ROOT / "docs" / "quick-start.md", "text"))
    assert "auroc_shuffled" in shown
    assert set(shown.splitlines()) <= set(quick_start.splitlines())


def test_the_pages_that_teach_have_code():
    taught = {page.stem for page in PAGES_WITH_CODE}
    assert taught >= {"README", "session", "quick-start", "gotchas", "linear-algebra"}


@pytest.mark.parametrize("block", blocks_of(COMMAND_LINE, "yaml"), ids=["network", "posteriors"])
def test_settings_files_on_the_page_of_commands_are_read(block, tmp_path, capsys):
    """By `report`, which takes all options of a network and of posteriors."""
    path = tmp_path / "settings.yaml"
    path.write_text(block, encoding="utf-8")
    network = [] if "model:" in block else ["--model=nets:build"]
    assert main(["report", f"--config={path}", *network, "--print_config"]) == 0
    read = yaml.safe_load(capsys.readouterr().out)
    for name, value in yaml.safe_load(block).items():
        if name == "posteriors":
            for key, options in value.items():
                assert read[name][key].items() >= options.items()
        else:
            assert read[name] == value


def commands_on(page):
    """The lines of a page's blocks of bash, and the commands in its blocks of output."""
    lines = []
    for block in blocks_of(page, "bash"):
        lines += block.replace("\\\n", " ").splitlines()
    for block in (*blocks_of(page, "text"), *blocks_of(page, "")):
        for line in block.replace("\\\n", " ").splitlines():
            if line.startswith("laplace-debias "):
                lines.append(line)
    return lines


COMMANDS_ON_PAGES = sorted({line for page in PAGES for line in commands_on(page)})


@pytest.mark.parametrize("line", COMMANDS_ON_PAGES)
def test_commands_on_a_page_exist(line, capsys):
    """Their program, target or extra, and every option that they are given."""
    program, *words = shlex.split(line, comments=True)
    if program == "laplace-debias":
        assert main([words[0], "--help"]) == 0
        options_of_help = set(re.findall(r"--[\w.]+", capsys.readouterr().out))
        assert {
            word.partition("=")[0] for word in words if word.startswith("--")
        } <= options_of_help
    elif (program, words[:2]) == ("python", ["-m", "examples.paper"]):
        name, *options = [*words[2:], "overlaps"]
        with contextlib.suppress(SystemExit):
            paper(["overlaps" if name == "NAME" else name, "--help"])
        options_of_help = set(re.findall(r"--[\w.]+", capsys.readouterr().out))
        assert {
            word.partition("=")[0] for word in options if word.startswith("--")
        } <= options_of_help
    elif (program, words[:2]) == ("python", ["-m", "examples.study"]):
        with contextlib.suppress(SystemExit):
            study(["--help"])
        options_of_help = set(re.findall(r"--[\w.]+", capsys.readouterr().out))
        assert {
            word.partition("=")[0] for word in words[2:] if word.startswith("--")
        } <= options_of_help
    elif program == "make" and shutil.which("make"):
        subprocess.run(["make", "-n", *words], cwd=ROOT, capture_output=True, check=True)
    elif program == "pip":
        project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
        for extra in re.findall(r"\[(\w+)\]", line):
            assert f"\n{extra} = [\n" in project
    else:
        pytest.fail(f"no test knows the program {program}")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_point_to_files_and_headings(page):
    for target, _, anchor in re.findall(
        r"\]\((?!http)([^)#]*)(#([^)]+))?\)", page.read_text(encoding="utf-8")
    ):
        path = page.parent / target if target else page
        assert path.exists(), f"{page.name} links to {target}"
        if anchor:
            assert anchor in headings_of(path), f"{page.name} links to {target}#{anchor}"


def headings_of(page):
    """The anchors that a page's headings get, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


# Patterns of phrases that readers had to read twice, by the rule that such a phrase breaks
# (CONTRIBUTING.md, Words).
HARD_TO_READ = {
    'a sentence begins with "Of"': r"(?:^|[.:;] |\| |\*\*:? )Of (?=[a-z\d])",
    '"alone" for "only"': r"\balone\b",
    "software tells": r"\b(?:tells?|told)\b",
    "a docstring or sentence refers to another name": r"(?:^|\. )As `",
    '"a" for "per"': r"\b(?:\d|one|two|three|s|ms|MB|bytes|labels?|pass|passes|seconds?|once)"
    r" an? (?:batch|draw|example|factor|fit|image|key|pass|probe|query|sample|sequence|step)\b",
    '"less" for "minus"': r"\bless (?:that|those|the)\b",
    '"ahead" or "behind" for a difference': r"\b(?:ahead|behind)\b",
    '"beside" for "compared with"': r"\bbesides?\b",
    "interrupted, resumed, fixed": r"broken off|begins? anew|gone? on\b|\bmend",
    "supported": r"is not there for|belongs? into",
}
# Words that a page may use: names in code, and quotations of rules.
EXCEPTIONS = {
    "CONTRIBUTING": ["alone", "tells", "less"],
}


def prose_of(page):
    """A page without code, targets of links and comments."""
    text = page.read_text(encoding="utf-8")
    for pattern in (r"```.*?```", r"`[^`\n]+`", r"\]\([^)]*\)", r"<!--.*?-->"):
        text = re.sub(pattern, "`", text, flags=re.DOTALL)
    return text


def hard_to_read(text):
    """The places of a text that break a rule."""
    places = []
    for rule, pattern in HARD_TO_READ.items():
        for match in re.finditer(pattern, text, re.MULTILINE):
            excerpt = text[max(0, match.start() - 30) : match.end() + 20]
            places.append((rule, match[0].strip(), " ".join(excerpt.split())))
    return places


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_pages_are_easy_to_read(page):
    exceptions = EXCEPTIONS.get(page.stem, [])
    assert [place for place in hard_to_read(prose_of(page)) if place[1] not in exceptions] == []


def test_what_is_hard_to_read_is_reported():
    for sentence in (
        "Of several processes the first one writes.",
        "It enters the marginal likelihood alone.",
        "The error is told on the other half.",
        "As `Scheme.check`.",
        "One label an example: 3 passes a batch, two labels an example.",
        "NLL less that of temperature scaling.",
        "The last layer is ahead.",
        "Time beside other libraries.",
        "A fit that is gone on with.",
    ):
        assert hard_to_read(sentence), sentence
    assert hard_to_read("Only the first of several processes writes, once a minute.") == []


def test_the_lint_of_words_finds_what_breaks_a_rule(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("Of several processes one writes.\n\nIt is one label an example, alone.\n")
    (start, text), *_ = word_rules.texts(page)
    broken_rules = [
        rule for rule, pattern in word_rules.RULES.items() if re.search(pattern, text, re.M)
    ]
    assert (start, len(broken_rules)) == (1, 3)
    module = tmp_path / "module.py"
    module.write_text('def f():\n    """As `g`."""\n')
    assert [text for _, text in word_rules.texts(module)] == ["As `."]


def test_words_of_pages_docstrings_and_messages_keep_the_rules():
    assert word_rules.main() == 0


MODULES_WITH_EXAMPLES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in sorted((ROOT / "laplace_debias").rglob("*.py"))
    if ">>>" in path.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("module", MODULES_WITH_EXAMPLES)
def test_docstring_examples_run(module):
    result = doctest.testmod(importlib.import_module(module))
    assert result.attempted > 0
    assert result.failed == 0


def test_the_files_and_names_to_change_exist():
    """The page on additions names places in the source, which may move."""
    text = (ROOT / "docs" / "how-to-add.md").read_text(encoding="utf-8")
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    quoted = set(re.findall(r"`([^`\n]+)`", prose))
    paths = {name for name in quoted if re.fullmatch(r"[\w/]+(?:\.py|/)", name)}
    folders = (ROOT, ROOT / "laplace_debias")
    assert [path for path in paths if not any((f / path).exists() for f in folders)] == [
        path for path in paths if "NAME" in path
    ]
    files = [*(ROOT / "laplace_debias").rglob("*.py"), *(ROOT / "tests").rglob("*.py")]
    words = set(re.findall(r"\w+", " ".join(file.read_text(encoding="utf-8") for file in files)))
    names = {name for name in quoted if re.fullmatch(r"_?[A-Za-z]\w{2,}", name)}
    assert names - words == set()


def test_messages_in_troubleshooting_are_those_of_the_package():
    """Messages are broken into lines in the source, wherever the lines end."""
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    rows = page.split("## By error message")[1].splitlines()[6:]
    quoted = [code for row in rows for code in re.findall(r"`([^`]+)`", row.split("|")[1])]
    sources = "".join(
        path.read_text(encoding="utf-8") for path in (ROOT / "laplace_debias").rglob("*.py")
    )
    messages = re.sub(r"[\"']\s+f?[\"']", "", sources)
    assert len(quoted) > 10
    assert [message for message in quoted if message not in messages] == []
