"""Callbacks that fit a posterior when Lightning's or Hugging Face's Trainer ends a training."""

import csv
import logging
import multiprocessing
import random
import warnings
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from oracle import close, flat_jacobian, functional_covariance, ggn
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from laplace_debias import Categorical, Laplace
from laplace_debias.integrations.end_of_training import PosteriorAtEnd
from laplace_debias.laplace.fitting import plan as plans


def classes(n, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 4, generator=generator)
    noise = torch.randn(n, 3, generator=generator)
    return TensorDataset(x, (x[:, :3] + noise).argmax(1))


TRAIN = DataLoader(classes(200, 1), batch_size=50, shuffle=True)
VALIDATION = DataLoader(classes(150, 2), batch_size=50)


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 3))


def logged_in_tensorboard(folder):
    """The last value of every scalar in a folder's event files."""
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    values = {}
    for path in sorted(Path(folder).rglob("events.out.tfevents*")):
        events = accumulators.EventAccumulator(str(path)).Reload()
        for tag in events.Tags()["scalars"]:
            values[tag] = events.Scalars(tag)[-1].value
    return values


def test_the_network_of_a_regression_is_evaluated_with_the_tuned_noise(unchecked):
    """It was evaluated with the noise 1 that a fit assumes, and looked much worse than it is."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200, 4, generator=generator, dtype=torch.float64)
    y = 50 * x[:, :1] + 20 * torch.randn(200, 1, generator=generator, dtype=torch.float64)
    model = nn.Linear(4, 1).double().eval()
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[50.0, 0.0, 0.0, 0.0]]))
    train = DataLoader(TensorDataset(x[:100], y[:100]), batch_size=50)
    validation = DataLoader(TensorDataset(x[100:], y[100:]), batch_size=50)
    settings = PosteriorAtEnd("regression", "full", tune=True, options={})
    la = settings.unfitted(model)
    numbers = settings.fit(la, train, validation).numbers
    sigma = float(la.sigma)
    assert sigma == pytest.approx(20, rel=0.2)
    with torch.no_grad():
        nll = -torch.distributions.Normal(model(x[100:]), sigma).log_prob(y[100:]).mean()
    assert numbers["network_nll"] == pytest.approx(float(nll), rel=1e-9)
    assert numbers["network_nll"] == pytest.approx(numbers["laplace_nll"], abs=0.1)


# ------------------------------------------------- Lightning


@pytest.fixture
def lightning():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pl = pytest.importorskip("lightning.pytorch")
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        yield pl


def module(pl, is_network, make=mlp):
    """A LightningModule whose first epoch has the best score."""

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.inner = make()

        def forward(self, x):
            return self.inner(x)

        def training_step(self, batch, _):
            return nn.functional.cross_entropy(self.inner(batch[0]), batch[1])

        def validation_step(self, batch, _, dataloader_idx=0):
            self.log("score", -float(self.current_epoch))

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=1e-2)

    return Module()


def trainer(pl, folder, callbacks, **options):
    return pl.Trainer(
        max_epochs=3,
        accelerator="cpu",
        default_root_dir=folder,
        callbacks=callbacks,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"logger": False, "enable_checkpointing": False, **options},
    )


def test_lightning_makes_the_folder_of_the_posterior(lightning, tmp_path, unchecked):
    from laplace_debias.integrations.lightning import LaplaceCallback

    folder = tmp_path / "new" / "folder"
    callback = LaplaceCallback(curvature="diag")
    assert repr(callback) == (
        "LaplaceCallback(likelihood='classification', mode='full', tune=True, curvature='diag'): "
        "not fitted"
    )
    run = trainer(lightning, folder, [callback])
    run.fit(module(lightning, None), TRAIN, VALIDATION)
    assert callback.path == folder / "posterior.safetensors"
    assert callback.path.exists()
    assert repr(callback).endswith(f": saved to {callback.path}")
    assert callback.tuning.prior_precision == float(callback.laplace.prior_precision)


def test_lightning_writes_no_file_in_a_fast_dev_run(lightning, tmp_path, unchecked):
    from laplace_debias.integrations.lightning import LaplaceCallback

    callback = LaplaceCallback("classification", params="last_layer")
    run = trainer(lightning, tmp_path, [callback], fast_dev_run=True)
    run.fit(module(lightning, None), TRAIN, VALIDATION)
    assert callback.laplace.num_data == len(TRAIN.dataset)
    assert callback.path is None
    assert not list(tmp_path.rglob("*.safetensors"))


def test_lightning_keeps_a_posterior_that_cannot_be_saved(
    lightning, tmp_path, unchecked, monkeypatch
):
    from laplace_debias.integrations.lightning import LaplaceCallback

    def save(*_):
        raise OSError("The disk is full.")

    monkeypatch.setattr(Laplace, "save", save)
    callback = LaplaceCallback(curvature="diag")
    with pytest.raises(OSError, match="The disk is full"):
        trainer(lightning, tmp_path, [callback]).fit(module(lightning, None), TRAIN, VALIDATION)
    assert callback.laplace is not None
    assert callback.path is None


@pytest.mark.slow
@pytest.mark.parametrize("network", [None, "inner"])
def test_lightning_has_the_posterior_of_the_best_checkpoint(
    lightning, network, tmp_path, unchecked
):
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

    from laplace_debias.integrations.lightning import LaplaceCallback

    callback = LaplaceCallback(network=network, curvature="diag")
    checkpoints = ModelCheckpoint(tmp_path / "best", monitor="score", mode="max")
    loggers = [CSVLogger(tmp_path / "csv"), TensorBoardLogger(tmp_path / "tb")]
    run = trainer(
        lightning,
        tmp_path,
        [callback, checkpoints],
        logger=loggers,
        enable_checkpointing=True,
    )
    trained = module(lightning, network)
    run.fit(trained, TRAIN, VALIDATION)

    checkpoint = Path(checkpoints.best_model_path)
    assert callback.path == checkpoint.with_suffix(".posterior.safetensors")
    state = torch.load(checkpoint, weights_only=False)["state_dict"]
    best = mlp().eval()
    best.load_state_dict({key.removeprefix("inner."): value for key, value in state.items()})
    weights = nn.utils.parameters_to_vector(best.parameters())
    torch.testing.assert_close(callback.laplace.mean, weights, rtol=0, atol=0)
    last_weights = nn.utils.parameters_to_vector(trained.parameters())
    assert (last_weights - weights).abs().max() > 1e-3
    assert trained.training

    model = best
    if network is None:
        model = module(lightning, None).eval()
        model.load_state_dict(state)
    loaded = Laplace.load(callback.path, model)
    x, _ = VALIDATION.dataset.tensors
    assert torch.equal(loaded.predict(x).probs, callback.laplace.predict(x).probs)

    expected = Laplace(best, curvature="diag").fit(DataLoader(TRAIN.dataset, batch_size=50))
    numbers = {"network_nll": expected.evaluate(VALIDATION, method="map")["nll"].value}
    tuning = expected.tune(VALIDATION)
    numbers["laplace_prior_precision"] = tuning.prior_precision
    report = expected.evaluate(VALIDATION)
    numbers |= {f"laplace_{name}": report[name].value for name in ("nll", "accuracy", "ece")}
    with next((tmp_path / "csv").rglob("metrics.csv")).open() as file:
        rows = list(csv.DictReader(file))
    in_csv = {key: float(value) for row in rows for key, value in row.items() if value}
    in_tensorboard = logged_in_tensorboard(tmp_path / "tb")
    for name, number in numbers.items():
        assert in_csv[name] == pytest.approx(number, rel=1e-5), name
        assert in_tensorboard[name] == pytest.approx(number, rel=1e-5), name


@pytest.mark.parametrize("network", [None, "inner"])
def test_lightning_has_frozen_weights_that_the_checkpoint_leaves_out(
    lightning, network, tmp_path, unchecked
):
    from lightning.pytorch.callbacks import ModelCheckpoint

    from laplace_debias.integrations.lightning import LaplaceCallback

    trained = module(lightning, network)
    trained.inner[0].requires_grad_(False)
    trained.strict_loading = False
    trained.on_save_checkpoint = lambda checkpoint: [
        checkpoint["state_dict"].pop(f"inner.0.{name}") for name in ("weight", "bias")
    ]
    callback = LaplaceCallback(network=network, curvature="diag", tune=False)
    checkpoints = ModelCheckpoint(tmp_path, monitor="score", mode="max")
    options = {"enable_checkpointing": True}
    trainer(lightning, tmp_path, [callback, checkpoints], **options).fit(trained, TRAIN, VALIDATION)

    state = torch.load(checkpoints.best_model_path, weights_only=False)["state_dict"]
    assert list(state) == ["inner.3.weight", "inner.3.bias"]
    best = mlp().eval()
    best[0].requires_grad_(False)
    best[3].load_state_dict({"weight": state["inner.3.weight"], "bias": state["inner.3.bias"]})
    expected = Laplace(best, curvature="diag").fit(DataLoader(TRAIN.dataset, batch_size=50))
    assert torch.equal(callback.laplace.mean, expected.mean)
    x, _ = VALIDATION.dataset.tensors
    close(callback.laplace.predict(x).probs, expected.predict(x).probs, 1e-5)


def test_lightning_without_checkpoints_has_the_posterior_of_the_last_weights(
    lightning, tmp_path, unchecked
):
    from laplace_debias.integrations.lightning import LaplaceCallback

    callback = LaplaceCallback(params="last_layer", tune=False, mode="mini")
    trained = module(lightning, None)
    trainer(lightning, tmp_path, [callback]).fit(trained, TRAIN)
    assert callback.path == tmp_path / "posterior.safetensors"
    assert callback.path.exists()
    assert callback.laplace.num_data == 200
    weights = nn.utils.parameters_to_vector(trained.inner[3].parameters())
    torch.testing.assert_close(callback.laplace.mean, weights, rtol=0, atol=0)


def test_lightning_without_checkpoints_has_the_posterior_of_averaged_weights(
    lightning, tmp_path, unchecked
):
    from lightning.pytorch.callbacks import StochasticWeightAveraging

    from laplace_debias.integrations.lightning import LaplaceCallback

    callback = LaplaceCallback(curvature="diag", tune=False)
    averaging = StochasticWeightAveraging(1e-2, swa_epoch_start=1)
    trained = module(lightning, None)
    trainer(lightning, tmp_path, [callback, averaging]).fit(trained, TRAIN, VALIDATION)
    weights = nn.utils.parameters_to_vector(averaging._average_model.parameters())
    torch.testing.assert_close(callback.laplace.mean, weights, rtol=0, atol=0)


class RecordingPrecision(nn.Linear):
    """A layer that records the precision of matrix products on a GPU."""

    precisions: ClassVar[set[str]] = set()

    def forward(self, x):
        self.precisions.add(torch.backends.cuda.matmul.fp32_precision)
        return super().forward(x)


@pytest.mark.skipif(
    not hasattr(torch.backends.cuda.matmul, "fp32_precision"), reason="needs torch 2.9"
)
def test_the_posterior_of_a_training_in_tf32_has_full_precision(request):
    request.addfinalizer(lambda: torch.set_float32_matmul_precision("highest"))
    torch.set_float32_matmul_precision("high")
    model = RecordingPrecision(4, 3).eval()
    settings = PosteriorAtEnd("classification", "full", tune=True, options={"curvature": "diag"})
    la = settings.unfitted(model)
    model.precisions.clear()
    settings.fit(la, TRAIN, VALIDATION)
    assert model.precisions == {"ieee"}
    assert torch.get_float32_matmul_precision() == "high"
    assert torch.backends.cuda.matmul.fp32_precision == "tf32"


def test_lightning_refuses_before_the_training(lightning, tmp_path, unchecked):
    from laplace_debias.integrations.lightning import LaplaceCallback

    with pytest.raises(ValueError, match="'half'"):
        LaplaceCallback(mode="half")
    for callback, loaders, message in (
        (LaplaceCallback(), (TRAIN, None), r"the run has none\. Pass validation data"),
        (LaplaceCallback(network="body"), (TRAIN, VALIDATION), r"no network='body'.*\(inner\)"),
        (LaplaceCallback(curvature="block"), (TRAIN, VALIDATION), "'block'"),
        (LaplaceCallback(mode="auto", curvature="diag"), (TRAIN, VALIDATION), "got 'diag'"),
        (LaplaceCallback(mode="auto"), (VALIDATION, VALIDATION), "in the order of the data set"),
        (LaplaceCallback(), ([TRAIN, TRAIN], VALIDATION), "has 2 training loaders"),
        (LaplaceCallback(), (TRAIN, [VALIDATION] * 2), "has 2 validation loaders"),
    ):
        trained = module(lightning, None)
        weights = nn.utils.parameters_to_vector(trained.parameters())
        with pytest.raises(ValueError, match=message):
            trainer(lightning, tmp_path, [callback]).fit(trained, *loaders)
        assert torch.equal(nn.utils.parameters_to_vector(trained.parameters()), weights)


def test_lightning_refuses_two_callbacks_with_one_file(lightning, tmp_path, unchecked):
    from laplace_debias.integrations.lightning import LaplaceCallback

    callbacks = [LaplaceCallback(params="last_layer"), LaplaceCallback(curvature="diag")]
    with pytest.raises(ValueError, match="2 LaplaceCallbacks, which would save"):
        trainer(lightning, tmp_path, callbacks).fit(module(lightning, None), TRAIN, VALIDATION)
    assert not list(tmp_path.rglob("*.safetensors"))


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)
        self.second = nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.second(self.first(x).tanh()).tanh())


@pytest.mark.parametrize("network", [None, "inner"])
def test_lightning_keeps_weights_tied(lightning, network, tmp_path, unchecked):
    from laplace_debias.integrations.lightning import LaplaceCallback

    callback = LaplaceCallback(network=network, curvature="full", tune=False)
    trained = module(lightning, network, Tied)
    run = trainer(lightning, tmp_path, [callback], enable_checkpointing=True)
    run.fit(trained, TRAIN, VALIDATION)
    assert callback.path.parent.name == "checkpoints"
    # The user's module has its weights in another storage.
    user_model = trained if network is None else trained.inner
    assert callback.laplace.mean.data_ptr() != next(user_model.parameters()).data_ptr()

    model = trained.inner.double().eval()
    names = [name for name, _ in model.named_parameters()]
    x = TRAIN.dataset.tensors[0].double()
    precision = len(x) * ggn(model, x, "classification", names)
    precision = precision + torch.eye(len(precision))
    expected = functional_covariance(flat_jacobian(model, x[:5], names), precision.inverse())
    assert len(callback.laplace.mean) == len(precision) == 31
    close(callback.laplace.functional(x[:5].float())[1].double(), expected, 1e-5)
    loaded = Laplace.load(callback.path, user_model.float().eval())
    close(loaded.functional(x[:5].float())[1].double(), expected, 1e-5)


def precision_of(model, x, num_data):
    """The diagonal of the posterior precision, from the GGN of the examples."""
    names = [name for name, _ in model.named_parameters()]
    return num_data * ggn(model, x, "classification", names).diagonal() + 1


def precision_diagonal(la):
    return la.posterior.precision.to_dense().diagonal().double()


DROPPING = {
    "drop_last": {"batch_size": 60, "drop_last": True},
    "batch sampler": {"batch_sampler": BatchSampler(range(200), 60, drop_last=True)},
}


@pytest.mark.parametrize("name", DROPPING)
def test_lightning_scales_the_curvature_if_a_batch_is_dropped(lightning, name, tmp_path, unchecked):
    from laplace_debias.integrations.lightning import LaplaceCallback

    loader = DataLoader(TRAIN.dataset, **DROPPING[name])
    callback = LaplaceCallback(network="inner", curvature="diag", tune=False)
    trained = module(lightning, "inner")
    trainer(lightning, tmp_path, [callback]).fit(trained, loader, VALIDATION)
    assert callback.laplace.num_data == 200
    read = TRAIN.dataset.tensors[0][:180].double()
    expected = precision_of(trained.inner.double().eval(), read, 200)
    close(precision_diagonal(callback.laplace), expected, 1e-5)


SAMPLERS = {
    "weighted": (lambda: WeightedRandomSampler(torch.ones(200), 150), 200),
    "subset": (lambda: SubsetRandomSampler(range(130)), 130),
}


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("mode", ["full", "mini"])
@pytest.mark.parametrize("name", SAMPLERS)
def test_lightning_has_the_size_of_the_data_that_a_sampler_draws_from(
    lightning, name, mode, drop_last, tmp_path, unchecked
):
    from laplace_debias.integrations.lightning import LaplaceCallback

    make, num_data = SAMPLERS[name]
    loader = DataLoader(TRAIN.dataset, 60, sampler=make(), drop_last=drop_last)
    callback = LaplaceCallback(params="last_layer", mode=mode, tune=False)
    run = trainer(lightning, tmp_path, [callback])
    run.fit(module(lightning, None), loader, VALIDATION)
    assert callback.laplace.num_data == num_data


def test_lightning_refuses_validation_data_with_repeated_examples(lightning, tmp_path, unchecked):
    from laplace_debias.integrations.lightning import LaplaceCallback

    sampler = WeightedRandomSampler(torch.ones(len(VALIDATION.dataset)), 50)
    repeated = DataLoader(VALIDATION.dataset, batch_size=50, sampler=sampler)
    trained = module(lightning, None)
    run = trainer(lightning, tmp_path, [LaplaceCallback(params="last_layer")])
    with pytest.raises(ValueError, match=r"draws 50 of .* held-out data must contain each"):
        run.fit(trained, TRAIN, repeated)
    assert torch.equal(trained.inner[0].weight, mlp()[0].weight)


def test_lightning_opens_a_validation_loader_that_training_does_not_use(
    lightning, tmp_path, unchecked
):
    from laplace_debias.integrations.lightning import LaplaceCallback

    callback = LaplaceCallback(curvature="diag")
    options = {"num_sanity_val_steps": 0, "check_val_every_n_epoch": 4}
    trained = module(lightning, None)
    trainer(lightning, tmp_path, [callback], **options).fit(trained, TRAIN, VALIDATION)
    expected = Laplace(trained.inner.eval(), curvature="diag").fit(
        DataLoader(TRAIN.dataset, batch_size=50)
    )
    tuned = expected.tune(VALIDATION)
    assert callback.laplace.prior_precision == tuned.prior_precision

    with pytest.raises(ValueError, match="has 2 validation loaders"):
        trainer(lightning, tmp_path, [callback], **options).fit(trained, TRAIN, [VALIDATION] * 2)


class Batches:
    """A loader that is no `DataLoader`."""

    def __iter__(self):
        return iter([tuple(TRAIN.dataset.tensors)])


LOADERS = {
    "in this process": lambda: TRAIN,
    "in a process of its own": lambda: DataLoader(
        TRAIN.dataset, 50, shuffle=True, num_workers=1, persistent_workers=True
    ),
    "no DataLoader": Batches,
}


@pytest.mark.parametrize(
    ("precision", "loader"),
    [
        ("64-true", "in this process"),
        ("bf16-true", "in this process"),
        ("bf16-true", "in a process of its own"),
        ("bf16-true", "no DataLoader"),
    ],
)
def test_lightning_has_batches_of_the_precision_of_the_run(
    lightning, precision, loader, tmp_path, unchecked
):
    from laplace_debias.integrations.lightning import LaplaceCallback

    callback = LaplaceCallback(network="inner", curvature="diag")
    trained = module(lightning, "inner")
    run = trainer(lightning, tmp_path, [callback], precision=precision)
    run.fit(trained, LOADERS[loader](), VALIDATION)
    parameter = next(trained.parameters())
    x = TRAIN.dataset.tensors[0].to(parameter.dtype).double()
    expected = precision_of(trained.inner.double().eval(), x, 200) - 1
    prior_precision = callback.laplace.prior_precision
    close(precision_diagonal(callback.laplace) - prior_precision, expected, 1e-4)


@pytest.mark.parametrize("hook", ["on_before_batch_transfer", "on_after_batch_transfer"])
@pytest.mark.parametrize("place", ["module", "data module"])
def test_lightning_refuses_hooks_that_change_the_batches(
    lightning, place, hook, tmp_path, unchecked
):
    from laplace_debias.integrations.lightning import LaplaceCallback

    class Data(lightning.LightningDataModule):
        def train_dataloader(self):
            return TRAIN

        def val_dataloader(self):
            return VALIDATION

    trained = module(lightning, "inner")
    data = Data()
    owner = type(trained) if place == "module" else Data
    setattr(owner, hook, lambda self, batch, _: (3 * batch[0], batch[1]))
    run = trainer(lightning, tmp_path, [LaplaceCallback(network="inner")])
    with pytest.raises(ValueError, match=rf"{owner.__name__}\.{hook} may change the batches"):
        run.fit(trained, data)
    assert torch.equal(trained.inner[0].weight, mlp()[0].weight)


def test_lightning_accepts_hooks_if_a_function_makes_their_changes(lightning, tmp_path, unchecked):
    from laplace_debias.integrations.lightning import LaplaceCallback

    def tripled(batch, *_):
        return 3 * batch[0], batch[1]

    trained = module(lightning, "inner")
    type(trained).on_after_batch_transfer = lambda self, batch, _: tripled(batch)
    callback = LaplaceCallback(network="inner", curvature="diag", batch=tripled)
    trainer(lightning, tmp_path, [callback]).fit(trained, TRAIN, VALIDATION)
    x = 3 * TRAIN.dataset.tensors[0].double()
    expected = precision_of(trained.inner.double().eval(), x, 200) - 1
    prior_precision = callback.laplace.prior_precision
    close(precision_diagonal(callback.laplace) - prior_precision, expected, 1e-4)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(TRAIN.dataset)


def test_lightning_refuses_a_part_of_data_of_unknown_size(lightning, tmp_path, unchecked):
    from laplace_debias.integrations.lightning import LaplaceCallback

    stream = DataLoader(Stream(), batch_size=50)
    callback = LaplaceCallback(params="last_layer", mode="mini", tune=False)
    trained = module(lightning, None)
    with pytest.raises(ValueError, match=r'cannot be inferred .* Pass `mode="full"`'):
        trainer(lightning, tmp_path, [callback]).fit(trained, stream)
    assert torch.equal(trained.inner[0].weight, mlp()[0].weight)
    callback = LaplaceCallback(params="last_layer", tune=False)
    trainer(lightning, tmp_path, [callback]).fit(trained, stream)
    assert callback.laplace.num_data == 200


class Iterable:
    """A loader that can be read once."""

    def __init__(self):
        self._batches = iter(TRAIN)

    def __iter__(self):
        return self

    def __next__(self):
        return next(self._batches)


def with_targets(targets):
    return DataLoader(TensorDataset(TRAIN.dataset.tensors[0], targets), batch_size=50)


@pytest.mark.parametrize(
    ("train", "validation", "options", "message"),
    [
        (with_targets(torch.zeros(200, 2).long()), VALIDATION, {}, r"got shape \(50, 2\)"),
        (TRAIN, with_targets(torch.full((200,), 3)), {}, "between 0 and 2, got 3"),
        (TRAIN, VALIDATION, {"likelihood": "regression"}, r"(?i)targets"),
        (TRAIN, DataLoader(VALIDATION.dataset.tensors[0], 50), {}, "must be pairs"),
        (DataLoader(TRAIN.dataset, 500, drop_last=True), VALIDATION, {}, "contains no examples"),
        (Iterable(), VALIDATION, {}, r"iterator \(Iterable\)"),
    ],
)
def test_lightning_checks_the_first_batches(
    lightning, train, validation, options, message, tmp_path, unchecked
):
    from laplace_debias.integrations.lightning import LaplaceCallback

    trained = module(lightning, "inner")
    callback = LaplaceCallback(**options, network="inner", params="last_layer")
    run = trainer(lightning, tmp_path, [callback], num_sanity_val_steps=0)
    with pytest.raises((TypeError, ValueError), match=message):
        run.fit(trained, train, validation)
    assert run.global_step == 0
    assert torch.equal(trained.inner[0].weight, mlp()[0].weight)


def with_random_numbers(examples):
    """Collate examples, and augment them with each of the global generators."""
    x, y = torch.utils.data.default_collate(examples)
    return x + 0.1 * torch.randn_like(x) + random.random() + np.random.rand(), y


def with_running_statistics():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 3))


@pytest.mark.parametrize("has_generator", [False, True])
def test_the_checks_do_not_change_the_training(lightning, has_generator, tmp_path, unchecked):
    from laplace_debias.integrations.lightning import LaplaceCallback

    states = []
    for callbacks in ([], [LaplaceCallback(network="inner", curvature="diag")]):
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)
        generator = torch.Generator().manual_seed(2) if has_generator else None
        train = DataLoader(
            TRAIN.dataset, 50, shuffle=True, generator=generator, collate_fn=with_random_numbers
        )
        trained = module(lightning, "inner", with_running_statistics)
        trainer(lightning, tmp_path, callbacks).fit(trained, train, VALIDATION)
        states.append(trained.state_dict())
    for name, tensor in states[0].items():
        assert torch.equal(tensor, states[1][name]), name


def test_the_checks_leave_no_worker_processes():
    generator = torch.Generator().manual_seed(2)
    loader = DataLoader(
        TRAIN.dataset,
        50,
        shuffle=True,
        generator=generator,
        num_workers=2,
        persistent_workers=True,
    )
    state = generator.get_state()
    # Workers of an earlier test live until its loader is collected.
    earlier_workers = set(multiprocessing.active_children())
    settings = PosteriorAtEnd("classification", "full", tune=False, options={})
    settings.check(mlp(), loader, None)
    assert torch.equal(generator.get_state(), state)
    assert loader._iterator is None
    assert set(multiprocessing.active_children()) <= earlier_workers


class Masking:
    """A collator that has its own generator and refers to the network, as Hugging Face's may."""

    def __init__(self, network):
        self.network = network
        self.generator = torch.Generator().manual_seed(0)

    def __call__(self, examples):
        x, y = torch.utils.data.default_collate(examples)
        assert self.network.inner.weight.data_ptr() == self.network.address
        return x * (torch.rand(x.shape, generator=self.generator) > 0.1), y


