"""Properties of the test problems: data, corruptions, networks, checkpoints, training."""

import io
import os
import tarfile
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader

from laplace_debias.problems.corruptions import (
    ALL_KINDS,
    BENCHMARK_KINDS,
    KINDS,
    corrupt,
    random_corruption,
)
from laplace_debias.problems.data import (
    CIFAR10_CLASSES,
    CIFAR10_MEAN,
    CIFAR10_STD,
    ImageDataset,
    cifar10,
    digits,
)
from laplace_debias.problems.models import all_cnn_c, digits_net, load_checkpoint
from laplace_debias.problems.recipe import ALLCNNC_CIFAR10_RECIPE, DIGITS_RECIPE, Recipe
from laplace_debias.problems.training import save_checkpoint, train


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def smooth_colour_images(n: int) -> torch.Tensor:
    """Structure at several scales, the finer the weaker, as photographs have it."""
    images = torch.full((n, 3, 32, 32), 0.5)
    for size in (4, 7, 12, 20):
        grid = torch.randn(n, 3, size, size, generator=seeded(size))
        images += 0.5 / size * nn.functional.interpolate(grid, (32, 32), mode="bicubic")
    return (255 * images.clamp(0, 1)).round().to(torch.uint8)


GREY = digits().test.images[:60]
COLOUR = smooth_colour_images(40)


# --- corruptions ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [None, *ALL_KINDS])
@pytest.mark.parametrize("images", [GREY[:12], COLOUR[:12]], ids=["grey", "colour"])
def test_corruption_does_not_depend_on_the_batch(images, kind):
    if kind == "saturate" and images.shape[1] == 1:
        pytest.skip("grey images have no saturation")
    whole = corrupt(images, 3, kind, seed=7)
    parts = [corrupt(images[a : a + 5], 3, kind, seed=7, offset=a) for a in range(0, 12, 5)]
    assert torch.equal(whole, torch.cat(parts))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("images", [GREY, COLOUR], ids=["grey", "colour"])
def test_severity_raises_the_distance_to_the_clean_image(images, kind):
    distances = [
        (corrupt(images, severity, kind).float() - images.float()).abs().mean().item()
        for severity in range(1, 6)
    ]
    assert distances[0] > 0
    assert distances[4] > 1.2 * distances[0]
    # Two kinds have near ties: motion blur 3 and 4 differ in a negligible tail alone, and eight
    # pixels leave `pixelate` three levels.
    slack = 0.9 if kind == "pixelate" else 0.99
    assert all(b > slack * a for a, b in pairwise(distances))


@pytest.mark.slow
def test_mixed_corruption_gives_each_image_one_of_the_kinds_evenly():
    images = COLOUR[:1].expand(520, -1, -1, -1)
    mixed = corrupt(images, 4, seed=1)
    counts = dict.fromkeys(KINDS, 0)
    for kind in KINDS:
        alone = corrupt(images, 4, kind, seed=1)
        counts[kind] = int((mixed == alone).flatten(1).all(1).sum())
    assert sum(counts.values()) == 520
    # 520 draws over 13 kinds: 40 ± 6 each.
    assert min(counts.values()) > 15
    assert max(counts.values()) < 65


@pytest.mark.parametrize("kind", ["gaussian_noise", "shot_noise", "impulse_noise", "fog"])
def test_seed_and_position_change_random_corruptions(kind):
    twice = COLOUR[:1].expand(2, -1, -1, -1)
    result = corrupt(twice, 3, kind, seed=0)
    assert not torch.equal(result[0], result[1])
    assert not torch.equal(result, corrupt(twice, 3, kind, seed=1))
    assert torch.equal(result, corrupt(twice, 3, kind, seed=0))


def test_noise_has_the_benchmarks_standard_deviation():
    grey = torch.full((20, 1, 32, 32), 128, dtype=torch.uint8)
    noise = corrupt(grey, 5, "gaussian_noise").float() / 255 - 128 / 255
    assert noise.std().item() == pytest.approx(0.10, rel=0.02)
    shot = corrupt(grey, 5, "shot_noise").float() / 255 - 128 / 255
    assert shot.std().item() == pytest.approx((128 / 255 / 50) ** 0.5, rel=0.02)


