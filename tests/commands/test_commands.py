"""The command line that runs the commands: help, mistakes, files of settings."""

import sys
from importlib.metadata import version

import pytest
import yaml

from laplace_debias.cli import main
from laplace_debias.commands import COMMANDS

FIT = ["fit", "--model=nets:build", "--data=d.npz", "--output=p.safetensors"]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([*FIT, "--batch_szie=3"], "--batch_size?"),
        ([*FIT, "--batch_size=x"], "batch_size"),
        ([*FIT, "--batch_size=0"], "batch_size is 0"),
        ([*FIT, "--params=biases"], "params"),
        ([*FIT, "--config=missing.yaml"], "missing.yaml"),
        (["fit"], "--output"),
        (["predict", "--posterior=p"], "--output"),
        (["improve"], "improve"),
        (["reprot"], "Did you mean report?"),
        ([], "command"),
    ],
)
def test_bad_arguments_end_with_one_line_that_names_them(
    arguments, named, capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("laplace-debias: error: ")
    assert captured.err.count("\n") == 1
    assert named in captured.err


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("batch_szie: 3", "bad.yaml: laplace-debias fit has no option batch_szie. Did you mean"),
        ("batch_size: many", "bad.yaml is not valid. Pass a whole number"),
        ("{", "bad.yaml is not a valid YAML file ("),
        ("a: [1,\nb: 2", "bad.yaml is not a valid YAML file ("),
        ("", "bad.yaml must contain options, but is empty. Write `OPTION: VALUE`"),
        ("just words", "bad.yaml must contain options, but contains 'just words'"),
    ],
)
def test_bad_config_ends_with_one_line_that_names_it(text, named, capsys, tmp_path):
    (tmp_path / "bad.yaml").write_text(text)
    assert main([*FIT, f"--config={tmp_path / 'bad.yaml'}"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert named in error


def test_a_config_that_is_no_text_in_utf_8_is_named(capsys, tmp_path):
    (tmp_path / "wide.yaml").write_text("batch_size: 7", encoding="utf-16")
    assert main([*FIT, f"--config={tmp_path / 'wide.yaml'}"]) == 2
    assert "wide.yaml is not a text file in UTF-8. Save it with" in capsys.readouterr().err
    assert main([*FIT, f"--config={tmp_path}"]) == 2
    assert f"{tmp_path}, is not a file. Check the path." in capsys.readouterr().err


def test_a_config_may_begin_with_a_byte_order_mark(capsys, tmp_path):
    (tmp_path / "marked.yaml").write_text("batch_size: 7", encoding="utf-8-sig")
    assert "batch_size: 7" in printed_config([*FIT, f"--config={tmp_path / 'marked.yaml'}"], capsys)


def printed_config(arguments, capsys) -> str:
    assert main([*arguments, "--print_config"]) == 0
    return capsys.readouterr().out


def test_printed_config_can_be_read_again(capsys, tmp_path):
    config = printed_config([*FIT, "--batch_size=7"], capsys)
    (tmp_path / "again.yaml").write_text(config)
    assert "batch_size: 7" in config
    assert printed_config(["fit", f"--config={tmp_path / 'again.yaml'}"], capsys) == config


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--examples=all", "--examples: expected a whole number, got 'all'. Use --examples N."),
        ("--workers=1.5", "--workers: expected a whole number, got '1.5'"),
        ("--corruptions=x", "--corruptions: expected a whole number, got 'x'"),
        ("--task=foo", "task is foo. Use classification, regression"),
    ],
)
def test_a_value_of_another_kind_is_told_in_a_sentence(option, message, capsys):
    assert main(["report", "--model=a:b", option]) == 2
    assert f"error: {message}" in capsys.readouterr().err