class Addressed(nn.Module):
    """A network that records the address of its weight, so that a copy can be recognised."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 3)
        self.address = self.inner.weight.data_ptr()

    def forward(self, x):
        return self.inner(x)


def test_the_checks_do_not_advance_the_generator_of_a_collator():
    network = Addressed()
    collate = Masking(network)
    loader = DataLoader(TRAIN.dataset, 50, shuffle=True, collate_fn=collate)
    state = collate.generator.get_state()
    settings = PosteriorAtEnd("classification", "full", tune=True, options={})
    settings.check(network, loader, loader)
    assert torch.equal(collate.generator.get_state(), state)


def test_the_checks_include_batches_of_a_collator_that_cannot_be_copied(tmp_path):
    network = Addressed()
    collate = Masking(network)
    collate.log = (tmp_path / "log").open("w")
    x, y = TRAIN.dataset.tensors
    loader = DataLoader(TensorDataset(x, y + 5), 50, collate_fn=collate)
    settings = PosteriorAtEnd("classification", "full", tune=False, options={})
    with collate.log, pytest.raises(ValueError, match="classes"):
        settings.check(network, loader, None)


def test_the_checks_warn_if_memory_is_too_small(monkeypatch):
    monkeypatch.setattr(plans, "available_memory", lambda _: 1_000)
    settings = PosteriorAtEnd("classification", "auto", tune=False, options={})
    with pytest.warns(UserWarning, match="may not fit into memory at the end of training"):
        settings.check(mlp(), TRAIN, None)


class Gated(nn.Module):
    """Two experts; the sign of the first input decides which of them an example uses."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(4, 8), nn.Linear(4, 8)])
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        hidden = x.new_zeros(len(x), 8)
        for index, expert in enumerate(self.experts):
            (rows,) = torch.where((x[:, 0] > 0) == bool(index))
            if len(rows):
                hidden = hidden.index_put((rows,), expert(x[rows]))
        return self.head(hidden.tanh())


