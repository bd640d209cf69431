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


def load_on_cpu(**options):
    settings = {"model": "nets:build", "device": "cpu", "progress": False, **NORMAL, **options}
    return load(SourceSettings(**settings))


def as_pixels(loaded, batches):
    """The inputs of batches as pictures for people, `[N, H, W, 3]`."""
    x, _ = every(batches)
    return torch.stack([loaded.picture(image) for image in x])


def test_corruptions_are_those_of_the_pixels(images):
    loaded = load_on_cpu(data=images, corruptions=(5, 2), batch_size=4)
    assert list(loaded.shifts) == [2, 5]
    clean = as_pixels(loaded, loaded.test).permute(0, 3, 1, 2)
    for severity, batches in loaded.shifts.items():
        expected = corrupt(clean, severity, seed=0).permute(0, 2, 3, 1)
        assert torch.equal(as_pixels(loaded, batches), expected)
        assert torch.equal(as_pixels(loaded, batches), expected)  # read a second time
    assert torch.equal(every(loaded.shifts[5])[1], every(loaded.test)[1])
    other_seed = load_on_cpu(data=images, corruptions=(5,), seed=1)
    assert not torch.equal(
        as_pixels(other_seed, other_seed.shifts[5]), as_pixels(loaded, loaded.shifts[5])
    )


def list_patches(image):
    """The patches of 4 × 5 pixels of an image of 16 × 20, as bytes, row by row."""
    return [patch.numpy().tobytes() for row in image.split(4, 0) for patch in row.split(5, 1)]


def test_patches_change_places_and_nothing_else(images):
    loaded = load_on_cpu(data=images, ood={"patches": "builtin:patches"})
    clean = as_pixels(loaded, loaded.test)
    moved = as_pixels(loaded, loaded.ood["patches"])
    assert not torch.equal(clean, moved)
    permutations = set()
    for clean_image, moved_image in zip(clean, moved, strict=True):
        clean_patches = list_patches(clean_image)
        moved_patches = list_patches(moved_image)
        assert sorted(clean_patches) == sorted(moved_patches)
        permutations.add(tuple(clean_patches.index(patch) for patch in moved_patches))
    # Each image is permuted in its own way.
    assert len(permutations) == len(clean)


def test_digits_are_drawn_at_the_size_of_the_images(images):
    loaded = load_on_cpu(data=images, ood={"d": "builtin:digits"}, ood_examples=50)
    pictures = as_pixels(loaded, loaded.ood["d"])
    assert pictures.shape == (50, 16, 20, 3)
    assert torch.equal(pictures[..., 0], pictures[..., 2])
    from sklearn.datasets import load_digits

    small = torch.nn.functional.adaptive_avg_pool2d(pictures[..., 0].double(), (8, 8))
    digits = torch.from_numpy(load_digits().images) * 255 / 16
    nearest = torch.cdist(small.flatten(1), digits.flatten(1)).min(1).values
    # Drawing at twice the size and averaging blurs a little; other digits are far away.
    typical = torch.cdist(digits[:50].flatten(1), digits[50:100].flatten(1)).mean()
    assert float(nearest.mean()) < 0.5 * float(typical)


def test_folders_of_other_sizes_are_resized_and_it_is_said(images):
    folder = user_files.loose_images(images / "loose")
    loaded = load_on_cpu(data=images, ood={"loose": str(folder)})
    assert "ood loose: images of 9 × 12 pixels are resized to 16 × 20." in loaded.notes
    pictures = as_pixels(loaded, loaded.ood["loose"])
    from PIL import ImageOps

    with Image.open(folder / "2.png") as image:
        expected = ImageOps.fit(image.convert("RGB"), (20, 16), Image.Resampling.BILINEAR)
    assert np.array_equal(pictures[2].numpy(), np.asarray(expected))


def test_archives_of_bytes_and_of_floats(images):
    rng = np.random.default_rng(0)
    pixels = rng.integers(256, size=(4, 16, 20, 3), dtype=np.uint8)
    np.savez(images / "same.npz", x=pixels)
    floats = rng.normal(size=(4, 3, 16, 20))
    np.savez(images / "floats.npz", x_test=floats)
    names = ("same", "floats")
    loaded = load_on_cpu(data=images, ood={name: str(images / f"{name}.npz") for name in names})
    assert np.array_equal(as_pixels(loaded, loaded.ood["same"]).numpy(), pixels)
    np.testing.assert_allclose(every(loaded.ood["floats"])[0], floats, rtol=1e-6, atol=1e-6)


def test_limits_are_at_most(images):
    folder = user_files.loose_images(images / "loose")
    loaded = load_on_cpu(
        data=images,
        ood={"loose": str(folder), "d": "builtin:digits", "p": "builtin:patches"},
        ood_examples=6,
    )
    sizes = {name: len(every(ood)[0]) for name, ood in loaded.ood.items()}
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
        load_on_cpu(data=images, ood=ood)


def test_rows_have_no_corruptions(images):
    user_files.archive(images / "d.npz")
    options = {"model": "nets:rows", "data": images / "d.npz", "mean": None, "std": None}
    for change in ({"corruptions": (1,)}, {"ood": {"p": "builtin:patches"}}):
        with pytest.raises(ValueError, match="needs images and their normalisation"):
            load_on_cpu(**options, **change)
