"""Networks and data from names and paths."""

import sys

import numpy as np
import pytest
import torch
import user_files
from PIL import Image
from safetensors.torch import save_file
from torch import nn
from user_files import every

from laplace_debias import Laplace
from laplace_debias.sources import SourceSettings, load, split_by_seed


@pytest.fixture
def folder(tmp_path, monkeypatch):
    return user_files.networks(tmp_path, monkeypatch)


def load_on_cpu(**options):
    return load(SourceSettings(**{"device": "cpu", "progress": False, **options}))


# --- archives ------------------------------------------------------------------------------------


def test_an_archive_gives_its_rows_mixed_and_the_same_each_time(folder):
    content = user_files.arrays()
    user_files.archive(folder / "d.npz", **content)
    loaded = load_on_cpu(model="nets:rows", data="d.npz")
    x, y = every(loaded.train)
    x_read_again, _ = every(loaded.train)
    assert torch.equal(x, x_read_again)
    # They are the same rows with their labels, in another order.
    order = [int(np.abs(content["x_train"] - row).sum(1).argmin()) for row in x.double().numpy()]
    assert sorted(order) == list(range(30))
    assert order != list(range(30))
    assert y.tolist() == content["y_train"][order].tolist()
    x, y = every(loaded.test)
    torch.testing.assert_close(x.double().numpy(), content["x_test"], rtol=1e-6, atol=1e-6)
    assert y.tolist() == content["y_test"].tolist()
    assert (loaded.task, loaded.num_train, loaded.input_name) == ("classification", 30, "example")
    x_of_another_seed, _ = every(load_on_cpu(model="nets:rows", data="d.npz", seed=1).train)
    assert not torch.equal(x_of_another_seed, x_read_again)


def test_limits_choose_by_the_seed_and_leave_n_as_it_is(folder):
    user_files.archive(folder / "d.npz")
    limits = {"train_examples": 7, "validation_examples": 5, "test_examples": 4}
    loaded = load_on_cpu(model="nets:rows", data="d.npz", **limits)
    sizes = [len(every(split)[0]) for split in (loaded.train, loaded.validation, loaded.test)]
    assert sizes == [7, 5, 4]
    assert loaded.num_train == 30
    all_x, _ = every(load_on_cpu(model="nets:rows", data="d.npz").train)
    assert torch.equal(every(loaded.train)[0], all_x[:7])


@pytest.mark.parametrize(
    ("targets", "outputs", "task", "shape"),
    [
        ("classes", 3, "classification", [30]),
        ("numbers", 1, "regression", [30, 1]),
        ("labels", 3, "multilabel", [30, 3]),
    ],
)
def test_targets_say_what_the_outputs_mean(folder, targets, outputs, task, shape):
    user_files.archive(folder / "d.npz", **user_files.arrays(targets))
    loaded = load_on_cpu(model="nets:rows", model_args={"outputs": outputs}, data="d.npz")
    assert loaded.task == task
    assert list(every(loaded.train)[1].shape) == shape
    la = Laplace(loaded.model, loaded.task, sigma=0.5 if task == "regression" else None)
    la.fit(loaded.train, num_data=loaded.num_train)
    assert la.num_data == 30


def test_two_classes_and_one_output_are_binary(folder):
    user_files.archive(folder / "d.npz", **user_files.arrays(classes=2))
    loaded = load_on_cpu(model="nets:rows", model_args={"outputs": 1}, data="d.npz")
    assert loaded.task == "binary"
    Laplace(loaded.model, loaded.task).fit(loaded.train)


def test_data_without_parts_is_parted_as_told(folder):
    content = {"x": np.arange(80).reshape(20, 4) * 0.01, "y": np.arange(20) % 3}
    user_files.archive(folder / "d.npz", **content)
    loaded = load_on_cpu(model="nets:rows", data="d.npz", seed=3, held_out=0.25)
    train, validation, test = split_by_seed(20, 3, 0.25)
    assert [len(train), len(validation), len(test)] == [10, 5, 5]
    assert torch.cat([train, validation, test]).sort().values.tolist() == list(range(20))
    for batches, indices in ((loaded.validation, validation), (loaded.test, test)):
        assert every(batches)[1].tolist() == content["y"][indices.numpy()].tolist()
    assert "the seed 3 chooses 5 examples for the test" in " ".join(loaded.notes)


@pytest.mark.parametrize("num_targets", [19, 21])
def test_as_many_inputs_as_targets_before_they_are_parted(folder, num_targets):
    x = np.zeros((20, 4))
    y = np.arange(num_targets) % 3
    user_files.archive(folder / "d.npz", x=x, y=y)
    with pytest.raises(ValueError, match=f"20 rows, but y has {num_targets}"):
        load_on_cpu(model="nets:rows", data="d.npz")


