"""Posterior files that are damaged, forged, unreadable or unwritable; writers that are killed."""

import contextlib
import errno
import hashlib
import json
import multiprocessing
import os
import resource
import signal
import tempfile
from pathlib import Path

import pytest
import same_numbers
import torch
from csv_table import read_csv
from fuzz_posterior_files import answers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from laplace_debias import Laplace
from laplace_debias.cli import main
from laplace_debias.report.tables import write_csv
from laplace_debias.system.files import read_sealed, write_sealed, written_atomically

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))


def fitted(width: int = 3, seed: int = 0) -> Laplace:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 3)).eval()
    x = torch.randn(8, 4)
    y = torch.randint(3, (8,))
    return Laplace(model).fit_batches([(x, y)], num_data=40)


@pytest.fixture
def la() -> Laplace:
    return fitted()


@pytest.fixture
def path(la, tmp_path) -> Path:
    """A saved posterior."""
    la.save(tmp_path / "posterior.safetensors")
    return tmp_path / "posterior.safetensors"


def assert_alike(a: Laplace, b: Laplace) -> None:
    """Two posteriors have the same tensors, and predict the same up to rounding.

    Predictions are rounded differently, because matrices may lie transposed in memory.
    """
    assert (a.num_data, a.block_names) == (b.num_data, b.block_names)
    assert torch.equal(a.mean, b.mean)
    assert torch.equal(a.prior_precision, b.prior_precision)
    for name, block_a in a.posterior.curvature.blocks.items():
        block_b = b.posterior.curvature.blocks[name]
        assert type(block_a) is type(block_b)
        for attribute in ("U_G", "U_A", "U", "magnitudes"):
            tensor_a = getattr(block_a, attribute, None)
            tensor_b = getattr(block_b, attribute, None)
            assert tensor_a is tensor_b is None or torch.equal(tensor_a, tensor_b)
    for answer_a, answer_b in zip(answers(a, X), answers(b, X), strict=True):
        torch.testing.assert_close(answer_a, answer_b)