def test_the_checks_accept_an_expert_that_the_first_batch_does_not_use():
    x, y = TRAIN.dataset.tensors
    order = x[:, 0].argsort()
    loader = DataLoader(TensorDataset(x[order], y[order]), 50)
    names = ["experts.0.weight", "experts.1.weight", "head.weight"]
    settings = PosteriorAtEnd("classification", "full", tune=False, options={"params": names})
    model = Gated().eval()
    with pytest.warns(UserWarning, match=r"fails if its data is like this.*experts\.1\.weight"):
        settings.check(model, loader, None)
    la = settings.unfitted(model)
    settings.fit(la, loader, None)
    assert len(la.mean) == 4 * 8 * 2 + 8 * 3
    settings = PosteriorAtEnd("classification", "full", tune=False, options={})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        settings.check(Gated(), loader, None)


def test_lightning_accepts_a_dictionary_with_one_loader(lightning, tmp_path, unchecked):
    from laplace_debias.integrations.lightning import LaplaceCallback

    callback = LaplaceCallback(network="inner", curvature="diag")
    trained = module(lightning, "inner")
    trainer(lightning, tmp_path, [callback]).fit(trained, TRAIN, {"a": VALIDATION})
    expected = Laplace(trained.inner.eval(), curvature="diag").fit(
        DataLoader(TRAIN.dataset, batch_size=50)
    )
    assert callback.tuning.prior_precision == expected.tune(VALIDATION).prior_precision


