"""Load the trained network and the data that the settings specify."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from laplace_debias.curvature.data.batches import Batches
from laplace_debias.curvature.losses.likelihoods import Bernoulli, Categorical, Likelihood
from laplace_debias.curvature.network.calling import as_columns
from laplace_debias.sources.changed import Changed, Corruption, drawn_digits, shuffled_patches
from laplace_debias.sources.data import find_data
from laplace_debias.sources.further_inputs import FurtherInputs, read_further_inputs
from laplace_debias.sources.imports import describe_error
from laplace_debias.sources.likelihoods import (
    likelihood_from_settings,
    likelihood_of_batch,
    task_name,
)
from laplace_debias.sources.loaded import Loaded
from laplace_debias.sources.networks import build
from laplace_debias.sources.pixels import Pixels
from laplace_debias.sources.settings import SourceSettings
from laplace_debias.sources.splits import Splits, batches_of
from laplace_debias.system.shown import counted


def load(settings: SourceSettings, likelihood: Likelihood | None = None) -> Loaded:
    """Load a network and its data, and check that they match.

    Images in folders are not decoded until a loader reads them.

    Args:
        settings: The network, the data and the device.
        likelihood: The likelihood of the outputs, which replaces that of `settings.task`.

    Raises:
        ValueError: If the network, its weights or the data are missing or damaged, or do not match.
        ConnectionError: If a download fails.
        ImportError: If a package that is needed to load the network or the data is missing.
        OSError: If a file cannot be read.
    """
    device = _device_from(settings.device)
    chosen = likelihood or likelihood_from_settings(settings)
    # Creating a network draws initial weights, which must not change torch's global generator.
    with torch.random.fork_rng(devices=[]):
        data = find_data(settings, chosen)
        model, notes = build(settings, data.num_outputs)
        splits = data.splits_for(model)
    model = model.eval().to(device)
    train, num_train = batches_of(splits.train, settings, "train_examples", mixed=True)
    if num_train is None:
        raise ValueError(
            "The number of training examples is unknown. Return a data set from your "
            "function, or a DataLoader of a data set that has a length."
        )
    first = next(iter(train), None)
    if first is None:
        raise ValueError("The training data is empty. Pass at least one batch.")
    shape = _input_shape(first)
    if splits.pixels is not None and (shape is None or len(shape) != 3):
        raise ValueError(
            f"`mean` and `std` apply only to images [C, H, W], but the inputs have shape {shape}. "
            "Remove `mean` and `std`."
        )
    validation = _validation_batches(splits, settings)
    test, _ = batches_of(splits.test, settings, "test_examples")
    ood_sets = _ood_sets(settings, splits, shape)
    shifts = {}
    for severity in sorted(set(settings.corruptions)):
        pixels = _pixels_of_images(splits, shape, "corruptions")
        shifts[severity] = Changed(test, Corruption(pixels, severity, settings.seed))
    likelihood = _likelihood(model, first, splits, chosen)
    notes += splits.notes
    for _, notes_of_set in ood_sets.values():
        notes += notes_of_set
    if settings.held_out != SourceSettings.held_out and not splits.was_whole:
        notes += ("held_out is not used, because the data is already split.",)
    if validation is None:
        notes += (
            "There is no validation data, so the prior precision can only be tuned by the "
            "marginal likelihood, and no temperature can be fitted.",
        )
    return Loaded(
        model=model,
        likelihood=likelihood,
        train=train,
        num_train=num_train,
        validation=validation,
        test=test,
        ood={name: batches for name, (batches, _) in ood_sets.items()},
        shifts=shifts,
        classes=splits.classes,
        picture=None if splits.pixels is None else splits.pixels.picture,
        row=None if splits.columns is None else splits.columns.row,
        read=partial(read_further_inputs, splits, shape),
        target=None if splits.columns is None else splits.columns.target,
        input_name="image" if splits.pixels is not None else splits.input_name,
        notes=notes,
    )


def _validation_batches(splits: Splits, settings: SourceSettings) -> Batches | None:
    """Return the validation examples, or None if there are none."""
    if splits.validation is not None:
        validation, _ = batches_of(splits.validation, settings, "validation_examples")
        return validation
    if settings.validation_examples is not None:
        raise ValueError(
            "`validation_examples` needs validation data, but there is none. Add a folder val/, an "
            "array x_val or an entry `validation` to the data, or remove this option."
        )
    return None


def _input_shape(batch: Any) -> tuple[int, ...] | None:
    """Return the shape of one input, or None if the batch is not a pair with a tensor first."""
    if isinstance(batch, Sequence) and len(batch) == 2 and isinstance(batch[0], Tensor):
        return tuple(batch[0].shape[1:])
    return None


def _ood_sets(
    settings: SourceSettings, splits: Splits, shape: tuple[int, ...] | None
) -> Mapping[str, tuple[Batches, tuple[str, ...]]]:
    """Return the out-of-distribution sets by name, each with notes for the reader."""
    ood_sets: dict[str, tuple[Batches, tuple[str, ...]]] = {}
    for name, examples in splits.ood.items():
        batches, _ = batches_of(examples, settings, "ood_examples")
        ood_sets[name] = batches, ()
    for name, source in settings.ood.items():
        if name in ood_sets:
            raise ValueError(f"Two OOD sets have the name {name}. Use different names.")
        if source == "builtin:patches":
            _pixels_of_images(splits, shape, f"ood {name}")  # Reject inputs other than images.
            limit = "test_examples" if settings.ood_examples is None else "ood_examples"
            batches, _ = batches_of(splits.test, settings, limit)
            ood_sets[name] = Changed(batches, partial(shuffled_patches, seed=settings.seed)), ()
            continue
        if source == "builtin:digits":
            pixels = _pixels_of_images(splits, shape, f"ood {name}")
            inputs = FurtherInputs(drawn_digits(shape or (), pixels))
        else:
            inputs = read_further_inputs(splits, shape, source, f"ood {name}")
        batches, _ = batches_of(inputs.examples, settings, "ood_examples")
        ood_sets[name] = batches, inputs.notes
    return ood_sets


def _pixels_of_images(splits: Splits, shape: tuple[int, ...] | None, option: str) -> Pixels:
    """Return the normalisation of pixels; inputs must be images with one or three channels."""
    if splits.pixels is None or shape is None:
        raise ValueError(
            f"{option} needs images and their normalisation. If your own loaders yield images, "
            "pass --mean and --std. Otherwise remove this option."
        )
    if shape[0] not in (1, 3):
        raise ValueError(
            f"{option} needs images with 1 or 3 channels, but the images have {shape[0]}. Remove "
            "this option."
        )
    return splits.pixels


def _device_from(name: str) -> torch.device:
    """Return the device with the given name; `auto` selects a GPU if there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"The device {name!r} is not available ({reason}). Use 'cpu' or 'cuda'."
        ) from error


