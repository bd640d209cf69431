"""Mistakes of a new user end in one line that says what to do, before anything is written."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import user_files

from laplace_debias.cli import main
from laplace_debias.sources import SourceSettings


@pytest.fixture
def folder(tmp_path, monkeypatch):
    user_files.networks(tmp_path, monkeypatch)
    user_files.image_folder(tmp_path / "images")
    user_files.archive(tmp_path / "d.npz")
    torch.manual_seed(0)
    narrow = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))
    user_files.weights(tmp_path / "narrow.pt", narrow)
    user_files.weights(tmp_path / "deep.pt", torch.nn.Sequential(*narrow, torch.nn.Linear(3, 3)))
    user_files.weights(tmp_path / "foreign.pt", torch.nn.ModuleDict({"body": narrow}))
    torch.save(narrow, tmp_path / "whole.pt")
    torch.save({"epoch": 3}, tmp_path / "empty.pt")
    (tmp_path / "text.pt").write_text("no weights")
    (tmp_path / "words.pt").write_text("epoch 3\nloss 0.2\n")
    (tmp_path / "table.pt").write_text("0,1,2\n")
    (tmp_path / "net.onnx").write_text("no weights")
    return tmp_path


ROWS = ["--model=nets:rows", "--data=d.npz"]
IMAGES = ["--model=nets:build", "--data=images"]
WRONG = {
    "no network": (["--data=d.npz"], "No network was specified. Pass exactly one of --model"),
    "two networks": ([*ROWS, "--timm=resnet18"], "--model and --timm cannot be used together"),
    "no data": (["--model=nets:rows"], "No data was specified. Pass --data"),
    "no such data": (
        ["--model=nets:rows", "--data=nowhere"],
        "The path nowhere of --data does not exist",
    ),
    "no import path": (["--model=nets.rows", "--data=d.npz"], "Pass an import path"),
    "no such module": (["--model=nest:rows", "--data=d.npz"], "there is no module nest. Run the"),
    "a file's name": (["--model=nets.py:rows", "--data=d.npz"], "Pass nets:rows."),
    "no such package": (["--model=a.b:rows", "--data=d.npz"], "there is no module a. Run the"),
    "no such attribute": (["--model=nets:row", "--data=d.npz"], "has no row. Did you mean rows"),
    "no callable": (
        ["--model=nets:no_network", "--data=d.npz"],
        "of type int, which cannot be called",
    ),
    "returns text": (
        ["--model=nets:returns_text", "--data=d.npz"],
        "returned str. Return a torch",
    ),
    "raises": (["--model=nets:breaks", "--data=d.npz"], "raised RuntimeError: no such file on two"),
    "full stop": (
        ["--model=nets:breaks", "--data=d.npz"],
        "lines. To see where, add --traceback.",
    ),
    "asks": (["--model=nets:asks", "--data=d.npz"], "missing 1 required positional argument"),
    "arguments": ([*ROWS, "--model_args.outptus=3"], "unexpected keyword argument 'outptus'"),
    "classes": (
        [*ROWS, "--model_args.outputs=5"],
        "the task classification needs 3 (classes) for this data",
    ),
    "one output": ([*ROWS, "--model_args.outputs=1"], "--task=regression or --task=poisson. If"),
    "inputs": ([*ROWS, "--model_args.inputs=5"], "does not accept inputs of shape [2, 4]"),
    "timm": (
        ["--timm=resnet18x", "--data=images", "--checkpoint=text.pt"],
        "Did you mean resnet18",
    ),
    "torchvision": (
        ["--torchvision=squeezenet1_11", "--data=images", "--checkpoint=text.pt"],
        "Did you mean squeezenet1_1",
    ),
    "no weights": (
        ["--timm=test_resnet", "--data=images"],
        "is not trained. Pass --checkpoint",
    ),
    "The checkpoint ": (
        [*ROWS, "--checkpoint=none.pt"],
        "The path none.pt of --checkpoint does not exist. Check the path",
    ),
    "folder of weights": (
        [*ROWS, "--checkpoint=images"],
        "The checkpoint images is a folder. Pass the file with the weights",
    ),
    "other widths": ([*ROWS, "--checkpoint=narrow.pt"], "size mismatch for 0.weight"),
    "other depth": ([*ROWS, "--checkpoint=deep.pt"], 'Unexpected key(s) in state_dict: "3.weight"'),
    "other names": ([*ROWS, "--checkpoint=foreign.pt"], "None of its 4 names (body.0.weight"),
    "pickled": ([*ROWS, "--checkpoint=whole.pt"], "torch.save(model.state_dict(), PATH)"),
    "no state": ([*ROWS, "--checkpoint=empty.pt"], "contains epoch"),
    "damaged": (
        [*ROWS, "--checkpoint=text.pt"],
        "text.pt is damaged, or was not written by torch.save",
    ),
    # torch's reader interprets words as instructions, so it fails with KeyError and other errors.
    "text": (
        [*ROWS, "--checkpoint=words.pt"],
        "words.pt is damaged, or was not written by torch.save",
    ),
    "numbers": (
        [*ROWS, "--checkpoint=table.pt"],
        "table.pt is damaged, or was not written by torch.save",
    ),
    "other file": (
        [*ROWS, "--checkpoint=net.onnx"],
        "ends with .onnx. Use a file that ends with .safetensors",
    ),
    "ood": ([*IMAGES, "--ood", "digits"], "Use --ood NAME=PATH"),
    "ood of a fit": ([*IMAGES, "--ood", "x=nowhere"], "--ood has no effect here"),
    "ood value": ([*IMAGES, "--ood"], "--ood: expected one argument. Use --ood NAME=PATH"),
    "unknown option": (
        [*IMAGES, "--xyz"],
        "laplace-debias fit has no option --xyz. --help lists the options.",
    ),
    "misspelt option": (
        [*IMAGES, "--progess", "--seed=1"],
        "laplace-debias fit has no option --progess. Did you mean --progress?",
    ),
    "unknown key": ([*IMAGES, "--model_arg.depth"], "no option --model_arg.depth"),
    "value of a key": ([*IMAGES, "--model_args.depth="], "--model_args.depth: the value is empty."),
    "config value": ([*IMAGES, "--config"], "--config: expected one argument."),
    "severity": ([*IMAGES, "--corruptions=[6]"], "Pass severities from 1 to 5"),
    "std": ([*IMAGES, "--std=[0.0]"], "Pass positive numbers"),
    "mean": ([*IMAGES, "--mean=[0.5, 0.5]", "--std=1,1,1"], "one number per channel"),
    "channels": ([*IMAGES, "--mean=0.5,0.5", "--std=1,1"], "one number per channel"),
    "limit": ([*ROWS, "--train_examples=31"], "train data has only 30 examples. Pass a smaller"),
    "target": ([*ROWS, "--target=y"], "target cannot be used with a .npz file"),
    "standardise": (
        [*ROWS, "--standardise=false"],
        "standardise cannot be used with a .npz file. Remove this option",
    ),
    "no images": (
        [*ROWS, "--mean=[0.5]"],
        "`mean` and `std` apply only to images, but d.npz has inputs of shape",
    ),
    "task": ([*IMAGES, "--task=regression"], "with one subfolder per class"),
    "two classes": ([*IMAGES, "--task=binary"], "3 classes, but binary classification needs two"),
    "held out": ([*ROWS, "--held_out=0.6"], "Pass a fraction between 0 and 0.5"),
    "pretrained": (
        [*ROWS, "--pretrained"],
        "`pretrained` applies only to --timm and --torchvision",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_line_says_what_to_do(folder, case, capsys):
    arguments, message = WRONG[case]
    assert main(["fit", *arguments, "--output=posterior.safetensors", "--progress=false"]) == 2
    captured = capsys.readouterr()
    line = captured.err.splitlines()[-1]
    assert line.startswith("laplace-debias: error: ")
    assert message in line
    assert not (folder / "posterior.safetensors").exists()


ARCHIVES = {
    "no y": ({"x_train": np.zeros((4, 4))}, "no y_train and no x_test and no y_test"),
    "lengths": (user_files.arrays() | {"y_test": np.arange(3)}, "has 9 rows, but y has 3"),
    "nan": (
        user_files.arrays() | {"x_val": np.full((12, 4), np.nan)},
        "48 NaN or infinite numbers",
    ),
    "text": (
        user_files.arrays() | {"y_train": np.array(["a"] * 30)},
        "is of type <U1. Convert it to numbers",
    ),
    "objects": ({"x": np.array([None, 1])}, "contains Python objects, which could run code"),
    "shapes": (
        user_files.arrays() | {"x_test": np.zeros((9, 5))},
        "The inputs of x_test in bad.npz have shape [5]",
    ),
    "negative": (
        user_files.arrays() | {"y_train": np.arange(30) - 1},
        "integers of shape [30] from -1 to 28, so the task cannot be inferred. Pass --task=",
    ),
    "counts": (
        user_files.arrays() | {"y_train": np.arange(60).reshape(30, 2)},
        "integers of shape [30, 2] from 0 to 59, so the task cannot be inferred. Pass --task=",
    ),
    "empty": (
        user_files.arrays() | {"x_test": np.zeros((0, 4)), "y_test": np.zeros(0, int)},
        "at least one",
    ),
    "few": (
        {"x": np.zeros((2, 4)), "y": np.arange(2)},
        "A fraction 0.2 of them is held out",
    ),
}


@pytest.mark.parametrize("case", ARCHIVES)
def test_archives_that_cannot_be_used(folder, case, capsys):
    content, message = ARCHIVES[case]
    user_files.archive(folder / "bad.npz", **content)
    arguments = ["--model=nets:rows", "--data=bad.npz", "--output=p.safetensors"]
    assert main(["fit", *arguments]) == 2
    assert message in capsys.readouterr().err


def _without_class(root: Path) -> None:
    shutil.rmtree(root / "test" / "dog")


def _empty_class(root: Path) -> None:
    for file in (root / "train" / "eel").iterdir():
        file.unlink()


def _loose(root: Path) -> None:
    shutil.rmtree(root)
    user_files.loose_images(root)


FOLDERS = {
    "class missing": (_without_class, "images/test has no class folder dog"),
    "class without images": (_without_class, "If there are no images of a class, pass loaders"),
    "class more": (lambda r: user_files.loose_images(r / "test" / "fox"), "unknown classes fox"),
    "class empty": (_empty_class, "images/train/eel has no images"),
    "part missing": (lambda root: (root / "test").rename(root / "tset"), "no test/"),
    "no classes": (_loose, "images has no class folders"),
}


@pytest.mark.parametrize("case", FOLDERS)
def test_folders_that_cannot_be_used(folder, case, capsys):
    spoil, message = FOLDERS[case]
    spoil(folder / "images")
    arguments = ["--model=nets:build", "--data=images", "--output=p.safetensors"]
    assert main(["fit", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_an_error_nobody_foresaw_is_a_line_too(folder, capsys, monkeypatch):
    from laplace_debias.commands import fit

    def breaks(settings):
        raise RuntimeError("out of\nmemory")

    monkeypatch.setattr(fit, "run", breaks)
    arguments = ["fit", *ROWS, "--output=p.safetensors"]
    assert main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        "laplace-debias: error: RuntimeError: out of memory. To see where it was raised, "
        "add --traceback."
    )
    assert main([*arguments, "--traceback"]) == 2
    error = capsys.readouterr().err
    assert "Traceback" in error
    assert "in breaks" in error


def test_settings_are_checked_without_the_command_line():
    with pytest.raises(ValueError, match="batch_size is 0"):
        SourceSettings(model="nets:rows", batch_size=0)