# ------------------------------------------------- Hugging Face


def hugging_face_trainer(folder, model=None, **options):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=20,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=8,
        num_labels=2,
    )
    tokens = torch.randint(1, 20, (80, 6), generator=torch.Generator().manual_seed(1))
    labels = (tokens.float().mean(1) > 10).long()
    examples = [
        {"input_ids": row, "attention_mask": torch.ones_like(row), "labels": label}
        for row, label in zip(tokens, labels, strict=True)
    ]
    arguments = {
        "num_train_epochs": 2,
        "per_device_train_batch_size": 20,
        "learning_rate": 1e-2,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "save_strategy": "epoch",
        "eval_strategy": "epoch",
        **options,
    }
    return transformers.Trainer(
        model=model or transformers.BertForSequenceClassification(config),
        args=transformers.TrainingArguments(output_dir=str(folder), **arguments),
        train_dataset=examples[:50],
        eval_dataset=examples[50:],
    )


@pytest.mark.slow
def test_the_trainer_has_a_posterior_next_to_its_checkpoint(tmp_path, monkeypatch, unchecked):
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "tb"))
    pytest.importorskip("tensorboard")
    run = hugging_face_trainer(tmp_path / "run", report_to="tensorboard")
    from laplace_debias.integrations.transformers import LaplaceCallback

    callback = LaplaceCallback(run, params="last_layer")
    assert repr(callback).endswith("params='last_layer'): not fitted")
    run.add_callback(callback)
    run.train()

    folder = tmp_path / "run" / "checkpoint-6"
    assert callback.folder == folder
    model = type(run.model).from_pretrained(folder).eval()
    loaded = Laplace.from_pretrained(folder, model)
    batches = list(run.get_eval_dataloader())
    assert torch.equal(loaded.predict(batches[0]).probs, callback.laplace.predict(batches[0]).probs)
    report = loaded.evaluate(batches)
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert f"| nll | {report['nll'].value:.4f} |" in card
    logged = {key: value for row in run.state.log_history for key, value in row.items()}
    in_tensorboard = logged_in_tensorboard(tmp_path / "tb")
    for name in ("nll", "accuracy", "overconfidence"):
        assert logged[f"eval_laplace_{name}"] == pytest.approx(report[name].value, rel=1e-5)
        assert in_tensorboard[f"eval/laplace_{name}"] == pytest.approx(report[name], rel=1e-5)
    losses = [nn.functional.cross_entropy(model(**b).logits, b["labels"]) for b in batches]
    sizes = [len(b["labels"]) for b in batches]
    nll = sum(float(loss) * size for loss, size in zip(losses, sizes, strict=True)) / sum(sizes)
    assert logged["eval_network_nll"] == pytest.approx(nll, rel=1e-4)