@pytest.mark.parametrize("kind", ["gaussian_blur", "defocus_blur", "motion_blur", "zoom_blur"])
def test_blurs_leave_a_constant_image_alone(kind):
    constant = torch.full((2, 3, 16, 16), 77, dtype=torch.uint8)
    assert torch.equal(corrupt(constant, 5, kind), constant)


@pytest.mark.slow
def test_random_corruption_takes_one_of_the_benchmarks_kinds_whatever_the_batch_and_severity():
    images = COLOUR[:1].expand(150, -1, -1, -1)
    alone = {kind: corrupt(images, 2, kind, seed=4) for kind in BENCHMARK_KINDS}
    harder = {kind: corrupt(images, 5, kind, seed=4) for kind in BENCHMARK_KINDS}

    def kinds_of(mixed, single) -> list[set[str]]:
        return [{k for k, v in single.items() if torch.equal(v[n], mixed[n])} for n in range(150)]

    found = kinds_of(random_corruption(images, 2, seed=4), alone)
    assert all(len(kinds) == 1 for kinds in found)
    assert set.union(*found) == set(BENCHMARK_KINDS)
    assert kinds_of(random_corruption(images, 5, seed=4), harder) == found
    assert kinds_of(random_corruption(images, 2, seed=5), alone) != found
    parts = [random_corruption(images[a : a + 64], 2, 4, offset=a) for a in range(0, 150, 64)]
    assert torch.equal(torch.cat(parts), random_corruption(images, 2, seed=4))
    one = random_corruption(images, 2, seed=4, kinds=["fog"])
    assert torch.equal(one, corrupt(images, 2, "fog", seed=4))


def test_glass_blur_moves_pixels_by_one_and_invents_none():
    image = torch.arange(16 * 16, dtype=torch.uint8).reshape(1, 1, 16, 16)
    # At severity 1 the Gaussian's weights off the centre vanish, so what is left is a shuffle.
    moved = corrupt(image, 1, "glass_blur")
    assert torch.equal(moved.flatten().sort().values, image.flatten())
    assert not torch.equal(moved, image)


def test_elastic_transform_bends_the_image_but_keeps_its_colours():
    ramp = torch.linspace(0, 255, 32).round().to(torch.uint8).expand(4, 3, 32, 32).contiguous()
    bent = corrupt(ramp, 5, "elastic_transform")
    # The ramp runs along the columns alone; bent, its rows differ.
    assert (bent[:, :, 0].int() - bent[:, :, 20].int()).abs().max() > 3
    assert torch.equal(bent[:, 0], bent[:, 1])
    constant = torch.full((2, 3, 32, 32), 99, dtype=torch.uint8)
    assert torch.equal(corrupt(constant, 5, "elastic_transform"), constant)


@pytest.mark.parametrize("kind", ["snow", "frost"])
def test_snow_and_frost_brighten_dark_images_ever_more(kind):
    dark = torch.full((20, 3, 32, 32), 20, dtype=torch.uint8)
    means = [corrupt(dark, severity, kind).float().mean().item() for severity in (1, 2, 4)]
    assert 20 < means[0] < means[1] < means[2]


def test_saturate_scales_the_saturation_and_keeps_the_value():
    image = torch.tensor([40, 80, 100], dtype=torch.uint8)[None, :, None, None].expand(1, 3, 4, 4)
    for severity, saturation in ((1, 0.3 * 0.6), (2, 0.1 * 0.6), (5, 1.0)):
        red, green, blue = corrupt(image, severity, "saturate").float()[0, :, 0, 0]
        assert blue == 100
        assert red.item() == pytest.approx(100 * (1 - saturation), abs=0.51)
        # The hue: where the middle channel lies between the others.
        assert green.item() == pytest.approx(100 * (1 - saturation / 3), abs=0.51)
    with pytest.raises(ValueError, match="no saturation"):
        corrupt(GREY[:1], 1, "saturate")


def test_brightness_keeps_the_ratio_of_the_channels():
    image = torch.tensor([40, 80, 100], dtype=torch.uint8)[None, :, None, None].expand(1, 3, 4, 4)
    brighter = corrupt(image, 3, "brightness").float()[0, :, 0, 0]
    assert torch.allclose(brighter / brighter[2], torch.tensor([0.4, 0.8, 1.0]), atol=0.01)
    assert brighter[2].item() == pytest.approx(100 + 0.15 * 255, abs=1)