def test_a_missing_extra_is_named_with_its_remedy(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    assert main([*FIT, "--print_config"]) == 2
    error = capsys.readouterr().err
    assert "This command needs yaml" in error
    assert "pip install 'laplace-debias[cli]'" in error


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--corruptions", "1,3,5"], (1, 3, 5)),
        (["--corruptions=2"], (2,)),
        (["--corruptions=[1, 4]"], (1, 4)),
        (["--corruptions", "[]"], ()),
    ],
)
def test_several_values_need_no_brackets(options, expected, capsys):
    assert main(["report", "--model=a:b", *options, "--mean", "-0.5", "--print_config"]) == 0
    config = yaml.safe_load(capsys.readouterr().out)
    assert tuple(config["corruptions"]) == expected
    assert config["mean"] == [-0.5]


REPORT = ["report", "--model=a:b"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        # argparse takes words that begin with a dash for options, except for a single number.
        (["--mean", "-0.5,1"], {"mean": [-0.5, 1.0]}),
        (["--mean", "-1e-3"], {"mean": [-1e-3]}),
        (["--title", "-x"], {"title": "-x"}),
        (["--title", "50 % (a)"], {"title": "50 % (a)"}),
        (["--json", "--overwrite", "false"], {"json": True, "overwrite": False}),
        (["--progress=false", "--standardise"], {"progress": False, "standardise": True}),
        (["--seed=1", "--seed", "2"], {"seed": 2}),
        (
            ["--model_args.depth", "3", "--model_args.rate=1e-3", "--model_args", "wide=true"],
            {"model_args": {"depth": 3, "rate": 1e-3, "wide": True}},
        ),
        (["--model_args", '{"a": [1, 2]}'], {"model_args": {"a": [1, 2]}}),
        (["--ood", "x=y", "--ood=z=a=b"], {"ood": {"x": "y", "z": "a=b"}}),
    ],
)
def test_words_of_the_command_line_set_fields(words, expected, capsys):
    config = yaml.safe_load(printed_config([*REPORT, *words], capsys))
    assert {name: config[name] for name in expected} == expected


def test_options_add_to_the_entries_of_files_and_replace_other_values(capsys, tmp_path):
    first = {"seed": 1, "workers": 1, "ood": {"x": "y"}, "corruptions": [1]}
    second = {"workers": 2, "more_checkpoints": ["b.pt"]}
    words = ["--ood.z=a", "--corruptions=5", "--checkpoint=a.pt", "--checkpoint", "c.pt"]
    for name, content in (("first.yaml", first), ("second.yaml", second)):
        (tmp_path / name).write_text(yaml.safe_dump(content))
        words += ["--config", str(tmp_path / name)]
    config = yaml.safe_load(printed_config([*REPORT, *words], capsys))
    assert config["seed"] == 1
    assert config["workers"] == 2
    assert config["ood"] == {"x": "y", "z": "a"}
    assert config["corruptions"] == [5]
    assert config["checkpoint"] == "a.pt"
    assert config["more_checkpoints"] == ["b.pt", "c.pt"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["stray"], "'stray' is not an option. Options begin with --."),
        (["--mean=0.5", "0.4"], "'0.4' is not an option. Options begin with --. Separate several"),
        (["--see=3"], "has no option --see. Did you mean --seed?"),
        (["--model_arg.depth=3"], "has no option --model_arg.depth. Did you mean --model_args?"),
        (["--seed"], "--seed: expected one argument. Use --seed N."),
        (["--json=maybe"], "--json: expected true or false, got 'maybe'. Use --json true|false."),
        (["--posteriors.a", '{"pars": "all"}'], "did you mean params?"),
    ],
)
def test_wrong_words_are_named_with_a_remedy(words, message, capsys):
    assert main([*REPORT, *words]) == 2
    assert message in capsys.readouterr().err


def test_the_version_is_told(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == version("laplace-debias")


def test_help_lists_the_commands(capsys):
    assert main(["--help"]) == 0
    printed = capsys.readouterr().out
    assert all(f"  {command} " in printed for command in COMMANDS)
