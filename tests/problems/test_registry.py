"""Properties of the test problems as a whole: lookup, splits, data on disk, resumed training."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from laplace_debias.commands import train as training_command
from laplace_debias.experiments.shared.recipe import RecipeChanges
from laplace_debias.problems import (
    PROBLEMS,
    DataSource,
    Recipe,
    cifar100,
    digits,
    digits_net,
    get_problem,
    imagenet,
    load_problem,
    log_epochs,
    save_checkpoint,
    train,
)
from laplace_debias.problems.data import CIFAR100_CLASSES
from laplace_debias.problems.storage import read_tensors


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# --- looking problems up -------------------------------------------------------------------------


def test_the_papers_problems_are_found_by_letter():
    names = {letter: get_problem(letter).name for letter in "ABCEF"}
    assert names == {
        "A": "allcnnc-cifar100",
        "B": "allcnnc-cifar10",
        "C": "wrn404-cifar100",
        "E": "resnet50-imagenet",
        "F": "vit-little-imagenet",
    }
    with pytest.raises(ValueError, match=r"'D' has 9 models; expected one of \['convnet-1-16-"):
        get_problem("D")


def test_every_family_has_a_small_relative_and_names_are_unique():
    assert {p.letter for p in PROBLEMS if p.is_reduced} >= set("BCDEF")
    names = [problem.name for problem in PROBLEMS]
    assert len(set(names)) == len(names)
    assert all(get_problem(name).name == name for name in names)


def test_unknown_problems_come_with_the_nearest_name():
    with pytest.raises(ValueError, match="did you mean 'allcnnc-cifar100'"):
        get_problem("allcnn-cifar100")
    with pytest.raises(ValueError, match="did you mean 'vit-cifar10'"):
        get_problem("ViT-CIFAR10")


def test_recipes_are_those_of_the_paper_where_it_tells():
    assert get_problem("A").recipe.optimizer == "sgd"
    drops = get_problem("B").recipe
    assert drops.milestones == (200, 250, 300)
    assert drops.momentum == 0.9
    adam = get_problem("convnet-2-32-cifar10").recipe
    assert (adam.optimizer, adam.learning_rate, adam.momentum) == ("adam", 1e-3, 0.9)
    assert adam.weight_decay == 0
    assert get_problem("E").recipe.milestones == (30, 60)
    assert get_problem("F").recipe.optimizer == "nadamw"


@pytest.mark.parametrize("name", [p.name for p in PROBLEMS if p.is_reduced])
def test_models_of_small_problems_take_their_images(name):
    problem = get_problem(name)
    shape = (1, 8, 8) if name.endswith("digits") else (3, 32, 32)
    images, labels = torch.randn(2, *shape), torch.tensor([0, 9])
    loss = problem.loss(problem.model().eval()(images), labels)
    log_probs = problem.model().eval()(images).log_softmax(1)
    assert loss.isfinite()
    assert log_probs.shape == (2, 10)
    assert problem.published is None


# --- log-equidistant epochs ----------------------------------------------------------------------


def test_log_epochs_run_from_first_to_last_with_an_even_ratio():
    assert log_epochs(1000, 4) == (1, 10, 100, 1000)
    epochs = log_epochs(350, 10)
    assert (epochs[0], epochs[-1]) == (1, 350)
    late = [b / a for a, b in pairwise(epochs[4:])]
    assert late == pytest.approx([350 ** (1 / 9)] * len(late), rel=0.05)
    assert log_epochs(3, 10) == (1, 2, 3)
    assert log_epochs(7, 1) == (7,)
    assert log_epochs(7, 0) == ()
    with pytest.raises(ValueError, match="-1 of 7"):
        log_epochs(7, -1)


# --- splits --------------------------------------------------------------------------------------


def test_digits_problem_splits_its_pool_as_asked():
    problem = get_problem("allcnn-digits")
    data = problem.data(seed=3)
    assert (len(data.train), len(data.val), len(data.test)) == (1000, 297, 500)
    assert torch.equal(data.test.images, digits().test.images)
    indices = torch.cat([data.train_indices, data.val_indices])
    assert torch.equal(indices.sort().values, torch.arange(1297))
    again = problem.data(split=(data.train_indices, data.val_indices))
    assert torch.equal(again.val.images, data.val.images)
    assert not torch.equal(problem.data(seed=4).val.images, data.val.images)
    assert len(problem.data(num_validation=10).val) == 10
    with pytest.raises(ValueError, match="1297 validation images out of 1297"):
        problem.data(num_validation=1297)


def test_problems_that_need_data_say_so():
    with pytest.raises(ValueError, match="no path to CIFAR-100"):
        get_problem("A").data()
    with pytest.raises(ValueError, match="nothing is at nowhere"):
        get_problem("A").data(DataSource(root=Path("nowhere")))


# --- CIFAR-100 and ImageNet on disk --------------------------------------------------------------


def write_images(root: Path, classes, counts: dict[str, int], size=(32, 32)) -> Path:
    rng = np.random.default_rng(0)
    for split, count in counts.items():
        for name in classes:
            (root / split / name).mkdir(parents=True)
            for n in range(count):
                pixels = rng.integers(0, 256, (*size, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(root / split / name / f"{n}.png")
    return root


def test_cifar_100_is_read_from_an_image_folder(tmp_path):
    assert len(set(CIFAR100_CLASSES)) == 100
    assert list(CIFAR100_CLASSES) == sorted(CIFAR100_CLASSES)
    root = write_images(tmp_path / "images", CIFAR100_CLASSES, {"train": 2, "test": 1})
    source = DataSource(root=root, cache=tmp_path / "cache")
    data = get_problem("A").data(source)
    # A fifth of a pool that is not whole is held out.
    assert (len(data.train), len(data.val), len(data.test)) == (160, 40, 100)
    assert data.test.labels.tolist() == list(range(100))
    (root / "train" / "wolf" / "0.png").write_bytes(b"broken")
    with pytest.raises(ValueError, match=r"train/wolf/0\.png is no readable image"):
        cifar100(root, train=True, cache=tmp_path / "cache")
    for image in (root / "train" / "wolf").iterdir():
        image.unlink()
    with pytest.raises(ValueError, match=r"no images of \['wolf'\]"):
        cifar100(root, train=True, cache=tmp_path / "cache")


def test_torchvisions_cifar_100_is_read(tmp_path, monkeypatch):
    from torchvision import datasets

    class Fake:
        def __init__(self, root, train, download):
            self.data = np.full((4, 32, 32, 3), [1, 2, 3], dtype=np.uint8)
            self.targets = [5, 99, 0, int(train)]

    monkeypatch.setattr(datasets, "CIFAR100", Fake)
    (tmp_path / "cifar-100-python").mkdir()
    data = cifar100(tmp_path, train=True)
    assert data.labels.tolist() == [5, 99, 0, 1]
    assert data.images[2, :, 7, 7].tolist() == [1, 2, 3]


@pytest.fixture
def photographs(tmp_path: Path) -> Path:
    """A tiny ImageNet of two classes and oblong images."""
    return write_images(tmp_path, ("n01", "n02"), {"train": 3, "val": 2}, size=(40, 60))


def test_photographs_are_resized_cropped_and_normalised_as_torchvision_does(photographs):
    from torchvision import transforms

    data = imagenet(photographs, train=False, num_classes=2, size=24, resize=30)
    reference = transforms.Compose(
        [
            transforms.Resize(30),
            transforms.CenterCrop(24),
            transforms.ToTensor(),
            transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        ]
    )
    images, labels = data.batch([3, 0])
    assert labels.tolist() == [1, 0]
    for image, file in zip(images, ("n02/1.png", "n01/0.png"), strict=True):
        with Image.open(photographs / "val" / file) as picture:
            assert torch.allclose(image, reference(picture), atol=1e-6)
    assert torch.equal(data.subset([3])[0][0], images[0])


def test_photographs_are_mirrored_and_cropped_with_the_seed(photographs):
    data = imagenet(photographs, train=True, num_classes=2, size=24, resize=24)
    plain, _ = data.batch(range(6))
    flipped, _ = data.augmented(True, False, seeded()).batch(range(6))
    mirrored = (flipped == plain.flip(3)).flatten(1).all(1)
    assert torch.equal(~mirrored, (flipped == plain).flatten(1).all(1))
    assert 0 < mirrored.sum() < 6
    cropped, _ = data.augmented(False, True, seeded()).batch(range(6))
    assert cropped.shape == plain.shape
    assert not torch.equal(cropped, plain)
    assert torch.equal(cropped, data.augmented(False, True, seeded()).batch(range(6))[0])


def test_photographs_that_are_missing_or_broken_are_named(photographs):
    with pytest.raises(ValueError, match="has 2 class folders; expected 1000"):
        imagenet(photographs, train=True)
    broken = photographs / "train" / "n02" / "1.png"
    broken.write_bytes(broken.read_bytes()[:60])
    with pytest.raises(ValueError, match=r"n02/1\.png is no readable image"):
        imagenet(photographs, train=True, num_classes=2).batch([4])
    for image in (photographs / "val" / "n02").iterdir():
        image.unlink()
    with pytest.raises(ValueError, match="n02 has no images"):
        imagenet(photographs, train=False, num_classes=2)
    (photographs / "val" / "n02").rmdir()
    with pytest.raises(ValueError, match="1 class folders; expected 2: n02 is missing"):
        imagenet(photographs, train=False, num_classes=2)
    with pytest.raises(ValueError, match=r"no train/ in .*elsewhere"):
        imagenet(photographs / "elsewhere", train=True)


def test_crops_shift_an_image_by_at_most_four_pixels():
    parts = digits()
    plain, _ = parts.test.batch(range(30))
    cropped, _ = parts.test.augmented(False, True, seeded()).batch(range(30))
    padded = nn.functional.pad(plain, [4] * 4, mode="reflect")
    places = set()
    for n in range(30):
        found = {
            (row, column)
            for row in range(9)
            for column in range(9)
            if torch.equal(cropped[n], padded[n, :, row : row + 8, column : column + 8])
        }
        assert found
        places |= found
    assert len(places) > 10


# --- training that was broken off ----------------------------------------------------------------


class _PowerCutError(Exception):
    pass


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "nadamw"])
def test_training_that_goes_on_ends_as_if_never_broken_off(optimizer, tmp_path):
    recipe = Recipe(
        batch_size=32,
        cycles=((4, 0.01),),
        optimizer=optimizer,
        weight_decay=0.01,
        flips=True,
        crops=True,
    )
    data = digits().train.subset(range(100))
    start = digits_net().state_dict()

    def outcome(generator, **options):
        model = digits_net()
        model.load_state_dict(start)
        return train(model, data, recipe, generator=generator, **options), model.state_dict()

    def stop(epoch: int, model: nn.Module) -> None:
        if epoch == 3:
            raise _PowerCutError

    history, weights = outcome(seeded())
    state = tmp_path / "state.safetensors"
    with pytest.raises(_PowerCutError):
        outcome(seeded(), state=state, on_epoch=stop)
    seen: list[int] = []
    resumed, found = outcome(
        seeded(7), state=state, on_epoch=lambda epoch, model: seen.append(epoch)
    )
    assert seen == [3, 4]
    assert resumed == history
    assert all(torch.equal(weights[name], found[name]) for name in weights)
    with pytest.raises(ValueError, match="the state of another training"):
        train(digits_net(), data.subset(range(99)), recipe, state=state)


def settings(output: Path, **changes) -> training_command.Settings:
    base = {"problem": "allcnn-digits", "progress": False, "device": "cpu"}
    recipe = RecipeChanges(cycles=((3, 0.05),), batch_size=200)
    return training_command.Settings(**{"output": output, "recipe": recipe, **base, **changes})


def test_a_problem_is_trained_to_checkpoints_that_load_with_their_split(tmp_path):
    output = tmp_path / "net.safetensors"
    found = training_command.run(settings(output, checkpoints=2))
    assert 0 <= found["accuracy"] <= 1
    kept = sorted((tmp_path / "net.checkpoints").iterdir())
    assert [path.name for path in kept] == ["epoch-0001.safetensors", "epoch-0003.safetensors"]
    first, last, final = (read_tensors(path) for path in (*kept, output))
    assert torch.equal(last["0.weight"], final["0.weight"])
    assert not torch.equal(first["0.weight"], final["0.weight"])
    lines = (tmp_path / "net.history.csv").read_text(encoding="utf-8").splitlines()
    assert lines[0] == "epoch,loss,accuracy,learning_rate"
    assert len(lines) == 4
    assert not (tmp_path / "net.state.safetensors").exists()
    model, data = load_problem(get_problem("allcnn-digits"), checkpoint=output)
    assert torch.equal(data.train_indices, final["split.train"])
    images, labels = data.test.tensors()
    with torch.no_grad():
        accuracy = (model(images).argmax(1) == labels).float().mean().item()
    assert accuracy == pytest.approx(found["accuracy"])


def test_a_broken_off_run_is_neither_lost_nor_taken_up_unasked(tmp_path):
    output = tmp_path / "net.safetensors"
    training_command.run(settings(tmp_path / "whole.safetensors"))
    state = tmp_path / "net.state.safetensors"
    # What a run leaves behind that ended after its first epoch.
    torch.manual_seed(0)
    model, problem = get_problem("allcnn-digits").model(), get_problem("allcnn-digits")

    def stop(epoch: int, model: nn.Module) -> None:
        if epoch == 2:
            raise _PowerCutError

    recipe = settings(output).recipe.applied_to(problem.recipe)
    with pytest.raises(_PowerCutError):
        train(model, problem.data().train, recipe, generator=seeded(), on_epoch=stop, state=state)
    with pytest.raises(FileExistsError, match="give --resume, or --overwrite"):
        training_command.run(settings(output))
    with pytest.raises(ValueError, match="the state of another training"):
        training_command.run(settings(output, resume=True, recipe=RecipeChanges(batch_size=100)))
    training_command.run(settings(output, resume=True))
    ends = [read_tensors(tmp_path / f"{name}.safetensors") for name in ("net", "whole")]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def test_settings_that_make_no_sense_are_refused(tmp_path):
    with pytest.raises(ValueError, match="did you mean"):
        settings(tmp_path / "a", problem="digits-cnn")
    with pytest.raises(ValueError, match="batch_size 0"):
        settings(tmp_path / "a", recipe=RecipeChanges(batch_size=0))
    with pytest.raises(ValueError, match="both given; expected one of them"):
        settings(tmp_path / "a", resume=True, overwrite=True)
    with pytest.raises(ValueError, match="checkpoints is -1"):
        settings(tmp_path / "a", checkpoints=-1)


def test_changes_of_a_recipe_replace_its_schedule():
    cycles = get_problem("allcnn-digits").recipe
    constant = RecipeChanges(epochs=2, learning_rate=0.1, milestones=(1,)).applied_to(cycles)
    assert (constant.cycles, constant.num_epochs) == ((), 2)
    stepped = get_problem("B").recipe
    cycled = RecipeChanges(cycles=((4, 0.1),)).applied_to(stepped)
    assert (cycled.milestones, cycled.num_epochs) == ((), 4)
    assert cycled.weight_decay == stepped.weight_decay
    assert RecipeChanges(momentum=0.0).applied_to(stepped).milestones == (200, 250, 300)
    assert RecipeChanges().applied_to(stepped) == stepped


def test_problems_without_published_weights_need_a_checkpoint(tmp_path):
    problem = get_problem("allcnn-digits")
    with pytest.raises(ValueError, match="laplace-debias train --problem=allcnn-digits"):
        load_problem(problem)
    path = tmp_path / "net.safetensors"
    save_checkpoint(digits_net(), path)
    model, data = load_problem(problem, checkpoint=path, seed=2)
    assert not model.training
    assert torch.equal(data.val.images, problem.data(seed=2).val.images)