def test_archives_of_bytes_are_images(folder):
    rng = np.random.default_rng(0)
    pixels = rng.integers(256, size=(9, 16, 20, 3), dtype=np.uint8)
    targets = np.arange(9) % 3
    user_files.archive(
        folder / "d.npz", x_train=pixels, y_train=targets, x_test=pixels, y_test=targets
    )
    options = {"mean": (0.5, 0.4, 0.3), "std": (0.2, 0.3, 0.4)}
    loaded = load_on_cpu(model="nets:build", data="d.npz", **options)
    x, _ = every(loaded.test)
    expected = (pixels / 255 - np.array([0.5, 0.4, 0.3])) / np.array([0.2, 0.3, 0.4])
    np.testing.assert_allclose(x.permute(0, 2, 3, 1).numpy(), expected, atol=1e-5)
    assert np.array_equal(loaded.picture(x[4]).numpy(), pixels[4])
    assert loaded.validation is None
    assert "no validation data" in " ".join(loaded.notes)


# --- folders of images ---------------------------------------------------------------------------


@pytest.fixture
def images(folder):
    return user_files.image_folder(folder / "images")


def test_a_folder_gives_what_pillow_reads(images):
    loaded = load_on_cpu(
        model="nets:build", data=images, mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25)
    )
    x, y = every(loaded.test)
    files = sorted((images / "test").glob("*/*.png"))
    pixels = np.stack([np.asarray(Image.open(file)) for file in files])
    np.testing.assert_allclose(x.permute(0, 2, 3, 1), (pixels / 255 - 0.5) / 0.25, atol=1e-6)
    assert y.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert loaded.classes == user_files.CLASSES
    assert (loaded.num_train, loaded.task, loaded.input_name) == (24, "classification", "image")
    assert np.array_equal(loaded.picture(x[7]).numpy(), pixels[7])
    assert len(every(loaded.train)[1].unique()) == 3


def test_images_of_16_bits_are_refused_not_clipped(images):
    file = min((images / "test").glob("*/*.png"))
    Image.fromarray(np.full((8, 8), 40_000, np.uint16)).save(file)
    with pytest.raises(ValueError, match="more than 8 bits per pixel"):
        load_on_cpu(model="nets:build", data=images).test.dataset[0]


def test_a_folder_is_not_decoded_before_it_is_read(images):
    files = sorted((images / "test").glob("*/*.png"))
    files[1].write_bytes(b"no image")
    loaded = load_on_cpu(model="nets:build", data=images)
    with pytest.raises(ValueError, match=r"1\.png is not a readable image"):
        every(loaded.test)


def test_a_broken_image_is_named_wherever_it_is_read(images, folder):
    """The first image's header shows the size of the others, and whether the images are grey."""
    first = min((images / "test").glob("*/*.png"))
    first.write_bytes(b"no image")
    message = r"0\.png is not a readable image \(.*\)\. Replace it\."
    loaded = load_on_cpu(model="nets:build", data=images)
    with pytest.raises(ValueError, match=message):
        loaded.test.dataset[1]
    with pytest.raises(ValueError, match=message):
        loaded.read(first.parent, "inputs")


def test_folders_without_parts_are_parted_by_the_seed(folder):
    root = user_files.image_folder(folder / "all", splits=(("", 10),))
    loaded = load_on_cpu(model="nets:build", data=root)
    images = [every(split)[0] for split in (loaded.train, loaded.validation, loaded.test)]
    assert [len(x) for x in images] == [18, 6, 6]
    assert len(torch.cat(images).flatten(1).unique(dim=0)) == 30


def test_images_are_resized_and_cropped_to_the_size_asked_for(images):
    loaded = load_on_cpu(model="nets:build", data=images, image_size=8)
    x, _ = every(loaded.test)
    assert x.shape[2:] == (8, 8)
    with Image.open(sorted((images / "test").glob("*/*.png"))[0]) as image:
        middle = image.resize((8, 8), Image.Resampling.BILINEAR, box=(2, 0, 18, 16))
    assert np.array_equal(loaded.picture(x[0]).numpy(), np.asarray(middle))