def test_corruption_refuses_what_it_does_not_know():
    with pytest.raises(ValueError, match="did you mean 'gaussian_noise'"):
        corrupt(GREY[:1], 1, "gausian_noise")
    with pytest.raises(ValueError, match="severity 6"):
        corrupt(GREY[:1], 6)
    with pytest.raises(ValueError, match="did you mean 'snow'"):
        random_corruption(GREY[:1], 1, kinds=["fog", "snw"])
    with pytest.raises(ValueError, match="kinds is empty"):
        random_corruption(GREY[:1], 1, kinds=[])
    with pytest.raises(ValueError, match="2 channels"):
        corrupt(torch.zeros(1, 2, 8, 8, dtype=torch.uint8), 1)
    with pytest.raises(ValueError, match="seed -1"):
        corrupt(GREY[:1], 1, seed=-1)


@pytest.mark.slow
@pytest.mark.real
@pytest.mark.skipif(
    not {"LAPLACE_DEBIAS_CHECKPOINT", "LAPLACE_DEBIAS_DATA"} <= set(os.environ),
    reason="LAPLACE_DEBIAS_DATA and LAPLACE_DEBIAS_CHECKPOINT do not name CIFAR-10 and All-CNN-C",
)
def test_severity_raises_a_real_classifiers_error():
    model = all_cnn_c().eval()
    load_checkpoint(model, os.environ["LAPLACE_DEBIAS_CHECKPOINT"])
    test = cifar10(os.environ["LAPLACE_DEBIAS_DATA"], train=False)
    data = test.subset(torch.arange(40) * len(test) // 40)

    @torch.no_grad()
    def error(images: torch.Tensor) -> float:
        inputs, labels = data.with_images(images).tensors()
        return (model(inputs).argmax(1) != labels).float().mean().item()

    errors = [
        np.mean([error(corrupt(data.images, severity, kind)) for kind in BENCHMARK_KINDS])
        for severity in range(1, 6)
    ]
    assert all(b > a for a, b in pairwise([error(data.images), *errors]))


# --- data sets in memory -------------------------------------------------------------------------


def colour_dataset(n: int = 40, **changes) -> ImageDataset:
    labels = torch.arange(n) % 10
    dataset = ImageDataset(COLOUR[:n], labels, CIFAR10_MEAN, CIFAR10_STD, CIFAR10_CLASSES)
    return replace(dataset, **changes)


def test_images_are_normalised_channel_by_channel():
    dataset = colour_dataset()
    image, label = dataset[3]
    for channel in range(3):
        back = (image[channel] * CIFAR10_STD[channel] + CIFAR10_MEAN[channel]) * 255
        assert torch.allclose(back, COLOUR[3, channel].float(), atol=1e-3)
    assert label.item() == 3
    assert image.dtype == torch.float32


def test_digits_are_standardised():
    images, _ = digits().train.tensors()
    assert images.mean().item() == pytest.approx(0, abs=0.02)
    assert images.std().item() == pytest.approx(1, abs=0.02)


def test_items_batches_loaders_and_tensors_agree():
    dataset = colour_dataset()
    images, labels = dataset.tensors()
    loaded = list(DataLoader(dataset, batch_size=16))
    assert torch.equal(torch.cat([x for x, _ in loaded]), images)
    assert torch.equal(torch.cat([y for _, y in loaded]), labels)
    assert torch.equal(torch.stack([dataset[i][0] for i in range(40)]), images)
    subset = torch.utils.data.Subset(dataset, [5, 2])
    assert torch.equal(next(iter(DataLoader(subset, batch_size=2)))[0], images[[5, 2]])


def test_flips_mirror_about_half_of_the_images_and_repeat_with_the_seed():
    plain = colour_dataset()
    originals, _ = plain.tensors()
    fetched, _ = plain.augmented(True, False, seeded(3)).batch(range(40))
    mirrored = (fetched == originals.flip(3)).flatten(1).all(1)
    kept = (fetched == originals).flatten(1).all(1)
    assert torch.equal(mirrored, ~kept)
    assert 10 < mirrored.sum() < 30
    again, _ = plain.augmented(True, False, seeded(3)).batch(range(40))
    assert torch.equal(fetched, again)
    assert torch.equal(plain.augmented(True, False, seeded(3)).tensors()[0], originals)


def test_subset_keeps_the_order_and_refuses_what_is_not_there():
    dataset = colour_dataset()
    subset = dataset.subset([7, 1, 7])
    assert torch.equal(subset.tensors()[0], dataset.tensors()[0][[7, 1, 7]])
    assert subset.labels.tolist() == [7, 1, 7]
    with pytest.raises(ValueError, match="expected 0 … 39"):
        dataset.subset([40])


def test_digits_split_is_disjoint_complete_and_repeatable():
    split, again, other = digits(3), digits(3), digits(4)
    parts = [split.train, split.val, split.test]
    assert sum(len(part) for part in parts) == 1797
    from sklearn.datasets import load_digits

    everything = sorted(image.tobytes() for part in parts for image in part.images.numpy())
    raw = np.rint(load_digits().images * 255 / 16).astype(np.uint8)
    assert everything == sorted(image.tobytes() for image in raw)
    assert torch.equal(split.test.images, again.test.images)
    assert not torch.equal(split.test.images, other.test.images)


def test_datasets_that_do_not_fit_together_are_refused():
    # The shape checker of the tests, where it is on, comes before the check itself.
    with pytest.raises((ValueError, TypeError), match="39"):
        colour_dataset(labels=torch.zeros(39, dtype=torch.int64))
    with pytest.raises(ValueError, match="expected 0 … 9"):
        colour_dataset(labels=torch.full((40,), 10))
    with pytest.raises(ValueError, match="one mean and one std per channel"):
        colour_dataset(mean=(0.5,))
    with pytest.raises(ValueError, match="positive"):
        colour_dataset(std=(0.2, 0.0, 0.2))


# --- image folders and archives ------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny CIFAR-10: three training images and one test image a class."""
    rng = np.random.default_rng(0)
    root = tmp_path / "images"
    for split, count in (("train", 3), ("test", 1)):
        for name in CIFAR10_CLASSES:
            (root / split / name).mkdir(parents=True)
            for number in reversed(range(count)):
                pixels = rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(root / split / name / f"{number:04d}.png")
    return root


def archive(folder: Path, path: Path, prefix: str = "") -> Path:
    with tarfile.open(path, "w:xz") as tar:
        for part in ("test", "train"):
            tar.add(folder / part, arcname=prefix + part)
    return path


def test_images_come_by_class_then_by_file_name(folder, tmp_path):
    data = cifar10(folder, train=True, cache=tmp_path / "cache")
    assert data.labels.tolist() == [label for label in range(10) for _ in range(3)]
    for n, (label, number) in {0: (0, 0), 5: (1, 2), 28: (9, 1)}.items():
        with Image.open(folder / "train" / CIFAR10_CLASSES[label] / f"{number:04d}.png") as image:
            assert np.array_equal(data.images[n].permute(1, 2, 0).numpy(), np.asarray(image))


@pytest.mark.parametrize("prefix", ["", "some/where/"])
@pytest.mark.parametrize("train", [True, False])
def test_archive_and_folder_give_equal_data(folder, tmp_path, prefix, train):
    (tmp_path / "packed").mkdir()
    packed = archive(folder, tmp_path / "packed" / "cifar10.tar.xz", prefix)
    plain = cifar10(folder, train=train, cache=tmp_path / "a")
    for root in (packed, packed.parent):
        data = cifar10(root, train=train, cache=tmp_path / "b")
        assert torch.equal(data.images, plain.images)
        assert torch.equal(data.labels, plain.labels)


def test_cache_is_used_refreshed_and_survives_damage(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("LAPLACE_DEBIAS_CACHE", str(tmp_path / "cache"))
    first = cifar10(folder, train=True)
    (file,) = (tmp_path / "cache").iterdir()
    before = file.stat().st_mtime_ns
    assert torch.equal(cifar10(folder, train=True).images, first.images)
    assert file.stat().st_mtime_ns == before
    file.write_bytes(b"damaged")
    assert torch.equal(cifar10(folder, train=True).images, first.images)
    black = Image.fromarray(np.zeros((32, 32, 3), dtype=np.uint8))
    black.save(folder / "train" / "airplane" / "0000.png")
    assert cifar10(folder, train=True).images[0].max() == 0


def test_missing_and_unexpected_places_are_named(folder, tmp_path):
    cache = tmp_path / "cache"
    with pytest.raises(ValueError, match=r"nothing is at .*nowhere"):
        cifar10(tmp_path / "nowhere", train=True, cache=cache)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="does not hold CIFAR-10; expected train/"):
        cifar10(tmp_path / "empty", train=True, cache=cache)
    (tmp_path / "empty" / "train").mkdir()
    with pytest.raises(ValueError, match="no images in"):
        cifar10(tmp_path / "empty", train=True, cache=cache)
    for image in (folder / "train" / "frog").iterdir():
        image.unlink()
    with pytest.raises(ValueError, match=r"train/ has no images of \['frog'\]"):
        cifar10(folder, train=True, cache=cache)
    (folder / "train" / "frog").rmdir()
    (folder / "train" / "deer").rename(folder / "train" / "elk")
    with pytest.raises(ValueError, match=r"\['deer', 'frog'\] and unknown classes \['elk'\]"):
        cifar10(folder, train=True, cache=cache)
    assert not list(cache.glob("*"))


def test_missing_split_is_named(folder, tmp_path):
    (folder / "test").rename(tmp_path / "away")
    with pytest.raises(ValueError, match="has no test/"):
        cifar10(folder, train=False, cache=tmp_path / "cache")


def test_broken_and_misshapen_images_are_named(folder, tmp_path):
    image = folder / "train" / "cat" / "0001.png"
    intact = image.read_bytes()
    image.write_bytes(intact[:200])
    with pytest.raises(ValueError, match=r"train/cat/0001\.png is no readable image"):
        cifar10(folder, train=True, cache=tmp_path / "cache")
    Image.new("RGB", (32, 31)).save(image)
    with pytest.raises(ValueError, match=r"0001\.png has 31 × 32 pixels; expected 32 × 32"):
        cifar10(folder, train=True, cache=tmp_path / "cache")


def test_damaged_archives_are_refused(folder, tmp_path):
    packed = archive(folder, tmp_path / "cifar10.tar.xz")
    packed.write_bytes(packed.read_bytes()[:-3000])
    with pytest.raises(ValueError, match="damaged or not a tar archive"):
        cifar10(packed, train=True, cache=tmp_path / "cache")
    packed.write_bytes(b"not an archive")
    with pytest.raises(ValueError, match="damaged or not a tar archive"):
        cifar10(packed, train=True, cache=tmp_path / "cache")


def test_unwritable_cache_is_refused_before_decoding(folder, tmp_path):
    (tmp_path / "file").touch()
    (folder / "train" / "cat" / "0001.png").write_bytes(b"broken")
    with pytest.raises(ValueError, match="cannot write to the cache folder"):
        cifar10(folder, train=True, cache=tmp_path / "file" / "cache")


# --- checkpoints ---------------------------------------------------------------------------------


def test_checkpoint_round_trip_restores_weights_and_extras(tmp_path):
    model, other = digits_net(), digits_net()
    split = torch.arange(5)
    save_checkpoint(model, tmp_path / "new" / "net.safetensors", {"split.val": split})
    extra = load_checkpoint(other, tmp_path / "new" / "net.safetensors")
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True)
    )
    assert list(extra) == ["split.val"]
    assert torch.equal(extra["split.val"], split)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["net.safetensors"]


