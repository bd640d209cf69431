"""A full or read-only disk, or a worker that dies, ends in one line that says what to do."""

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
    def __init__(self, fault):
        super().__init__(torch.randn(40, 4), torch.arange(40) % 3)
        self.fault = fault

    def __getitem__(self, index):
        if self.fault is not None and get_worker_info() is not None:
            if self.fault == "raise":
                raise OSError(f"image {index} cannot\\\\nbe read")
            os.kill(os.getpid(), getattr(signal, self.fault))
        return super().__getitem__(index)


def bad_rows(fault):
    held_out = TensorDataset(*Bad(None)[:9])
    return {"train": Bad(fault), "validation": held_out, "test": held_out}


def raising():
    return bad_rows("raise")


def killed():
    return bad_rows("SIGKILL")


def crashing():
    return bad_rows("SIGSEGV")
"""
)
SOURCE = ["--model=nets:rows", "--device=cpu", "--progress=false"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "nets.py").write_text(NETWORKS)
    monkeypatch.chdir(tmp_path)
    user_files.forget(monkeypatch, "nets")
    user_files.archive(tmp_path / "d.npz")
    return tmp_path


@pytest.fixture
def disk(tmp_path):
    """A function that mounts a file system, or changes it: `disk("size=60k")`, `disk("ro")`."""
    folder = tmp_path / "disk"
    folder.mkdir()
    is_mounted = False

    def mount_or_change(options):
        nonlocal is_mounted
        if is_mounted:
            options = f"remount,{options}"
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
        if os.name == "nt" or subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("file systems cannot be mounted here")
        is_mounted = True
        return folder

    yield mount_or_change
    if is_mounted:
        subprocess.run(["umount", str(folder)], check=True)


def only_line(capsys):
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("laplace-debias: error: ")
    return line.removeprefix("laplace-debias: error: ")


def no_work(*_, **__):
    raise AssertionError("the work has begun")


def test_a_read_only_folder_is_told_before_the_work(folder, disk, monkeypatch, capsys):
    data = [*SOURCE, "--data=d.npz"]
    assert main(["fit", *data, "--output=p.safetensors"]) == 0
    run = [*data, "--methods=[]"]
    mounted = disk("size=8m")
    assert main(["report", *run, f"--output={mounted}/run"]) == 0
    disk("ro")
    capsys.readouterr()
    monkeypatch.setattr("laplace_debias.sources.loading.load", no_work)
    monkeypatch.setattr("laplace_debias.report.page.write_page", no_work)
    saved = "--posterior=p.safetensors"
    for command in (
        ["fit", *data, f"--output={mounted}/new/p.safetensors"],
        ["fit", *data, "--output=q.safetensors", f"--resume={mounted}/state"],
        ["tune", *data, saved, f"--output={mounted}/q.safetensors"],
        ["predict", *data, saved, f"--output={mounted}/q.csv"],
        ["spectrum", *data, f"--output={mounted}/spectrum"],
        ["report", *data, f"--output={mounted}/other"],
        ["report", f"--from={mounted}/run"],
    ):
        assert main(command) == 2
        line = only_line(capsys)
        assert str(mounted) in line, line
        assert "is write-protected. Choose a different folder, or change its permissions" in line


def test_a_full_disk_leaves_no_half_file_and_says_what_to_do(folder, disk, capsys):
    mounted = disk("size=60k")
    data = ["--model=nets:wide", "--data=d.npz", "--device=cpu", "--progress=false"]
    posterior = mounted / "p.safetensors"
    assert main(["fit", *data, f"--output={posterior}"]) == 2
    message = f"{posterior} cannot be written (No space left on device). Choose a different"
    assert message in only_line(capsys)
    assert list(mounted.iterdir()) == []
    disk("size=8m")
    assert main(["fit", *data, f"--output={posterior}"]) == 0
    content = posterior.read_bytes()
    # Now there is no room for another file: the posterior stays as it is.
    filled = mounted / "filled"
    disk("size=600k")
    free = os.statvfs(mounted)
    filled.write_bytes(bytes(free.f_bavail * free.f_frsize))
    capsys.readouterr()
    saved = f"--posterior={posterior}"
    for command in (
        ["tune", *data, saved],
        ["predict", *data, saved, f"--output={mounted}/q.csv"],
        ["predict", *data, saved, f"--output={mounted}/q.parquet"],
    ):
        assert main(command) == 2
        assert "cannot be written (No space left on device)" in only_line(capsys)
        assert sorted(path.name for path in mounted.iterdir()) == ["filled", "p.safetensors"]
        assert posterior.read_bytes() == content


def test_a_warning_is_a_line_without_a_place_in_the_source(folder, processes):
    """The fit warns that the noise was not specified."""
    (folder / "lines.py").write_text(
        "import numpy\nimport torch\nfrom torch import nn\n\n\n"
        "def build():\n    return nn.Linear(4, 1)\n\n\n"
        "def data():\n    x = torch.randn(30, 4)\n    pairs = [(x, x.sum(1, keepdim=True))]\n"
        "    return {'train': torch.utils.data.TensorDataset(*pairs[0]), 'test': pairs}\n"
    )
    fit = ["fit", "--model=lines:build", "--data=lines:data", "--output=p.safetensors"]
    (completed,) = together(processes, 1, folder, *fit, "--progress=false")
    assert completed.status == 0
    (line,) = completed.err.splitlines()
    assert line.startswith("Warning: ")
    assert "sigma" in line
    assert ".py" not in line


@pytest.mark.parametrize(
    ("data", "texts"),
    [
        ("killed", ["DataLoader worker (pid", "fewer --workers", "/dev/shm"]),
        ("crashing", ["DataLoader worker (pid", "or it crashed", "--workers=0"]),
        ("raising", ["The data set failed", "image 4 cannot", "--workers=0 --traceback"]),
    ],
)
def test_a_worker_that_dies_is_told_with_what_to_do(folder, data, texts, capfd):
    fit = ["fit", *SOURCE, f"--data=nets:{data}", "--workers=1", "--output=p.safetensors"]
    children_before = active_children()
    assert main(fit) == 2
    # A worker that raised waits for more work, and torch waits five seconds for the worker.
    for worker in set(active_children()).difference(children_before):
        worker.terminate()
    # Before it, torch prints its own message of a crash, without an end of line.
    printed = capfd.readouterr().err
    (line,) = (
        line for line in printed.replace("\0", "").splitlines() if "-debias: error: " in line
    )
    for text in texts:
        assert text in line
    assert not (folder / "p.safetensors").exists()