def test_grey_images_where_one_mean_is_given(images):
    options = {"mean": (0.5,), "std": (0.5,), "model_args": {"channels": 1}}
    loaded = load_on_cpu(model="nets:build", data=images, **options)
    x, _ = every(loaded.test)
    assert x.shape[1:] == (1, 16, 20)
    with Image.open(sorted((images / "test").glob("*/*.png"))[0]) as image:
        grey = np.asarray(image.convert("L"))
    assert np.array_equal(loaded.picture(x[0]).numpy(), np.repeat(grey[:, :, None], 3, 2))


def test_channels_are_those_that_the_network_takes(images):
    """The files may be in colour or grey, and one mean may be for all channels."""
    for channels in (1, 3):
        args = {"channels": channels}
        for normalisation in ({}, {"mean": (0.5,), "std": (0.5,)}):
            x, _ = every(
                load_on_cpu(model="nets:build", data=images, model_args=args, **normalisation).test
            )
            assert x.shape[1] == channels


@pytest.mark.parametrize(("mode", "channels"), [("L", 1), ("RGB", 3), ("mixed", 3)])
def test_channels_are_told_from_the_files_where_no_convolution_tells_them(folder, mode, channels):
    root = user_files.image_folder(folder / "all", splits=(("", 4),))
    for class_folder in sorted(root.iterdir()):
        for file in class_folder.iterdir():
            with Image.open(file) as image:
                is_grey = mode == "L" or (mode == "mixed" and class_folder.name != "eel")
                image.convert("L" if is_grey else "RGB").save(file)
    (folder / "flat.py").write_text(
        "from torch import nn\n\n\n"
        "def build(channels):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(channels * 16 * 20, 3))\n"
    )
    x, _ = every(load_on_cpu(model="flat:build", data=root, model_args={"channels": channels}).test)
    assert x.shape[1] == channels


def test_images_of_several_sizes_need_a_size(images):
    Image.new("RGB", (30, 30)).save(images / "test" / "eel" / "2.png")
    with pytest.raises(
        ValueError, match=r"30 × 30 pixels, but others have 16 × 20. Pass --image_size"
    ):
        every(load_on_cpu(model="nets:build", data=images).test)
    assert len(every(load_on_cpu(model="nets:build", data=images, image_size=16).test)[0]) == 9


def test_timm_networks_see_images_as_timm_shows_them(images):
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    model = timm.create_model("test_resnet", num_classes=3)
    save_file(model.state_dict(), images / "net.safetensors")
    options = {"timm": "test_resnet", "data": images, "checkpoint": images / "net.safetensors"}
    loaded = load_on_cpu(**options)
    config = timm.data.resolve_data_config({}, model=model)
    transform = timm.data.create_transform(**config, is_training=False)
    file = sorted((images / "test").glob("*/*.png"))[4]
    with Image.open(file) as image:
        expected = transform(image.convert("RGB"))
    x, _ = every(loaded.test)
    torch.testing.assert_close(x[4], expected, rtol=0, atol=1e-6)
    with torch.no_grad():
        torch.testing.assert_close(loaded.model(x[:2]), model.eval()(x[:2]))
    height, width = expected.shape[1:]
    note = f"Images of 16 × 20 pixels are resized to {height} × {width}, the size in timm's"
    assert [text.startswith(note) for text in loaded.notes].count(True) == 1
    loaded_small = load_on_cpu(**options, image_size=32, mean=(0.1, 0.2, 0.3))
    small, _ = every(loaded_small.test)
    assert small.shape[2:] == (32, 32)
    assert not any("resized" in text for text in loaded_small.notes)
    with pytest.raises(ValueError, match="have 2 numbers, but the network takes 3 channels"):
        load_on_cpu(**options, mean=(0.1, 0.2))


def test_grey_timm_networks_take_the_mean_and_std_of_the_settings(images):
    timm = pytest.importorskip("timm")
    model = timm.create_model("test_resnet", num_classes=3, in_chans=1)
    save_file(model.state_dict(), images / "net.safetensors")
    options = {
        "timm": "test_resnet",
        "model_args": {"in_chans": 1},
        "data": images,
        "checkpoint": images / "net.safetensors",
    }
    loaded = load_on_cpu(**options, image_size=16, mean=(0.5,), std=(0.25,))
    file = sorted((images / "test").glob("*/*.png"))[4]
    with Image.open(file) as image:
        grey = torch.from_numpy(np.array(image.convert("L"))).double() / 255
    x, _ = every(loaded.test)
    assert x.shape[1:] == (1, 16, 16)
    # The images of a class differ only by noise, so resizing keeps the mean of the pixels.
    assert x[4].double().mean().item() == pytest.approx((grey.mean().item() - 0.5) / 0.25, abs=0.1)
    assert every(load_on_cpu(**options, mean=(0.5,), std=(0.25,)).test)[0].shape[1] == 1
    with pytest.raises(ValueError, match="1 channel, for which timm has no mean"):
        load_on_cpu(**options)


