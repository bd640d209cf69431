"""Corruptions of images after CIFAR-10-C, which do not depend on the batch."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn

from examples.paper.corruptions import BENCHMARK_KINDS
from laplace_debias.sources import corruptions
from laplace_debias.sources.corruptions import KINDS

ALL_KINDS = {**KINDS, **BENCHMARK_KINDS}


def corrupt(images, severity, kinds=None, seed=0, offset=0):
    """Corrupt images by the kind, or the kinds, of these names; None stands for the default."""
    if isinstance(kinds, str):
        kinds = [kinds]
    if kinds is not None:
        kinds = {kind: ALL_KINDS[kind] for kind in kinds}
    return corruptions.corrupt(images, severity, kinds, seed, offset)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def smooth_colour_images(n: int) -> torch.Tensor:
    """Make images with structure at several scales, weaker at finer ones, as in photographs."""
    images = torch.full((n, 3, 32, 32), 0.5)
    for size in (4, 7, 12, 20):
        grid = torch.randn(n, 3, size, size, generator=seeded(size))
        images += 0.5 / size * nn.functional.interpolate(grid, (32, 32), mode="bicubic")
    return (255 * images.clamp(0, 1)).round().to(torch.uint8)


GREY = torch.from_numpy(np.rint(load_digits().images[:60] * (255 / 16)).astype(np.uint8))[:, None]
COLOUR = smooth_colour_images(40)


# --- corruptions ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [None, *ALL_KINDS])
@pytest.mark.parametrize("images", [GREY[:12], COLOUR[:12]], ids=["grey", "colour"])
def test_corruption_does_not_depend_on_the_batch(images, kind):
    all_at_once = corrupt(images, 3, kind, seed=7)
    batches = [
        corrupt(images[start : start + 5], 3, kind, seed=7, offset=start)
        for start in range(0, 12, 5)
    ]
    assert torch.equal(all_at_once, torch.cat(batches))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("images", [GREY, COLOUR], ids=["grey", "colour"])
def test_severity_raises_the_distance_to_the_clean_image(images, kind):
    distances = [
        (corrupt(images, severity, kind).float() - images.float()).abs().mean().item()
        for severity in range(1, 6)
    ]
    assert distances[0] > 0
    assert distances[4] > 1.2 * distances[0]
    # Two kinds have near ties: motion blur 3 and 4 differ only in a negligible tail, and images of
    # eight pixels leave only three levels to `pixelate`.
    slack = 0.9 if kind == "pixelate" else 0.99
    assert all(stronger > slack * weaker for weaker, stronger in pairwise(distances))


@pytest.mark.slow
def test_mixed_corruption_gives_each_image_one_of_the_kinds_evenly():
    images = COLOUR[:1].expand(520, -1, -1, -1)
    mixed = corrupt(images, 4, seed=1)
    counts = dict.fromkeys(KINDS, 0)
    for kind in KINDS:
        alone = corrupt(images, 4, kind, seed=1)
        counts[kind] = int((mixed == alone).flatten(1).all(1).sum())
    assert sum(counts.values()) == 520
    # With 520 draws over 13 kinds, each is drawn 40 ± 6 times.
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
def test_corruption_takes_one_of_several_kinds_whatever_the_batch_and_severity():
    images = COLOUR[:1].expand(150, -1, -1, -1)
    alone = {kind: corrupt(images, 2, kind, seed=4) for kind in BENCHMARK_KINDS}
    harder = {kind: corrupt(images, 5, kind, seed=4) for kind in BENCHMARK_KINDS}

    def kinds_of(mixed, images_by_kind) -> list[set[str]]:
        """The kinds of corruption that give each of the mixed images."""
        return [
            {kind for kind, images in images_by_kind.items() if torch.equal(images[n], mixed[n])}
            for n in range(150)
        ]

    mixed = corrupt(images, 2, BENCHMARK_KINDS, seed=4)
    kinds_per_image = kinds_of(mixed, alone)
    assert all(len(kinds) == 1 for kinds in kinds_per_image)
    assert set.union(*kinds_per_image) == set(BENCHMARK_KINDS)
    assert kinds_of(corrupt(images, 5, BENCHMARK_KINDS, seed=4), harder) == kinds_per_image
    assert kinds_of(corrupt(images, 2, BENCHMARK_KINDS, seed=5), alone) != kinds_per_image
    batches = [
        corrupt(images[start : start + 64], 2, BENCHMARK_KINDS, 4, offset=start)
        for start in range(0, 150, 64)
    ]
    assert torch.equal(torch.cat(batches), mixed)
    assert torch.equal(corrupt(images, 2, ["fog"], seed=4), alone["fog"])


def test_glass_blur_moves_pixels_by_one_and_invents_none():
    image = torch.arange(16 * 16, dtype=torch.uint8).reshape(1, 1, 16, 16)
    # At severity 1 the Gaussian's weights off the centre vanish, so the result is a shuffle.
    moved = corrupt(image, 1, "glass_blur")
    assert torch.equal(moved.flatten().sort().values, image.flatten())
    assert not torch.equal(moved, image)


def test_elastic_transform_bends_the_image_but_keeps_its_colours():
    ramp = torch.linspace(0, 255, 32).round().to(torch.uint8).expand(4, 3, 32, 32).contiguous()
    bent = corrupt(ramp, 5, "elastic_transform")
    # The rows of the image are equal; they differ once it is bent.
    assert (bent[:, :, 0].int() - bent[:, :, 20].int()).abs().max() > 3
    assert torch.equal(bent[:, 0], bent[:, 1])
    constant = torch.full((2, 3, 32, 32), 99, dtype=torch.uint8)
    assert torch.equal(corrupt(constant, 5, "elastic_transform"), constant)


@pytest.mark.parametrize("kind", ["snow", "frost"])
def test_snow_and_frost_brighten_dark_images_ever_more(kind):
    dark = torch.full((20, 3, 32, 32), 20, dtype=torch.uint8)
    means = [corrupt(dark, severity, kind).float().mean().item() for severity in (1, 2, 4)]
    assert 20 < means[0] < means[1] < means[2]


def test_brightness_keeps_the_ratio_of_the_channels():
    image = torch.tensor([40, 80, 100], dtype=torch.uint8)[None, :, None, None].expand(1, 3, 4, 4)
    brighter = corrupt(image, 3, "brightness").float()[0, :, 0, 0]
    assert torch.allclose(brighter / brighter[2], torch.tensor([0.4, 0.8, 1.0]), atol=0.01)
    assert brighter[2].item() == pytest.approx(100 + 0.15 * 255, abs=1)


def test_corruption_refuses_what_it_does_not_know():
    with pytest.raises(ValueError, match="severity is 6"):
        corrupt(GREY[:1], 6)
    with pytest.raises(ValueError, match="2 channels"):
        corrupt(torch.zeros(1, 2, 8, 8, dtype=torch.uint8), 1)