@contextlib.contextmanager
def file_size_limit(num_bytes: int):
    """Let no file grow beyond a size, as if the disk were full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextlib.contextmanager
def not_root():
    """Act as a user without privileges, for whom permissions hold."""
    if os.getuid() != 0:
        yield
        return
    os.setresuid(65534, 65534, 0)
    try:
        yield
    finally:
        os.setresuid(0, 0, 0)


# ------------------------------------------------------------------------- what is in the file


def test_the_safetensors_library_reads_the_file(la, path):
    tensors = load_file(path)
    blocks = list(la.posterior.curvature.blocks.values())
    attributes = ("U_G", "U_A", "magnitudes", "trace_A")
    block_keys = {f"{number}.{attribute}" for number in range(4) for attribute in attributes}
    assert tensors.keys() == {"mean", "prior_precision"} | block_keys
    assert torch.equal(tensors["mean"], la.mean)
    assert torch.equal(tensors["0.U_A"], blocks[0].U_A)
    assert torch.equal(tensors["2.magnitudes"], blocks[2].magnitudes)


def test_the_checksum_is_that_of_the_file_with_zeros_in_its_place(path):
    with safe_open(path, "pt") as file:
        checksum = file.metadata()["checksum"]
    raw = path.read_bytes()
    assert raw.count(checksum.encode()) == 1
    blank = raw.replace(checksum.encode(), b"0" * 64)
    assert hashlib.blake2b(blank, digest_size=32).hexdigest() == checksum


def test_equal_posteriors_give_equal_bytes(la, path, tmp_path):
    for name in ("second", "third"):
        Laplace.load(path, la.model).save(tmp_path / name)
        assert (tmp_path / name).read_bytes() == path.read_bytes()


def test_tensors_of_any_shape_survive(tmp_path):
    """A low-rank curvature may have no directions."""
    shapes = [(), (0,), (5, 0), (0, 5), (3,), (2, 3)]
    tensors = {f"{n}": torch.randn(shape).to(torch.float64) for n, shape in enumerate(shapes)}
    tensors |= {f"{n}.transposed": torch.randn(shape).mT for n, shape in enumerate(shapes[2:3])}
    texts = {"format": "a", "header": '"checksum":"' + "0" * 64 + '"}'}
    write_sealed(tmp_path / "file", texts, tensors)
    texts_read, tensors_read = read_sealed(tmp_path / "file")
    assert texts_read == texts
    for loaded in (tensors_read, load_file(tmp_path / "file")):
        assert loaded.keys() == tensors.keys()
        assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)


# -------------------------------------------------------------------- other versions and models


def change_file(path: Path, change) -> None:
    """Change the header or the tensors of a file, and write a valid checksum."""
    texts, tensors = read_sealed(path)
    header = json.loads(texts["header"])
    change(header, tensors)
    write_sealed(path, {**texts, "header": json.dumps(header)}, tensors)


def test_a_file_of_format_4_is_read():
    """The file was written by an earlier version; the same fit gives the same numbers today."""
    model = same_numbers.with_parameters(same_numbers.convolutional(3))
    la = Laplace.load(Path(__file__).parents[1] / "data" / "posterior_format_4.safetensors", model)
    batches = same_numbers.images()
    refitted = Laplace(model, prior_precision=2.0)
    refitted.fit(same_numbers.loader(batches), generator=same_numbers.generator(5))
    assert (la.num_data, la.block_names) == (refitted.num_data, refitted.block_names)
    x = batches[2][0]
    torch.testing.assert_close(la.functional(x), refitted.functional(x), rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(la.log_marginal_likelihood(), refitted.log_marginal_likelihood())
    with pytest.raises(ValueError, match=r"factors of 0\.weight cannot be recovered.*earlier"):
        la.update([batches[2]])


def test_an_earlier_format_is_refused_with_what_to_do(la, path):
    texts, tensors = read_sealed(path)
    texts["format"] = "laplace-debias/3"
    write_sealed(path, texts, tensors)
    message = r"its format is 'laplace-debias/3'.* To convert .* with version 0\.2\.0"
    with pytest.raises(ValueError, match=message):
        Laplace.load(path, la.model)
    save_file(tensors, path, texts)
    message = r"it has no checksum.* To convert .* with version 0\.2\.0"
    with pytest.raises(ValueError, match=message):
        Laplace.load(path, la.model)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("0.magnitudes", lambda m: -m, "negative"),
        ("0.magnitudes", lambda m: m / 0, "NaN or Inf"),
        ("prior_precision", lambda d: 0 * d, "positive and finite"),
        ("mean", lambda m: m + 1, "since the fit: its parameters differ"),
        (
            "mean",
            lambda m: m.double(),
            r"in torch.float64, but the model is in torch.float32",
        ),
        ("mean", lambda m: m[:-2], r"has \d+ parameters, but .* of the model have \d+"),
    ],
)
def test_a_file_of_another_posterior_is_refused(la, path, name, change, message):
    change_file(path, lambda header, tensors: tensors.update({name: change(tensors.get(name))}))
    with pytest.raises(ValueError, match=message):
        Laplace.load(path, la.model)


# ------------------------------------------------------------------------------ what is no file


@pytest.fixture
def in_time():
    """Interrupt a test that hangs."""

    def interrupt(*_):
        raise TimeoutError("it hangs")

    previous_handler = signal.signal(signal.SIGALRM, interrupt)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, previous_handler)


class Renamed(nn.Module):
    """The layers of `fitted` under other names."""

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.hidden, self.activation, self.head = layers

    def forward(self, x):
        return self.head(self.activation(self.hidden(x)))


@pytest.mark.parametrize("wrap", [Renamed, nn.Sequential])
def test_a_model_without_the_names_of_the_file_is_refused(la, path, wrap):
    with pytest.raises(
        ValueError, match=r"The posterior in the file is over .*'0\.bias'"
    ) as caught:
        Laplace.load(path, wrap(la.model).eval())
    assert "does not have them. Its parameters are" in str(caught.value)
    assert "`params`" not in str(caught.value)


def test_a_model_whose_parameters_are_frozen_is_refused(la, path):
    for frozen in (la.model[2], la.model):
        frozen.requires_grad_(False)
        with pytest.raises(ValueError, match=r"in the file .*'2\.bias'.* are frozen") as caught:
            Laplace.load(path, la.model)
        assert "`params`" not in str(caught.value)


@pytest.mark.usefixtures("in_time")
@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        ("nothing", FileNotFoundError, "The file .* does not exist. Check the path"),
        ("below a file", FileNotFoundError, "The file .* does not exist. Check the path"),
        ("dangling link", FileNotFoundError, "The file .* does not exist. Check the path"),
        ("folder", IsADirectoryError, r"is a folder. Pass the path of a file.*version 0\.2\.0"),
        ("pipe", ValueError, "a device or a pipe"),
        ("device", ValueError, "a device or a pipe"),
        ("empty", ValueError, "is damaged, or is not a posterior file"),
        ("text", ValueError, "is damaged, or is not a posterior file"),
        ("half", ValueError, "is damaged, or is not a posterior file"),
        ("checkpoint", ValueError, "it has no checksum"),
    ],
)
def test_what_is_no_posterior_is_told(la, path, tmp_path, kind, error, message):
    target = tmp_path / "target"
    if kind == "below a file":
        target = path / "posterior"
    elif kind == "dangling link":
        target.symlink_to(tmp_path / "gone")
    elif kind == "folder":
        target.mkdir()
    elif kind == "pipe":
        os.mkfifo(target)
    elif kind == "device":
        target = Path("/dev/zero")
    elif kind == "text":
        target.write_text("a posterior, by its name\n" * 100)
    elif kind == "half":
        target.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    elif kind == "checkpoint":
        save_file(la.model.state_dict(), target)
    elif kind == "empty":
        target.touch()
    with pytest.raises(error, match=message):
        Laplace.load(target, la.model)


def test_a_file_that_may_not_be_read_is_told(la):
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        path = Path(folder) / "posterior"
        la.save(path)
        path.chmod(0)
        with not_root(), pytest.raises(PermissionError, match=r"cannot be read .*permissions"):
            Laplace.load(path, la.model)


# ------------------------------------------------------------------------------- failing writes


def test_a_full_disk_is_told_and_the_old_file_stays(tmp_path):
    path = tmp_path / "posterior"
    fitted().save(path)
    content = path.read_bytes()
    large = fitted(width=150)
    with (
        file_size_limit(65536),
        pytest.raises(OSError, match=r"posterior cannot be written \(File too large\)"),
    ):
        large.save(path)
    assert path.read_bytes() == content
    assert [entry.name for entry in tmp_path.iterdir()] == ["posterior"]
    large.save(path)
    assert_alike(Laplace.load(path, large.model), large)


def test_the_error_of_another_file_is_left_as_it_is(tmp_path):
    with pytest.raises(FileNotFoundError) as caught, written_atomically(tmp_path / "copy"):
        (tmp_path / "original").read_bytes()
    assert caught.value.filename == str(tmp_path / "original")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_disk_that_is_full_at_the_end_is_told(la, path, call, monkeypatch):
    content = path.read_bytes()

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, call, full)
    la.prior_precision = 3.0
    message = r"posterior\.safetensors cannot be written \(No space left on device\). .*free some"
    with pytest.raises(OSError, match=message) as caught:
        la.save(path)
    assert caught.value.errno == errno.ENOSPC
    assert path.read_bytes() == content
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        ("folder", IsADirectoryError, "is a folder. Pass the path of a file in it"),
        ("below a file", NotADirectoryError, "is a file, not a folder"),
        ("no parent", FileNotFoundError, "The folder .* does not exist. Create it first"),
        ("pipe", OSError, "a device, a pipe or"),
        ("loop", OSError, "points back to itself"),
        ("long name", OSError, "cannot be written .*. Choose a different"),
    ],
)
def test_bad_targets_are_told_before_anything_is_written(la, tmp_path, kind, error, message):
    target = tmp_path / "target"
    if kind == "folder":
        target.mkdir()
    elif kind == "below a file":
        target.touch()
        target = target / "deeper" / "posterior"
    elif kind == "no parent":
        target = target / "posterior"
    elif kind == "pipe":
        os.mkfifo(target)
    elif kind == "loop":
        target.symlink_to(target)
    elif kind == "long name":
        target = tmp_path / ("a" * 250)
    paths = sorted(tmp_path.rglob("*"))
    with pytest.raises(error, match=message):
        la.save(target)
    assert sorted(tmp_path.rglob("*")) == paths


def test_what_may_not_be_written_is_told(la):
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755 if os.getuid() == 0 else 0o555)
        with not_root(), pytest.raises(PermissionError, match="is write-protected"):
            la.save(Path(folder) / "posterior")
        Path(folder).chmod(0o777)
        protected = Path(folder) / "protected"
        protected.touch()
        protected.chmod(0o444)
        with not_root(), pytest.raises(PermissionError, match="is write-protected"):
            la.save(protected)


def test_numbers_that_could_not_be_read_again_are_not_saved(la, tmp_path):
    object.__setattr__(la.fitted, "nll", float("inf"))
    with pytest.raises(ValueError, match="not JSON compliant"):
        la.save(tmp_path / "posterior")
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------- links, permissions, companions


def test_a_link_stays_and_its_file_is_replaced(la, tmp_path):
    (tmp_path / "store").mkdir()
    file = tmp_path / "store" / "kept"
    link = tmp_path / "link"
    link.symlink_to(file)
    for prior_precision in (1.0, 2.0):
        la.prior_precision = prior_precision
        la.save(link)
        assert link.is_symlink()
        assert not file.is_symlink()
        assert float(Laplace.load(file, la.model).prior_precision) == prior_precision
    assert sorted(tmp_path.rglob("*")) == [link, tmp_path / "store", file]


def test_a_replaced_file_keeps_its_permissions(la, path):
    path.chmod(0o640)
    la.save(path)
    assert path.stat().st_mode & 0o777 == 0o640


def be_killed_while_writing(path):
    with written_atomically(path) as temporary:
        temporary.write_bytes(b"half")
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_writer_leaves_what_was_there(la, path):
    content = path.read_bytes()
    context = multiprocessing.get_context("fork")
    writer = context.Process(target=be_killed_while_writing, args=(path,))
    writer.start()
    writer.join()
    assert writer.exitcode == -signal.SIGKILL
    assert path.read_bytes() == content
    la.save(path)
    assert_alike(Laplace.load(path, la.model), la)


def test_writers_of_one_path_do_not_meet(tmp_path):
    path = tmp_path / "file"
    with written_atomically(path) as outer:
        outer.write_text("outer")
        with written_atomically(path) as inner:
            assert outer.exists()
            inner.write_text("inner")
        assert path.read_text() == "inner"
    assert path.read_text() == "outer"
    assert list(tmp_path.iterdir()) == [path]


def test_tables_are_written_the_same_way(tmp_path, monkeypatch):
    table = tmp_path / "kept"
    link = tmp_path / "link"
    table.touch(0o600)
    table.chmod(0o600)
    link.symlink_to(table)
    synced = []
    monkeypatch.setattr(os, "fsync", synced.append)
    write_csv([{"a": 1}], link)
    assert read_csv(table)
    assert link.is_symlink()
    assert table.stat().st_mode & 0o777 == 0o600
    assert len(synced) == 1
    assert sorted(tmp_path.iterdir()) == [table, link]


# ------------------------------------------------------------------------------ the command line

SOURCE = [
    *("--model=examples.paper.networks:digits_net", "--data=examples.paper.data:digits_parts"),
    *("--device=cpu", "--progress=false"),
]


def one_line(capsys) -> str:
    """The single line that a command printed as its error."""
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1
    assert "Traceback" not in printed
    return printed


@pytest.mark.parametrize("command", ["fit", "tune"])
@pytest.mark.parametrize("output_kind", ["folder", "below a file"])
def test_commands_refuse_a_bad_output_before_work(
    path, tmp_path, output_kind, command, capsys, monkeypatch
):
    def work(*_):
        raise AssertionError("work was done")

    monkeypatch.setattr("laplace_debias.sources.loading.load", work)
    if output_kind == "folder":
        output = tmp_path
        message = "is a folder"
    else:
        output = path / "posterior"
        message = "is a file, not a folder"
    options = [*SOURCE, f"--output={output}", "--overwrite"]
    if command == "tune":
        options += [f"--posterior={path}", "--method=marglik"]
    assert main([command, *options]) == 2
    assert message in one_line(capsys)


def test_tune_refuses_a_damaged_posterior_before_work(path, capsys, monkeypatch):
    monkeypatch.setattr("laplace_debias.sources.loading.load", None)
    path.write_bytes(path.read_bytes()[:-1])
    assert main(["tune", *SOURCE, f"--posterior={path}"]) == 2
    assert "damaged" in one_line(capsys)