def test_hidden_folders_contain_no_images(images):
    before, _ = every(
        load_on_cpu(model="nets:build", data=images, ood={"same": str(images)}).ood["same"]
    )
    hidden = images / "test" / "eel" / ".ipynb_checkpoints"
    hidden.mkdir()
    Image.new("RGB", (16, 20)).save(hidden / "0-checkpoint.png")
    loaded = load_on_cpu(model="nets:build", data=images, ood={"same": str(images)})
    assert torch.equal(every(loaded.ood["same"])[0], before)
    assert len(every(loaded.test)[0]) == 9


def test_torchvision_networks(images):
    models = pytest.importorskip("torchvision.models")
    torch.manual_seed(0)
    model = models.squeezenet1_1(num_classes=3)
    user_files.weights(images / "net.pth", model)
    loaded = load_on_cpu(
        torchvision="squeezenet1_1", data=images, checkpoint=images / "net.pth", image_size=64
    )
    x, _ = every(loaded.test)
    with torch.no_grad():
        torch.testing.assert_close(loaded.model(x[:1]), model.eval()(x[:1]))


def test_processes_that_read_give_the_same(images):
    x, _ = every(load_on_cpu(model="nets:build", data=images).train)
    x_by_worker, _ = every(load_on_cpu(model="nets:build", data=images, workers=1).train)
    assert torch.equal(x, x_by_worker)


# --- data and networks of one's own --------------------------------------------------------------


USER_MODULE = """
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

torch.manual_seed(0)
X = torch.randn(30, 4)
Y = torch.arange(30) % 3


def make():
    data = TensorDataset(X, Y)
    return {
        "train": DataLoader(data, batch_size=7, shuffle=True),
        "validation": data,
        "test": [(X[:5], Y[:5]), (X[5:9], Y[5:9])],
        "ood": {"noise": [(X[:5] * 9, Y[:5])]},
        "classes": ["a", "b", "c"],
    }


def train_and_test(data):
    return {"train": data, "test": data}


def plain():
    return train_and_test(DataLoader(TensorDataset(X, Y), batch_size=7))


class Doubling(DataLoader):
    def __iter__(self):
        for x, y in super().__iter__():
            yield 2 * x, y


def doubled():
    return train_and_test(Doubling(TensorDataset(X, Y), batch_size=7))


def seeding():
    return train_and_test(DataLoader(TensorDataset(X, Y), worker_init_fn=print))


def in_double():
    return train_and_test(TensorDataset(X.double(), Y))


def subset():
    sampler = SubsetRandomSampler(range(12))
    return train_and_test(DataLoader(TensorDataset(X, Y), batch_size=7, sampler=sampler))


def batches_of_subset():
    sampler = BatchSampler(SubsetRandomSampler(range(12)), 5, drop_last=False)
    return train_and_test(DataLoader(TensorDataset(X, Y), batch_sampler=sampler))


def repeated():
    sampler = WeightedRandomSampler(torch.ones(30), 30)
    return train_and_test(DataLoader(TensorDataset(X, Y), batch_size=7, sampler=sampler))


class EveryThird:
    def __iter__(self):
        return iter(range(0, 27, 3))

    def __len__(self):
        return 9


def own_sampler():
    return train_and_test(DataLoader(TensorDataset(X, Y), batch_size=7, sampler=EveryThird()))


def own_batches():
    batches = [list(range(12)), list(range(12, 30))]
    return train_and_test(DataLoader(TensorDataset(X, Y), batch_sampler=batches))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(zip(X, Y))

    def __len__(self):
        return 30


def stream():
    return train_and_test(DataLoader(Stream(), batch_size=7))


def iterator():
    return {"train": iter([(X, Y)]), "test": [(X, Y)]}


def without_test():
    return {"train": [(X, Y)]}


def typo():
    return {"train": [(X, Y)], "test": [(X, Y)], "validaton": [(X, Y)]}


def dicts():
    batches = [{"x": X, "labels": Y}]
    return {"train": batches, "test": batches}
"""


@pytest.fixture
def user_folder(folder, monkeypatch):
    (folder / "own.py").write_text(USER_MODULE)
    user_files.forget(monkeypatch, "own", "nets")
    return folder