def test_the_trainer_callback_compares_the_label_smoothing(tmp_path, unchecked):
    run = hugging_face_trainer(tmp_path, label_smoothing_factor=0.1, max_steps=1)
    from laplace_debias.integrations.transformers import LaplaceCallback

    callback = LaplaceCallback(run, params="last_layer")
    run.add_callback(callback)
    with pytest.warns(UserWarning, match=r"Pass Categorical\(label_smoothing=0\.1\)"):
        run.train()
    assert callback.tuning.prior_precision == float(callback.laplace.prior_precision)
    assert callback.tuning.message
    run.remove_callback(callback)
    matching = LaplaceCallback(run, Categorical(label_smoothing=0.1), params="last_layer")
    run.add_callback(matching)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "The trainer's loss")
        run.train()
    assert matching.laplace.likelihood.label_smoothing == 0.1


@pytest.mark.slow
def test_the_trainer_fits_adapters_and_the_best_weights(tmp_path, unchecked):
    peft = pytest.importorskip("peft")
    base = hugging_face_trainer(tmp_path / "unused").model
    config = peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "value"])
    run = hugging_face_trainer(
        tmp_path,
        peft.get_peft_model(base, config),
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        save_only_model=True,
    )
    from laplace_debias.integrations.transformers import LaplaceCallback

    callback = LaplaceCallback(run, curvature="diag")
    run.add_callback(callback)
    run.train()
    assert callback.folder == Path(run.state.best_model_checkpoint)
    assert "## Posterior" in (callback.folder / "README.md").read_text(encoding="utf-8")
    trainable = {name for name, p in run.model.named_parameters() if p.requires_grad}
    assert set(callback.laplace.param_names) == trainable
    loaded = Laplace.from_pretrained(callback.folder, run.model.eval())
    batch = next(iter(run.get_eval_dataloader()))
    assert torch.equal(loaded.predict(batch).probs, callback.laplace.predict(batch).probs)


