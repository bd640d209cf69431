"""From settings to a trained network and its data."""

from dataclasses import replace

from torch import nn

from laplace_debias.problems import Images, get_problem, load_problem
from laplace_debias.sources.data import find_data
from laplace_debias.sources.loaded import Loaded
from laplace_debias.sources.networks import build
from laplace_debias.sources.outputs import task_of_outputs
from laplace_debias.sources.parts import Parts, batches_of
from laplace_debias.sources.pixels import Pixels
from laplace_debias.sources.settings import SourceSettings
from laplace_debias.system.device import device_from


def load(settings: SourceSettings) -> Loaded:
    """The trained network of the settings and its data, checked against each other.

    Args:
        settings: Which network, which data.

    Returns:
        Both; the same for the same settings and files.

    Raises:
        ValueError: If network, weights or data are missing, damaged, or do not belong together.
        ConnectionError: If a download fails.
        ImportError: If a package that reads them is missing.
        OSError: If a file cannot be read.
    """
    device = device_from(settings.device)
    if settings.problem is not None:
        model, parts = _of_problem(settings)
    else:
        data = find_data(settings)
        model, notes = build(settings, data.num_outputs)
        parts = data.open()
        parts = replace(parts, notes=notes + parts.notes)
    model = model.eval()
    train, number = batches_of(parts.train, settings, "train_examples", mixed=True)
    if number is None:
        raise ValueError(
            "how many training examples there are is not known; return a data set, or a loader "
            "with a `dataset` that has a length"
        )
    validation = None
    notes = parts.notes
    if parts.validation is not None:
        validation, _ = batches_of(parts.validation, settings, "validation_examples")
    else:
        notes += (
            "There is no validation data: the prior precision can be tuned by the marginal "
            "likelihood alone, and no temperature can be fitted.",
        )
    test, _ = batches_of(parts.test, settings, "test_examples")
    task = task_of_outputs(model, train, parts, settings.task)
    return Loaded(
        model=model.to(device),
        task=task,
        train=train,
        num_train=number,
        validation=validation,
        test=test,
        ood=parts.ood,
        shifts={},
        classes=parts.classes,
        picture=None if parts.pixels is None else parts.pixels.picture,
        input_name=parts.input_name,
        notes=notes,
    )


def _of_problem(settings: SourceSettings) -> tuple[nn.Module, Parts]:
    """A test problem's network and data, in the split of its training."""
    assert settings.problem is not None
    problem = get_problem(settings.problem)
    model, data = load_problem(problem, settings.source, settings.checkpoint, seed=settings.seed)
    return model, Parts(
        train=data.train,
        validation=data.val,
        test=data.test,
        task="classification",
        num_outputs=len(data.train.classes),
        classes=data.train.classes,
        input_name="image",
        pixels=_pixels(data.train),
    )


def _pixels(images: Images) -> Pixels | None:
    mean, std = getattr(images, "mean", None), getattr(images, "std", None)
    return None if mean is None or std is None else Pixels(mean, std)