def test_loaders_of_ones_own_keep_their_examples_in_one_order(user_folder):
    loaded = load_on_cpu(model="nets:rows", data="own:make")
    x, _ = every(loaded.train)
    assert torch.equal(x, every(loaded.train)[0])
    assert [len(batch) for batch, _ in loaded.train] == [7, 7, 7, 7, 2]
    assert torch.equal(x.sort(0).values, sys.modules["own"].X.sort(0).values)
    assert torch.equal(every(loaded.test)[0], sys.modules["own"].X[:9])
    assert loaded.classes == ("a", "b", "c")
    assert loaded.num_train == 30


@pytest.mark.parametrize("name", ["subset", "batches_of_subset"])
def test_the_number_of_examples_is_that_of_the_sampler(user_folder, name):
    loaded = load_on_cpu(model="nets:rows", data=f"own:{name}")
    assert loaded.num_train == 12
    assert sum(len(y) for _, y in loaded.train) == 12


def test_a_sampler_of_ones_own_says_how_many_examples_there_are(user_folder):
    assert load_on_cpu(model="nets:rows", data="own:own_sampler").num_train == 9


@pytest.mark.parametrize("name", ["repeated", "own_batches", "stream"])
def test_otherwise_the_number_of_examples_is_that_of_the_data_set(user_folder, name):
    """Examples are drawn with replacement, or in batches of the user."""
    assert load_on_cpu(model="nets:rows", data=f"own:{name}").num_train == 30


def test_batch_size_and_limits_apply_to_loaders_of_data_sets(user_folder):
    loaded = load_on_cpu(model="nets:rows", data="own:plain", batch_size=4, train_examples=10)
    assert [len(batch) for batch, _ in loaded.train] == [4, 4, 2]
    with pytest.raises(
        ValueError,
        match="test_examples cannot be used with the test data, because your",
    ):
        load_on_cpu(model="nets:rows", data="own:make", test_examples=3)


def test_a_loader_with_an_iteration_of_its_own_is_read_by_it(user_folder):
    loaded = load_on_cpu(model="nets:rows", data="own:doubled")
    assert torch.equal(every(loaded.train)[0], 2 * sys.modules["own"].X)


def test_what_prepares_the_workers_of_a_loader_is_kept(user_folder):
    loaded = load_on_cpu(model="nets:rows", data="own:seeding")
    assert loaded.train.worker_init_fn is print


def test_a_network_that_is_one_already(user_folder):
    loaded = load_on_cpu(model="nets:ready", data="own:plain")
    assert isinstance(loaded.model, nn.Sequential)
    assert not loaded.model.training
    assert "No checkpoint" in loaded.notes[0]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("iterator", "train data is an iterator"),
        ("without_test", "a dict of train. Return a dict"),
        ("typo", "a dict of train, test, validaton. Return a dict"),
        ("Doubling", "without arguments"),
        ("none", "own has no none"),
        ("dicts", "batches of type dict. Pass the task, for example --task=classification"),
    ],
)
def test_what_a_callable_must_return(user_folder, name, message):
    with pytest.raises(ValueError, match=message):
        load_on_cpu(model="nets:rows", data=f"own:{name}")


def test_inputs_of_another_dtype_than_the_network_are_refused(user_folder):
    (user_folder / "double.py").write_text(
        "import nets\n\ndef build():\n    return nets.rows().double()\n"
    )
    with pytest.raises(ValueError, match=r"dtype torch.float32 .* return model.float\(\)"):
        load_on_cpu(model="double:build", data="own:plain")
    loaded = load_on_cpu(model="double:build", data="own:in_double")
    Laplace(loaded.model, loaded.task).fit(loaded.train, num_data=30)


def test_torchs_global_generator_is_left_alone(images):
    torch.manual_seed(3)
    state = torch.get_rng_state()
    loaded = load_on_cpu(model="nets:build", data=images)
    list(loaded.train)
    assert torch.equal(state, torch.get_rng_state())


# --- checkpoints ---------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".ckpt", ".safetensors"])
@pytest.mark.parametrize(
    ("prefix", "nest"), [("", None), ("module.", "state_dict"), ("_orig_mod.module.", "model")]
)
def test_checkpoints_as_people_save_them(folder, suffix, prefix, nest):
    torch.manual_seed(7)
    trained = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    path = folder / f"net{suffix}"
    if suffix == ".safetensors":
        save_file({prefix + k: v.clone() for k, v in trained.state_dict().items()}, path)
    else:
        user_files.weights(path, trained, prefix, nest)
    user_files.archive(folder / "d.npz")
    loaded = load_on_cpu(model="nets:rows", data="d.npz", checkpoint=path)
    for name, value in trained.state_dict().items():
        assert torch.equal(loaded.model.state_dict()[name], value)
