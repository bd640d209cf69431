"""What a new user gets wrong: a line that says what to do, before anything is written."""

import shutil
from pathlib import Path

import bring
import numpy as np
import pytest
import torch

from laplace_debias.cli import main
from laplace_debias.sources import SourceSettings


@pytest.fixture
def here(tmp_path, monkeypatch):
    bring.networks(tmp_path, monkeypatch)
    bring.image_folder(tmp_path / "images")
    bring.archive(tmp_path / "d.npz")
    torch.manual_seed(0)
    other = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))
    bring.weights(tmp_path / "narrow.pt", other)
    bring.weights(tmp_path / "deep.pt", torch.nn.Sequential(*other, torch.nn.Linear(3, 3)))
    bring.weights(tmp_path / "foreign.pt", torch.nn.ModuleDict({"body": other}))
    torch.save(other, tmp_path / "whole.pt")
    torch.save({"epoch": 3}, tmp_path / "empty.pt")
    (tmp_path / "text.pt").write_text("no weights")
    (tmp_path / "words.pt").write_text("epoch 3\nloss 0.2\n")
    (tmp_path / "table.pt").write_text("0,1,2\n")
    (tmp_path / "net.onnx").write_text("no weights")
    return tmp_path


ROWS = ["--model=nets:rows", "--data=d.npz"]
IMAGES = ["--model=nets:build", "--data=images"]
WRONG = {
    "no network": (["--data=d.npz"], "there is no network; give one of --model"),
    "two networks": ([*ROWS, "--timm=resnet18"], "--model and --timm are given"),
    "no data": (["--model=nets:rows"], "there is no data; give --data"),
    "no such data": (["--model=nets:rows", "--data=nowhere"], "nothing is at nowhere"),
    "no import path": (["--model=nets.rows", "--data=d.npz"], "expected an import path"),
    "no such module": (["--model=nest:rows", "--data=d.npz"], "there is no module nest; run the"),
    "no such package": (["--model=a.b:rows", "--data=d.npz"], "there is no module a; run the"),
    "no such attribute": (["--model=nets:row", "--data=d.npz"], "has no row; did you mean rows"),
    "no callable": (
        ["--model=nets:no_network", "--data=d.npz"],
        "of type int and cannot be called",
    ),
    "returns text": (
        ["--model=nets:returns_text", "--data=d.npz"],
        "returned str; expected a torch",
    ),
    "raises": (["--model=nets:breaks", "--data=d.npz"], "raised RuntimeError: no such file on two"),
    "asks": (["--model=nets:asks", "--data=d.npz"], "missing 1 required positional argument"),
    "arguments": ([*ROWS, "--model_args.outptus=3"], "unexpected keyword argument 'outptus'"),
    "classes": ([*ROWS, "--model_args.outputs=5"], "gives 5 outputs, the data has 3 classes"),
    "inputs": ([*ROWS, "--model_args.inputs=5"], "cannot take inputs of shape [2, 4]"),
    "timm": (
        ["--timm=resnet18x", "--data=images", "--checkpoint=text.pt"],
        "did you mean resnet18",
    ),
    "torchvision": (
        ["--torchvision=squeezenet1_11", "--data=images", "--checkpoint=text.pt"],
        "did you mean squeezenet1_1",
    ),
    "no weights": (
        ["--timm=test_resnet", "--data=images"],
        "is not trained; give --checkpoint",
    ),
    "no checkpoint": (
        [*ROWS, "--checkpoint=none.pt"],
        "nothing is at none.pt, which --checkpoint names: check the path",
    ),
    "other widths": ([*ROWS, "--checkpoint=narrow.pt"], "size mismatch for 0.weight"),
    "other depth": ([*ROWS, "--checkpoint=deep.pt"], 'Unexpected key(s) in state_dict: "3.weight"'),
    "other names": ([*ROWS, "--checkpoint=foreign.pt"], "none of its 4 names (body.0.weight"),
    "pickled": ([*ROWS, "--checkpoint=whole.pt"], "torch.save(model.state_dict(), PATH)"),
    "no state": ([*ROWS, "--checkpoint=empty.pt"], "holds no state dict, but epoch"),
    "damaged": ([*ROWS, "--checkpoint=text.pt"], "text.pt is damaged or no file of torch.save"),
    # Words that torch's reader takes for instructions: it ends in KeyError, IndexError and others.
    "text": ([*ROWS, "--checkpoint=words.pt"], "words.pt is damaged or no file of torch.save"),
    "numbers": ([*ROWS, "--checkpoint=table.pt"], "table.pt is damaged or no file of torch.save"),
    "other file": ([*ROWS, "--checkpoint=net.onnx"], "ends with .onnx; expected .safetensors"),
    "ood": ([*IMAGES, "--ood", "digits"], "expected --ood NAME=PATH"),
    "ood of a fit": ([*IMAGES, "--ood", "x=nowhere"], "--ood has no effect here"),
    "ood value": ([*IMAGES, "--ood"], "--ood: expected --ood NAME=PATH"),
    "severity": ([*IMAGES, "--corruptions=[6]"], "expected severities in 1 … 5"),
    "std": ([*IMAGES, "--std=[0.0]"], "expected positive numbers"),
    "mean": ([*IMAGES, "--mean=[0.5, 0.5]", "--std=1,1,1"], "one number per channel"),
    "channels": ([*IMAGES, "--mean=0.5,0.5", "--std=1,1"], "one number per channel"),
    "limit": ([*ROWS, "--train_examples=31"], "train data has 30 examples: lower it"),
    "target": ([*ROWS, "--target=y"], "target given with a .npz file"),
    "standardise": (
        [*ROWS, "--standardise=false"],
        "standardise given with a .npz file: leave it out",
    ),
    "no images": (
        [*ROWS, "--mean=[0.5]"],
        "mean and std apply to images, and d.npz has inputs of shape",
    ),
    "task": ([*IMAGES, "--task=regression"], "class folders make a classification"),
    "two classes": ([*IMAGES, "--task=binary"], "3 classes, and binary classification needs two"),
    "held out": ([*ROWS, "--held_out=0.6"], "expected a share between 0 and 0.5"),
    "pretrained": ([*ROWS, "--pretrained"], "pretrained is for --timm and --torchvision"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_line_says_what_to_do(here, case, capsys):
    arguments, message = WRONG[case]
    assert main(["fit", *arguments, "--output=posterior.safetensors", "--progress=false"]) == 2
    captured = capsys.readouterr()
    line = captured.err.splitlines()[-1]
    assert line.startswith("laplace-debias: error: ")
    assert message in line
    assert not (here / "posterior.safetensors").exists()


ARCHIVES = {
    "no y": ({"x_train": np.zeros((4, 4))}, "no y_train and no x_test and no y_test"),
    "lengths": (bring.arrays() | {"y_test": np.arange(3)}, "x has 9 rows, y 3"),
    "nan": (bring.arrays() | {"x_val": np.full((12, 4), np.nan)}, "48 numbers that are NaN"),
    "text": (
        bring.arrays() | {"y_train": np.array(["a"] * 30)},
        "is of type <U1; expected numbers",
    ),
    "objects": ({"x": np.array([None, 1])}, "holds Python objects, which are not read"),
    "shapes": (
        bring.arrays() | {"x_test": np.zeros((9, 5))},
        "the inputs of x_test have shape [5]",
    ),
    "negative": (bring.arrays() | {"y_train": np.arange(30) - 1}, "expected class numbers 0, 1"),
    "empty": (
        bring.arrays() | {"x_test": np.zeros((0, 4)), "y_test": np.zeros(0, int)},
        "at least one",
    ),
    "few": ({"x": np.zeros((2, 4)), "y": np.arange(2)}, "too few to hold out"),
}


@pytest.mark.parametrize("case", ARCHIVES)
def test_archives_that_cannot_be_used(here, case, capsys):
    content, message = ARCHIVES[case]
    bring.archive(here / "bad.npz", **content)
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
    bring.loose_images(root)


FOLDERS = {
    "class missing": (_without_class, "images/test has no class folder dog"),
    "class more": (lambda r: bring.loose_images(r / "test" / "fox"), "unknown classes fox"),
    "class empty": (_empty_class, "images/train/eel has no images"),
    "part missing": (lambda root: (root / "test").rename(root / "tset"), "no test/"),
    "no classes": (_loose, "images has no class folders"),
}


@pytest.mark.parametrize("case", FOLDERS)
def test_folders_that_cannot_be_used(here, case, capsys):
    spoil, message = FOLDERS[case]
    spoil(here / "images")
    arguments = ["--model=nets:build", "--data=images", "--output=p.safetensors"]
    assert main(["fit", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_an_error_nobody_foresaw_is_a_line_too(here, capsys, monkeypatch):
    from laplace_debias.commands import fit

    def breaks(settings):
        raise RuntimeError("out of\nmemory")

    monkeypatch.setattr(fit, "run", breaks)
    arguments = ["fit", *ROWS, "--output=p.safetensors"]
    assert main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == ("laplace-debias: error: RuntimeError: out of memory; --traceback shows where")
    assert main([*arguments, "--traceback"]) == 2
    error = capsys.readouterr().err
    assert "Traceback" in error
    assert "in breaks" in error


def test_settings_are_checked_without_the_command_line():
    with pytest.raises(ValueError, match="batch_size is 0"):
        SourceSettings(model="nets:rows", batch_size=0)