def test_checkpoints_that_do_not_belong_leave_the_model_alone(tmp_path):
    path = tmp_path / "net.safetensors"
    model = digits_net()
    before = {name: value.clone() for name, value in model.state_dict().items()}

    def refused(match: str) -> None:
        with pytest.raises(ValueError, match=match):
            load_checkpoint(model, path)
        assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())

    refused("no file at")
    save_checkpoint(digits_net(num_classes=7), path)
    refused(r"of another shape: 8\.weight: \[7, 32, 1, 1\] in the file, \[10, 32, 1, 1\]")
    save_file({k: v + 1 for k, v in before.items() if k != "2.bias"}, path)
    refused(r"missing from the file: 2\.bias")
    save_file({**{k: v + 1 for k, v in before.items()}, "12.weight": torch.ones(2)}, path)
    refused(r"unknown to the model: 12\.weight")
    path.write_bytes(path.read_bytes()[:-10])
    refused("damaged or not a safetensors file")
    buffer = io.BytesIO()
    torch.save(before, buffer)
    path.write_bytes(buffer.getvalue())
    refused("damaged or not a safetensors file")


def test_extras_named_like_parameters_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"\['class.weight'\] could be parameters"):
        save_checkpoint(digits_net(), tmp_path / "a", {"class.weight": torch.ones(10)})
    assert not (tmp_path / "a").exists()