class Logits(nn.Module):
    """The logits of a Hugging Face model for tokens without padding."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, tokens):
        return self.model(input_ids=tokens).logits


def without_mixed_precision(run):
    """A model with the trained weights, in double precision."""
    plain = type(run.model)(run.model.config).double().eval()
    plain.load_state_dict(run.model.state_dict())
    return Logits(plain)


@pytest.mark.parametrize("params", ["all", "last_layer"])
def test_the_trainers_mixed_precision_does_not_reach_the_posterior(params, tmp_path, unchecked):
    run = hugging_face_trainer(tmp_path, bf16=True)
    from laplace_debias.integrations.transformers import LaplaceCallback

    callback = LaplaceCallback(run, params=params, curvature="diag")
    run.add_callback(callback)
    run.train()
    train, evaluation = (
        torch.stack([example["input_ids"] for example in examples])
        for examples in (run.train_dataset, run.eval_dataset)
    )
    batches = [{"input_ids": train, "labels": torch.zeros(len(train), dtype=torch.long)}]
    run.model.eval()
    by_hand = Laplace(run.model, params=params, curvature="diag").fit_batches(batches)
    assert torch.is_autocast_enabled("cpu") is False
    plain = without_mixed_precision(run)
    for la in (callback.laplace, by_hand):
        names = [f"model.{name}" for name in la.param_names]
        precision = len(train) * ggn(plain, train, "classification", names).diagonal()
        precision = precision + la.prior_precision
        close(precision_diagonal(la), precision, 1e-4)
        J = flat_jacobian(plain, evaluation[:5], names)
        covariance = la.functional({"input_ids": evaluation[:5]})[1]
        close(covariance.double(), (J / precision) @ J.mT, 1e-4)
        assert la.predict({"input_ids": evaluation[:5]}).probs.dtype == torch.float32


def test_the_trainer_scales_the_curvature_if_a_batch_is_dropped(tmp_path, unchecked):
    run = hugging_face_trainer(tmp_path, dataloader_drop_last=True)
    from laplace_debias.integrations.transformers import LaplaceCallback

    callback = LaplaceCallback(run, params="last_layer", tune=False)
    run.add_callback(callback)
    run.train()
    assert callback.laplace.num_data == 50
    with pytest.raises(ValueError, match="leaves out 10 of its 50 examples"):
        Laplace(run.model.eval(), params="last_layer").fit(run.get_train_dataloader())


def test_the_trainer_callback_refuses_a_part_of_data_of_unknown_size(tmp_path, unchecked):
    run = hugging_face_trainer(tmp_path, max_steps=3)
    from laplace_debias.integrations.transformers import LaplaceCallback

    class Examples(IterableDataset):
        def __iter__(self):
            return iter(run.eval_dataset)

    run.train_dataset = Examples()
    run.add_callback(LaplaceCallback(run, params="last_layer", mode="mini"))
    weights = nn.utils.parameters_to_vector(run.model.parameters()).detach().clone()
    with pytest.raises(ValueError, match=r'cannot be inferred .* Pass `mode="full"`'):
        run.train()
    assert torch.equal(nn.utils.parameters_to_vector(run.model.parameters()), weights)


def test_the_trainer_callback_refuses_data_in_order_for_auto(tmp_path, unchecked):
    run = hugging_face_trainer(tmp_path)
    # Earlier versions of the Trainer have no option for this order.
    run._get_train_sampler = lambda *_: SequentialSampler(run.train_dataset)
    from laplace_debias.integrations.transformers import LaplaceCallback

    run.add_callback(LaplaceCallback(run, mode="auto"))
    weights = nn.utils.parameters_to_vector(run.model.parameters()).detach().clone()
    with pytest.raises(ValueError, match="in the order of the data set"):
        run.train()
    assert torch.equal(nn.utils.parameters_to_vector(run.model.parameters()), weights)


@pytest.mark.parametrize(
    ("problem_type", "remedy"),
    [("multi_label_classification", "multilabel"), ("regression", "regression")],
)
def test_the_trainer_callback_refuses_the_likelihood_of_another_loss(
    problem_type, remedy, tmp_path, unchecked
):
    run = hugging_face_trainer(tmp_path, max_steps=1)
    run.model.config.problem_type = problem_type
    for dataset in (run.train_dataset, run.eval_dataset):
        for example in dataset:
            example["labels"] = nn.functional.one_hot(example["labels"], 2).float()
    from laplace_debias.integrations.transformers import LaplaceCallback

    callback = LaplaceCallback(run, params="last_layer")
    run.add_callback(callback)
    weights = nn.utils.parameters_to_vector(run.model.parameters()).detach().clone()
    with pytest.raises(ValueError, match=f'problem_type="{problem_type}".*Pass "{remedy}"'):
        run.train()
    assert torch.equal(nn.utils.parameters_to_vector(run.model.parameters()), weights)
    run.remove_callback(callback)
    run.add_callback(LaplaceCallback(run, remedy, params="last_layer"))
    run.train()


def test_the_trainer_callback_refuses_before_the_training(tmp_path, unchecked):
    run = hugging_face_trainer(tmp_path, eval_strategy="no")
    from laplace_debias.integrations.transformers import LaplaceCallback

    with pytest.raises(TypeError, match="trainer must be Trainer, got str"):
        LaplaceCallback("classification")
    with pytest.raises(ValueError, match="'block'"):
        LaplaceCallback(run, curvature="block")
    with pytest.raises(ValueError, match="'half'"):
        LaplaceCallback(run, mode="half")
    run.eval_dataset = {"a": run.eval_dataset, "b": run.eval_dataset}
    with pytest.raises(ValueError, match="has 2 evaluation data sets"):
        LaplaceCallback(run)
    run.eval_dataset = None
    with pytest.raises(ValueError, match="the run has none"):
        LaplaceCallback(run)
    assert run.model.training


def test_the_trainer_refuses_two_callbacks_with_one_folder(tmp_path, unchecked):
    run = hugging_face_trainer(tmp_path)
    from laplace_debias.integrations.transformers import LaplaceCallback

    for curvature in ("kfac", "diag"):
        run.add_callback(LaplaceCallback(run, params="last_layer", curvature=curvature))
    with pytest.raises(ValueError, match="2 LaplaceCallbacks, which would save"):
        run.train()


def untouched(run, weights):
    """Whether the trainer's model has the given weights and is in training mode."""
    trained = nn.utils.parameters_to_vector(run.model.parameters())
    return run.model.training and run.state.global_step == 0 and torch.equal(trained, weights)


