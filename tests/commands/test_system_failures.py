"""Disks that are full or read-only, workers that die: one line that says what to do."""

import os
import subprocess
from multiprocessing import active_children

import pytest
import user_files
from command_tasks import together

from laplace_debias.cli import main

NETWORKS = (
    user_files.NETWORKS
    + """
import os
import signal

from torch.utils.data import TensorDataset, get_worker_info


def wide():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 200), nn.Tanh(), nn.Linear(200, 3))


class Bad(TensorDataset):
    def __init__(self, how):
        super().__init__(torch.randn(40, 4), torch.arange(40) % 3)
        self.how = how

    def __getitem__(self, index):
        if self.how is not None and get_worker_info() is not None:
            if self.how == "raise":
                raise OSError(f"image {index} cannot\\\\nbe read")
            os.kill(os.getpid(), getattr(signal, self.how))
        return super().__getitem__(index)


def parts(how):
    held = TensorDataset(*Bad(None)[:9])
    return {"train": Bad(how), "validation": held, "test": held}


def raising():
    return parts("raise")


def killed():
    return parts("SIGKILL")


def crashing():
    return parts("SIGSEGV")
"""
)
SOURCE = ["--model=nets:rows", "--device=cpu", "--progress=false"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    (tmp_path / "nets.py").write_text(NETWORKS)
    monkeypatch.chdir(tmp_path)
    user_files.forget(monkeypatch, "nets")
    user_files.archive(tmp_path / "d.npz")
    return tmp_path


@pytest.fixture
def disk(tmp_path):
    """Makes a file system of a size, or changes it: `disk("size=60k")`, `disk("ro")`."""
    place = tmp_path / "disk"
    place.mkdir()
    is_there = False

    def mounted(options):
        nonlocal is_there
        how = f"remount,{options}" if is_there else options
        mount = ["mount", "-t", "tmpfs", "-o", how, "tmpfs", str(place)]
        if os.name == "nt" or subprocess.run(mount, capture_output=True, check=False).returncode:
            pytest.skip("file systems cannot be mounted here")
        is_there = True
        return place

    yield mounted
    if is_there:
        subprocess.run(["umount", str(place)], check=True)


def only_line(capsys):
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("laplace-debias: error: ")
    return line.removeprefix("laplace-debias: error: ")


def no_work(*_, **__):
    raise AssertionError("the work has begun")


def test_a_read_only_folder_is_told_before_the_work(here, disk, monkeypatch, capsys):
    data = [*SOURCE, "--data=d.npz"]
    assert main(["fit", *data, "--output=p.safetensors"]) == 0
    run = [*data, "--methods=[]"]
    place = disk("size=8m")
    assert main(["report", *run, f"--output={place}/run"]) == 0
    disk("ro")
    capsys.readouterr()
    monkeypatch.setattr("laplace_debias.sources.loading.load", no_work)
    monkeypatch.setattr("laplace_debias.report.page.write_page", no_work)
    saved = "--posterior=p.safetensors"
    for command in (
        ["fit", *data, f"--output={place}/new/p.safetensors"],
        ["fit", *data, "--output=q.safetensors", f"--resume={place}/state"],
        ["tune", *data, saved, f"--output={place}/q.safetensors"],
        ["predict", *data, saved, f"--output={place}/q.csv"],
        ["spectrum", *data, f"--output={place}/spectrum"],
        ["report", *data, f"--output={place}/other"],
        ["report", f"--from={place}/run"],
    ):
        assert main(command) == 2
        line = only_line(capsys)
        assert str(place) in line, line
        assert "is write-protected. Choose a different folder, or change its permissions" in line


def test_a_full_disk_leaves_no_half_file_and_says_what_to_do(here, disk, capsys):
    place = disk("size=60k")
    data = ["--model=nets:wide", "--data=d.npz", "--device=cpu", "--progress=false"]
    posterior = place / "p.safetensors"
    assert main(["fit", *data, f"--output={posterior}"]) == 2
    told = f"{posterior} cannot be written (No space left on device). Choose a different"
    assert told in only_line(capsys)
    assert list(place.iterdir()) == []
    disk("size=8m")
    assert main(["fit", *data, f"--output={posterior}"]) == 0
    whole = posterior.read_bytes()
    # Now there is room for it alone: it stays as it is.
    filled = place / "filled"
    disk("size=600k")
    free = os.statvfs(place)
    filled.write_bytes(bytes(free.f_bavail * free.f_frsize))
    capsys.readouterr()
    saved = f"--posterior={posterior}"
    for command in (
        ["tune", *data, saved],
        ["predict", *data, saved, f"--output={place}/q.csv"],
        ["predict", *data, saved, f"--output={place}/q.parquet"],
    ):
        assert main(command) == 2
        assert "cannot be written (No space left on device)" in only_line(capsys)
        assert sorted(path.name for path in place.iterdir()) == ["filled", "p.safetensors"]
        assert posterior.read_bytes() == whole


def test_a_warning_is_a_line_without_a_place_in_the_source(here, processes):
    """The noise was never given: a fit warns of it."""
    (here / "lines.py").write_text(
        "import numpy\nimport torch\nfrom torch import nn\n\n\n"
        "def build():\n    return nn.Linear(4, 1)\n\n\n"
        "def data():\n    x = torch.randn(30, 4)\n    pairs = [(x, x.sum(1, keepdim=True))]\n"
        "    return {'train': torch.utils.data.TensorDataset(*pairs[0]), 'test': pairs}\n"
    )
    fit = ["fit", "--model=lines:build", "--data=lines:data", "--output=p.safetensors"]
    (done,) = together(processes, 1, here, *fit, "--progress=false")
    assert done.status == 0
    (line,) = done.err.splitlines()
    assert line.startswith("Warning: ")
    assert "sigma" in line
    assert ".py" not in line


@pytest.mark.parametrize(
    ("data", "parts"),
    [
        ("killed", ["DataLoader worker (pid", "fewer --workers", "/dev/shm"]),
        ("crashing", ["DataLoader worker (pid", "or it crashed", "--workers=0"]),
        ("raising", ["The data set failed", "OSError: image", "--workers=0 --traceback"]),
    ],
)
def test_a_worker_that_dies_is_told_with_what_to_do(here, data, parts, capfd):
    fit = ["fit", *SOURCE, f"--data=nets:{data}", "--workers=1", "--output=p.safetensors"]
    others = active_children()
    assert main(fit) == 2
    # One that raises waits for more work, and torch five seconds for it.
    for worker in set(active_children()).difference(others):
        worker.terminate()
    # torch's own words of a crash come before, without an end of line.
    printed = capfd.readouterr().err
    (line,) = (
        line for line in printed.replace("\0", "").splitlines() if "-debias: error: " in line
    )
    for part in parts:
        assert part in line
    assert not (here / "p.safetensors").exists()
