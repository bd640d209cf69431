"""Out-of-distribution sets and corrupted test images."""

import numpy as np
import pytest
import torch
import user_files
from PIL import Image
from user_files import every

from laplace_debias.sources import SourceSettings, load
from laplace_debias.sources.corruptions import corrupt

NORMAL = {"mean": (0.5, 0.4, 0.3), "std": (0.2, 0.3, 0.4)}


@pytest.fixture
def images(tmp_path, monkeypatch):
    user_files.networks(tmp_path, monkeypatch)
    return user_files.image_folder(tmp_path / "images")


def loaded(**options):
    settings = {"model": "nets:build", "device": "cpu", "progress": False, **NORMAL, **options}
    return load(SourceSettings(**settings))


def as_pixels(found, batches):
    x, _ = every(batches)
    return torch.stack([found.picture(image) for image in x])


def test_corruptions_are_those_of_the_pixels(images):
    found = loaded(data=images, corruptions=(5, 2), batch_size=4)
    assert list(found.shifts) == [2, 5]
    clean = as_pixels(found, found.test).permute(0, 3, 1, 2)
    for severity, batches in found.shifts.items():
        expected = corrupt(clean, severity, seed=0).permute(0, 2, 3, 1)
        assert torch.equal(as_pixels(found, batches), expected)
        assert torch.equal(as_pixels(found, batches), expected)  # read a second time
    assert torch.equal(every(found.shifts[5])[1], every(found.test)[1])
    other = loaded(data=images, corruptions=(5,), seed=1)
    assert not torch.equal(as_pixels(other, other.shifts[5]), as_pixels(found, found.shifts[5]))


def test_patches_change_places_and_nothing_else(images):
    found = loaded(data=images, ood={"patches": "builtin:patches"})
    clean, moved = as_pixels(found, found.test), as_pixels(found, found.ood["patches"])
    assert not torch.equal(clean, moved)
    places = set()
    for before, after in zip(clean, moved, strict=True):
        # 16 × 20 pixels: patches of 4 × 5.
        old, new = (
            [p.numpy().tobytes() for row in image.split(4, 0) for p in row.split(5, 1)]
            for image in (before, after)
        )
        assert sorted(old) == sorted(new)
        places.add(tuple(old.index(patch) for patch in new))
    # Each image in its own way.
    assert len(places) == len(clean)


def test_digits_are_drawn_at_the_size_of_the_images(images):
    found = loaded(data=images, ood={"d": "builtin:digits"}, ood_examples=50)
    pictures = as_pixels(found, found.ood["d"])
    assert pictures.shape == (50, 16, 20, 3)
    assert torch.equal(pictures[..., 0], pictures[..., 2])
    from sklearn.datasets import load_digits

    small = torch.nn.functional.adaptive_avg_pool2d(pictures[..., 0].double(), (8, 8))
    known = torch.from_numpy(load_digits().images) * 255 / 16
    nearest = torch.cdist(small.flatten(1), known.flatten(1)).min(1).values
    # Drawing at twice the size and averaging blurs a little; other digits are far away.
    typical = torch.cdist(known[:50].flatten(1), known[50:100].flatten(1)).mean()
    assert float(nearest.mean()) < 0.5 * float(typical)


def test_folders_of_other_sizes_are_resized_and_it_is_said(images):
    folder = user_files.loose_images(images / "loose")
    found = loaded(data=images, ood={"loose": str(folder)})
    assert "ood loose: images of 9 × 12 pixels are resized to 16 × 20." in found.notes
    pictures = as_pixels(found, found.ood["loose"])
    from PIL import ImageOps

    with Image.open(folder / "2.png") as image:
        expected = ImageOps.fit(image.convert("RGB"), (20, 16), Image.Resampling.BILINEAR)
    assert np.array_equal(pictures[2].numpy(), np.asarray(expected))


def test_archives_of_bytes_and_of_floats(images):
    rng = np.random.default_rng(0)
    same = rng.integers(256, size=(4, 16, 20, 3), dtype=np.uint8)
    np.savez(images / "same.npz", x=same)
    floats = rng.normal(size=(4, 3, 16, 20))
    np.savez(images / "floats.npz", x_test=floats)
    names = ("same", "floats")
    found = loaded(data=images, ood={name: str(images / f"{name}.npz") for name in names})
    assert np.array_equal(as_pixels(found, found.ood["same"]).numpy(), same)
    np.testing.assert_allclose(every(found.ood["floats"])[0], floats, rtol=1e-6, atol=1e-6)


def test_limits_are_at_most(images):
    folder = user_files.loose_images(images / "loose")
    found = loaded(
        data=images,
        ood={"loose": str(folder), "d": "builtin:digits", "p": "builtin:patches"},
        ood_examples=6,
    )
    sizes = {name: len(every(ood)[0]) for name, ood in found.ood.items()}
    assert sizes == {"loose": 5, "d": 6, "p": 6}


@pytest.mark.parametrize(
    ("ood", "message"),
    [
        ({"x": "nowhere"}, "ood x: the path nowhere does not exist"),
        ({"x": "images/floats.npz"}, r"shape \[3, 8, 8\], but the network takes \[3, 16, 20\]"),
        ({"x": "images/bytes.npz"}, r"shape \[3, 8, 8\], but the network takes \[3, 16, 20\]"),
        ({"x": "images/none.npz"}, "must have an array x or x_test"),
        ({"x": "images/t.csv"}, "is a table, but the network was not trained on a table"),
        ({"x": "images/empty"}, "has no images"),
        ({"x": "builtin:digit"}, "unknown source builtin:digit. Use builtin:digits or"),
        ({"near:x": "images"}, "is not valid. Use only letters, digits"),
        ({"a/b": "images"}, "is not valid. Use only letters"),
    ],
)
def test_sets_that_cannot_be_used(images, ood, message):
    np.savez(images / "floats.npz", x=np.zeros((2, 3, 8, 8)))
    np.savez(images / "bytes.npz", x=np.zeros((2, 8, 8, 3), dtype=np.uint8))
    np.savez(images / "none.npz", a=np.zeros(2))
    (images / "t.csv").write_text("a\n1\n")
    (images / "empty").mkdir()
    with pytest.raises(ValueError, match=message):
        loaded(data=images, ood=ood)


def test_rows_have_no_corruptions(images):
    user_files.archive(images / "d.npz")
    options = {"model": "nets:rows", "data": images / "d.npz", "mean": None, "std": None}
    for change in ({"corruptions": (1,)}, {"ood": {"p": "builtin:patches"}}):
        with pytest.raises(ValueError, match="needs images and their normalisation"):
            loaded(**options, **change)