@pytest.mark.parametrize(
    ("options", "changed_labels", "message"),
    [
        ({"likelihood": "regression"}, None, "(?i)targets"),
        ({"curvature": "gp"}, None, '`curvature="gp"` stores inducing inputs'),
        ({}, "training", "none of them has a name of targets"),
        ({}, "evaluation", "none of them has a name of targets"),
    ],
)
def test_the_trainer_callback_checks_the_first_batches(
    options, changed_labels, message, tmp_path, unchecked
):
    run = hugging_face_trainer(tmp_path, eval_strategy="no", save_strategy="no", max_steps=1)
    from laplace_debias.integrations.transformers import LaplaceCallback

    data = {"training": run.train_dataset, "evaluation": run.eval_dataset}
    for example in data.get(changed_labels, ()):
        del example["labels"]
    callback = LaplaceCallback(run, **options)
    run.add_callback(callback)
    weights = nn.utils.parameters_to_vector(run.model.parameters()).detach().clone()
    with pytest.raises((TypeError, ValueError), match=message) as raised:
        run.train()
    assert untouched(run, weights)
    place = changed_labels.replace("evaluation", "validation") if changed_labels else "training"
    assert raised.value.__notes__ == [
        f"The posterior was checked on the first batch of the {place} data."
    ]