def test_all_cnn_c_has_the_published_size_and_ends_in_the_mean_over_36_positions():
    model = all_cnn_c()
    assert sum(p.numel() for p in model.parameters()) == 1_369_738
    x = torch.randn(2, 3, 32, 32, generator=seeded())
    maps = model[:17](x)
    assert maps.shape[2:] == (6, 6)
    assert torch.allclose(model(x), maps.flatten(2).mean(2), atol=1e-6)


@pytest.mark.real
@pytest.mark.skipif(
    "LAPLACE_DEBIAS_CHECKPOINT" not in os.environ,
    reason="LAPLACE_DEBIAS_CHECKPOINT does not name the All-CNN-C checkpoint",
)
def test_published_checkpoint_fits_all_cnn_c():
    extra = load_checkpoint(all_cnn_c(), os.environ["LAPLACE_DEBIAS_CHECKPOINT"])
    indices = torch.cat([extra["split.train"], extra["split.val"]])
    assert torch.equal(indices.sort().values, torch.arange(50_000))


# --- training ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained() -> tuple[nn.Module, list[dict[str, float]]]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = digits_net()
    return model, train(model, digits().train, DIGITS_RECIPE, generator=seeded())


@pytest.mark.slow
def test_digits_recipe_reaches_its_accuracy_and_over_confidence(trained):
    model, history = trained
    images, labels = digits().test.tensors()
    with torch.no_grad():
        logits = model(images)
    loss = nn.functional.cross_entropy(logits, labels).item()
    assert (logits.argmax(1) == labels).float().mean() >= 0.96
    assert history[-1]["loss"] < 0.01
    assert loss > 10 * history[-1]["loss"]
    assert not model.training
    assert all(p.grad is None for p in model.parameters())


