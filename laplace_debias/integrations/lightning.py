"""A callback for Lightning's Trainer: `pip install laplace-debias[lightning]`."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from laplace_debias.curvature.losses.likelihoods import Likelihood
from laplace_debias.integrations.end_of_training import (
    NO_VALIDATION_DATA,
    PosteriorAtEnd,
    check_only_one,
    copy_in_eval_mode,
)
from laplace_debias.laplace import Laplace
from laplace_debias.laplace.fitting.modes import check_mode
from laplace_debias.laplace.tuning.result import Tuning
from laplace_debias.system.checks import imports_of_extra

with imports_of_extra("lightning", "lightning"):
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.utilities.model_helpers import is_overridden

__all__ = ["LaplaceCallback"]


class LaplaceCallback(Callback):
    """A callback that fits, tunes, logs and saves a posterior when training ends.

    The posterior is fitted to the best checkpoint, or to the last checkpoint if no metric is
    monitored. The posterior is saved next to the checkpoint, as `NAME.posterior.safetensors` for
    `NAME.ckpt`, or in the trainer's `default_root_dir` if there are no checkpoints. If it is tuned,
    metrics on the validation data are logged to the loggers of the run: `laplace_nll` and others,
    `network_nll` and others for the network without the posterior, and `laplace_prior_precision`.
    The module itself is not changed, because a copy is used.

    Args:
        likelihood: The likelihood; see `Laplace`.
        network: The attribute of the LightningModule that contains the network, such as `"model"`
            or `"model.backbone"`. Default: the module itself, if its `forward` returns the outputs.
        mode: How much of the training data to use; see `Laplace.fit`.
        tune: Whether to tune and evaluate on the validation data.
        **options: Other arguments of `Laplace`, such as `params="last_layer"`, or `batch=` for
            batches that are not pairs or that a hook changes.

    Attributes:
        laplace: The fitted posterior; None before the end of training.
        tuning: The result of `tune`, which explains the choice; None before the end of training, or
            without tuning.
        path: The file to which the posterior was saved; None before the end of training, or with
            `fast_dev_run`, which writes no files.

    Raises:
        ValueError: When training starts, if the module has no such network, there is no validation
            loader, there are several loaders, the trainer has several of these callbacks, or a hook
            of the module or the data module may change the batches and `batch=` is missing. Also
            raises the errors of `Laplace`, and those of `Laplace.plan` for the first batches.
        TypeError: When training starts, if a loader is an iterator.

    Example:
        >>> from laplace_debias.integrations.lightning import LaplaceCallback
        >>> callback = LaplaceCallback("classification", params="last_layer")
        >>> # Trainer(callbacks=[callback]).fit(module, train_loader, validation_loader)
        >>> # callback.laplace.predict(x)
    """

    laplace: Laplace | None = None
    tuning: Tuning | None = None
    path: Path | None = None

    def __init__(
        self,
        likelihood: str | Likelihood = "classification",
        *,
        network: str | None = None,
        mode: str = "full",
        tune: bool = True,
        **options: Any,
    ) -> None:
        check_mode(mode, None)
        self._network_name = network
        self._settings = PosteriorAtEnd(likelihood, mode, tune, options)

    def __repr__(self) -> str:
        return self._settings.describe_callback(self.path)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check the options, the loaders and their first batches before training starts."""
        untyped_trainer: Any = trainer  # Lightning sets `callbacks` without declaring it.
        check_only_one(untyped_trainer.callbacks, LaplaceCallback)
        if "batch" not in self._settings.options:
            _check_hooks(trainer, pl_module)
        validation_loader = _validation_loader(trainer) if self._settings.tune else None
        network = self._network(pl_module)
        self._settings.check(network, _training_loader(trainer), validation_loader)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Fit, tune, log and save the posterior, after the last checkpoint has been written."""
        network = copy_in_eval_mode(self._network(pl_module))
        checkpoint = _best_checkpoint(trainer)
        if checkpoint is None:
            path = Path(trainer.default_root_dir) / "posterior.safetensors"
        else:
            path = checkpoint.with_suffix(".posterior.safetensors")
            network = _with_state(network, checkpoint, self._network_name, pl_module)
        validation_loader = _validation_loader(trainer) if self._settings.tune else None
        la = self._settings.unfitted(network)
        result = self._settings.fit(la, _training_loader(trainer), validation_loader)
        for logger in trainer.loggers:
            logger.log_metrics(dict(result.numbers), step=trainer.global_step)
        # Set the attribute first, so that the posterior is not lost if saving fails.
        self.laplace = la
        self.tuning = result.tuning
        untyped_trainer: Any = trainer  # Lightning sets `fast_dev_run` without declaring it.
        if untyped_trainer.fast_dev_run:  # There are no checkpoints either.
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        la.save(path)
        self.path = path

    def _network(self, pl_module: LightningModule) -> nn.Module:
        """Return the network that the option `network` selects in the module."""
        if self._network_name is None:
            return pl_module
        try:
            network = attrgetter(self._network_name)(pl_module)
        except AttributeError:
            network = None
        if not isinstance(network, nn.Module):
            names = ", ".join(name for name, _ in pl_module.named_children())
            raise ValueError(
                f"{type(pl_module).__name__} has no network={self._network_name!r}. Pass the name "
                f"of a submodule ({names}), or None for the module itself."
            )
        return network


def _check_hooks(trainer: Trainer, pl_module: LightningModule) -> None:
    """Require that the network receives the batches of the loaders.

    Raises:
        ValueError: If a hook of the module or of the data module may change the batches.
    """
    # The trainer sets this attribute when the training starts.
    data_module = getattr(trainer, "datamodule", None)
    for owner in filter(None, (pl_module, data_module)):
        for hook in ("on_before_batch_transfer", "on_after_batch_transfer"):
            if is_overridden(hook, owner):
                raise ValueError(
                    f"{type(owner).__name__}.{hook} may change the batches of the training, but "
                    "the posterior is fitted to the batches of the loaders. Pass `batch=`, a "
                    "function that makes the same changes. If the hook only augments the training "
                    "data, pass `batch=lambda batch: batch`."
                )


def _training_loader(trainer: Trainer) -> Any:
    """Return the only training loader, with batches converted to the precision of the run."""
    loader = _single_loader(trainer.train_dataloader, "training")
    return _converting_loader(loader, trainer.precision_plugin.convert_input)


def _validation_loader(trainer: Trainer) -> Any:
    """Return the only validation loader, with batches converted to the precision of the run.

    Raises:
        ValueError: If the run has no validation loader, or several validation loaders.
    """
    if not trainer.enable_validation:
        raise ValueError(NO_VALIDATION_DATA)
    if trainer.val_dataloaders is None:
        # Lightning creates the loader before the first validation. If there was no validation,
        # create it here.
        trainer.fit_loop.epoch_loop.val_loop.setup_data()
    loader = _single_loader(trainer.val_dataloaders, "validation")
    return _converting_loader(loader, trainer.precision_plugin.convert_input)


@dataclass(frozen=True)
class _Converted:
    """The batches of a loader that is not a `DataLoader`, converted one by one.

    Attributes:
        loader: The loader.
        convert: A function that converts a batch.
    """

    loader: Iterable[Any]
    convert: Callable[[Any], Any]

    def __iter__(self) -> Iterator[Any]:
        return map(self.convert, self.loader)


@dataclass(frozen=True)
class _ConvertedCollation:
    """Collate a batch and convert it, as a function that can be pickled for worker processes.

    Attributes:
        collate: A function that collates a batch.
        convert: A function that converts a batch.
    """

    collate: Callable[[Any], Any]
    convert: Callable[[Any], Any]

    def __call__(self, examples: Any) -> Any:
        return self.convert(self.collate(examples))


def _converting_loader(loader: Any, convert: Callable[[Any], Any]) -> Any:
    """Return a loader that yields the same batches in the dtype of the run.

    Lightning does the same if `precision` is `"bf16-true"` or `"64-true"`.
    """
    if not isinstance(loader, DataLoader):
        return _Converted(loader, convert)
    converted = copy.copy(loader)
    # Discard a persistent iterator, because its workers would still use the old `collate_fn`.
    converted._iterator = None
    converted.collate_fn = _ConvertedCollation(loader.collate_fn, convert)
    return converted


def _single_loader(loaders: Any, purpose: str) -> Any:
    """Return the loader, and require that there is only one, which can be read several times.

    Raises:
        ValueError: If there are several loaders.
        TypeError: If the loader is an iterator.
    """
    if isinstance(loaders, Iterator):
        raise TypeError(
            f"The {purpose} loader is an iterator ({type(loaders).__name__}), which can be read "
            "only once, but the posterior needs the data after the training. Pass a DataLoader to "
            "the trainer."
        )
    if not isinstance(loaders, (Sequence, Mapping)):
        return loaders
    if len(loaders) != 1:
        raise ValueError(
            f"The run has {len(loaders)} {purpose} loaders, but a posterior is fitted with one. "
            "Pass one loader to the trainer, or use Laplace after the training."
        )
    return next(iter(loaders.values())) if isinstance(loaders, Mapping) else loaders[0]


def _best_checkpoint(trainer: Trainer) -> Path | None:
    """Return the best (or else the last) checkpoint of the run, or None if there is none."""
    callback: Any = trainer.checkpoint_callback
    if callback is None:
        return None
    path = callback.best_model_path or getattr(callback, "last_model_path", "")
    return Path(path) if path else None


def _with_state(
    network: nn.Module, checkpoint: Path, name: str | None, pl_module: LightningModule
) -> nn.Module:
    """Return a copy of a module's network, with the tensors of a checkpoint."""
    # The run itself has written this file, so unpickling it is safe.
    content = torch.load(checkpoint, map_location=pl_module.device, weights_only=False)
    prefix = "" if name is None else f"{name}."
    state = {
        key.removeprefix(prefix): value
        for key, value in content["state_dict"].items()
        if key.startswith(prefix)
    }
    # Load the values into a deep copy, which shares no tensors. With `assign=True`, tied weights
    # would become separate parameters.
    separate = copy.deepcopy(network)
    # With `strict_loading=False`, a module may leave frozen tensors out of its checkpoints.
    separate.load_state_dict(state, strict=pl_module.strict_loading)
    return separate