def test_the_trainer_callback_refuses_a_tied_last_layer_before_the_training(tmp_path, unchecked):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=20, n_positions=8, n_embd=8, n_layer=1, n_head=2)
    run = hugging_face_trainer(tmp_path, transformers.GPT2LMHeadModel(config), max_steps=1)
    for example in (*run.train_dataset, *run.eval_dataset):
        example["labels"] = example["input_ids"]
    from laplace_debias.integrations.transformers import LaplaceCallback

    run.add_callback(LaplaceCallback(run, params="last_layer"))
    weights = nn.utils.parameters_to_vector(run.model.parameters()).detach().clone()
    with pytest.raises((ValueError, NotImplementedError), match="lm_head"):
        run.train()
    assert untouched(run, weights)


def test_the_trainers_training_is_the_same_with_the_callback(tmp_path, unchecked):
    states = []
    for has_callback in (False, True):
        run = hugging_face_trainer(tmp_path / str(has_callback))
        from laplace_debias.integrations.transformers import LaplaceCallback

        if has_callback:
            run.add_callback(LaplaceCallback(run, curvature="diag"))
        run.train()
        states.append(run.model.state_dict())
    for name, tensor in states[0].items():
        assert torch.equal(tensor, states[1][name]), name


class OwnLabels(nn.Module):
    """A classifier whose targets have a name of their own."""

    def __init__(self):
        super().__init__()
        self.table = nn.EmbeddingBag(20, 2)

    def forward(self, input_ids, species=None):
        logits = self.table(input_ids)
        if species is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits, species), "logits": logits}


def test_the_trainer_callback_has_the_name_of_the_targets(tmp_path, unchecked):
    run = hugging_face_trainer(tmp_path, OwnLabels(), label_names=["species"])
    for example in (*run.train_dataset, *run.eval_dataset):
        example["species"] = example.pop("labels")
    from laplace_debias.integrations.transformers import LaplaceCallback

    callback = LaplaceCallback(run, curvature="diag", tune=False)
    run.add_callback(callback)
    run.train()
    examples = run.train_dataset
    pairs = TensorDataset(
        torch.stack([example["input_ids"] for example in examples]),
        torch.stack([example["species"] for example in examples]),
    )
    expected = Laplace(run.model.eval(), curvature="diag").fit(DataLoader(pairs, 20))
    close(precision_diagonal(callback.laplace), precision_diagonal(expected), 1e-5)


def test_the_trainer_callback_accepts_a_dictionary_with_one_evaluation_set(tmp_path, unchecked):
    run = hugging_face_trainer(tmp_path, eval_strategy="no")
    evaluation_data = run.eval_dataset
    run.eval_dataset = {"a": evaluation_data}
    from laplace_debias.integrations.transformers import LaplaceCallback

    callback = LaplaceCallback(run, params="last_layer")
    run.add_callback(callback)
    run.train()
    expected = Laplace(run.model.eval(), params="last_layer").fit(run.get_train_dataloader())
    tuning = expected.tune(run.get_eval_dataloader(evaluation_data))
    assert callback.tuning.prior_precision == pytest.approx(tuning.prior_precision)