def test_training_repeats_with_the_seed():
    recipe = Recipe(batch_size=16, epochs=2, learning_rate=0.05, flips=True)
    data = digits().train.subset(range(100))
    results = []
    for seed in (0, 0, 1):
        model = digits_net()
        with torch.no_grad():
            for n, parameter in enumerate(model.parameters()):
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=seeded(n)))
        results.append((train(model, data, recipe, generator=seeded(seed)), model[0].weight))
    assert results[0][0] == results[1][0]
    assert torch.equal(results[0][1], results[1][1])
    assert not torch.equal(results[0][1], results[2][1])


def test_weight_decay_spares_biases_and_frozen_parameters():
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10), nn.Linear(10, 10))
    model[2].requires_grad_(False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    # The clipped gradient is negligible, so what moves is moved by the decay.
    recipe = Recipe(
        batch_size=100, epochs=1, learning_rate=0.1, momentum=0.0, weight_decay=1.0, clip_norm=1e-9
    )
    train(model, digits().train.subset(range(100)), recipe)
    after = model.state_dict()
    assert torch.allclose(after["1.weight"], 0.9 * before["1.weight"], atol=1e-6)
    assert torch.allclose(after["1.bias"], before["1.bias"], atol=1e-6)
    assert torch.equal(after["2.weight"], before["2.weight"])


def test_one_cycle_rises_to_its_peak_and_falls_to_nothing():
    rates = list(ALLCNNC_CIFAR10_RECIPE.rates(10))
    assert len(rates) == 440
    for cycle, peak in ((rates[:160], 0.04), (rates[160:], 0.05)):
        top = int(np.argmax(cycle))
        assert cycle[top] == pytest.approx(peak, rel=1e-3)
        assert top / len(cycle) == pytest.approx(0.3, abs=0.01)
        assert np.all(np.diff(cycle[:top]) > 0)
        assert np.all(np.diff(cycle[top:]) < 0)
        assert cycle[-1] < 1e-4 * peak


def test_every_field_of_a_recipe_changes_the_training():
    base = Recipe(batch_size=20, epochs=1, learning_rate=0.05)
    changes = {
        "batch_size": replace(base, batch_size=25),
        "epochs": replace(base, epochs=2),
        "learning_rate": replace(base, learning_rate=0.04),
        "cycles": replace(base, epochs=None, learning_rate=None, cycles=((1, 0.05),)),
        "optimizer": replace(base, optimizer="adam"),
        "momentum": replace(base, momentum=0.8),
        "nesterov": replace(base, nesterov=True),
        "weight_decay": replace(base, weight_decay=0.1),
        "clip_norm": replace(base, clip_norm=0.1),
        "milestones": replace(base, epochs=2, milestones=(1,)),
        "decay": replace(base, epochs=2, milestones=(1,), decay=0.5),
        "nadamw": replace(base, optimizer="nadamw"),
        "flips": replace(base, flips=True),
        "crops": replace(base, crops=True),
        "bfloat16": replace(base, bfloat16=True),
    }
    start = digits_net().state_dict()
    data = digits().train.subset(range(100))

    def outcome(recipe: Recipe) -> torch.Tensor:
        model = digits_net()
        model.load_state_dict(start)
        train(model, data, recipe, generator=seeded())
        return model[0].weight.detach()

    reference = outcome(base)
    assert torch.equal(reference, outcome(base))
    for name, recipe in changes.items():
        assert not torch.equal(reference, outcome(recipe)), name
    steps = [outcome(changes[name]) for name in ("epochs", "milestones", "decay")]
    assert not any(torch.equal(a, b) for a, b in pairwise(steps))


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({}, "expected epochs and learning_rate"),
        ({"epochs": 1}, "expected epochs and learning_rate"),
        ({"epochs": 1, "learning_rate": 0.1, "cycles": ((1, 0.1),)}, "or cycles alone"),
        ({"cycles": ((0, 0.1),)}, "0 epochs"),
        ({"cycles": ((1, 0.1),), "batch_size": 0}, "batch_size 0"),
        ({"cycles": ((1, 0.1),), "momentum": 1.0}, "momentum 1.0"),
        ({"cycles": ((1, 0.1),), "nesterov": True, "momentum": 0.0}, "nesterov needs"),
        ({"cycles": ((1, 0.1),), "clip_norm": 0.0}, "clip_norm 0.0"),
        ({"epochs": 3, "learning_rate": 0.1, "milestones": (2, 1)}, "milestones"),
        ({"epochs": 3, "learning_rate": 0.1, "milestones": (3,)}, "milestones"),
        ({"cycles": ((3, 0.1),), "milestones": (1,)}, "and no cycles"),
        ({"epochs": 3, "learning_rate": 0.1, "decay": 0.0}, "decay 0.0"),
    ],
)
def test_recipes_that_make_no_sense_are_refused(settings, match):
    with pytest.raises(ValueError, match=match):
        Recipe(**{"batch_size": 8, **settings})


def test_an_unknown_optimizer_is_refused(unchecked):
    with pytest.raises(ValueError, match="optimizer 'lion'; expected 'sgd', 'adam' or 'nadamw'"):
        Recipe(batch_size=8, epochs=1, learning_rate=0.1, optimizer="lion")


def test_training_refuses_empty_data_and_reports_divergence():
    data = digits().train.subset(range(40))
    recipe = Recipe(batch_size=8, epochs=3, learning_rate=1e6)
    with pytest.raises(ValueError, match="data set is empty"):
        train(digits_net(), data.subset([]), recipe)
    with pytest.raises(ValueError, match="no trainable parameters"):
        train(digits_net().requires_grad_(False), data, recipe)
    with pytest.raises(FloatingPointError, match="lower the learning rate"):
        train(digits_net(), data, recipe)