@torch.no_grad()
def _likelihood(
    model: nn.Module, batch: Any, splits: Splits, chosen: Likelihood | None
) -> Likelihood:
    """Return the likelihood of the outputs, after checking that they fit the data."""
    likelihood = chosen or splits.likelihood
    if _input_shape(batch) is None:
        # `Laplace` reads and checks batches in other forms, such as a collator's dictionaries.
        if likelihood is None:
            raise ValueError(
                "The task can be inferred only from batches (inputs, targets) of tensors, but "
                f"the loader yields batches of type {type(batch).__name__}. Pass the task, for "
                "example --task=classification."
            )
        return likelihood
    x, y = batch
    outputs = _outputs(model, x[:2])
    if likelihood is None:
        likelihood = likelihood_of_batch(y, outputs)
    num_targets = splits.num_targets
    if outputs is None or outputs.ndim < 2 or num_targets is None:
        return likelihood
    num_outputs = outputs.shape[1]
    infers_classes = chosen is None and isinstance(likelihood, Categorical)
    if infers_classes and num_targets == 2 and num_outputs == 1:
        # Two classes and a single logit.
        return Bernoulli()
    expected = likelihood.num_outputs(num_targets)
    if expected is not None and outputs.ndim == 2 and num_outputs != expected:
        advice = _advice_on_task(likelihood, infers_classes, num_outputs, num_targets)
        raise ValueError(
            f"The network has {counted(num_outputs, 'output')}, but the task "
            f"{task_name(likelihood)} needs {expected} ({likelihood.outputs_meaning}) for this "
            "data. Use the network that was trained on this data, or create it with this number of "
            f"outputs (--model_args.KEY=VALUE).{advice}"
        )
    return likelihood


def _advice_on_task(
    likelihood: Likelihood, infers_classes: bool, num_outputs: int, num_targets: int
) -> str:
    """Name the tasks that the network's outputs suit better, or return ""."""
    if infers_classes and num_outputs == 1:
        return (
            " If the targets are numbers or counts, pass --task=regression or --task=poisson. "
            "If they are ordered classes, pass the import path of an instance of `Ordinal` as "
            "--task."
        )
    if likelihood.has_sigma and num_outputs == 2 * num_targets:
        return " If the outputs are means and log-variances, pass --task=heteroscedastic."
    return ""


def _outputs(model: nn.Module, x: Tensor) -> Tensor | None:
    """Return the outputs `[B, C]` for a batch, or None if the network does not return a tensor."""
    try:
        outputs = model(x.to(next(model.parameters(), x).device))
    except Exception as error:
        if x.ndim == 4:
            advice = (
                "For images, pass the --image_size that it was trained with, and one number per "
                "channel in --mean."
            )
        else:
            advice = "For a table, pass the columns that it was trained on as --features."
        raise ValueError(
            f"The network does not accept inputs of shape {list(x.shape)} and dtype {x.dtype} "
            f"({describe_error(error)}). {advice} If only the dtype differs, return "
            "model.float() from the function that creates the network."
        ) from error
    if not isinstance(outputs, Tensor):
        outputs = getattr(outputs, "logits", None)
    return None if outputs is None else as_columns(outputs, x.shape[:1])
