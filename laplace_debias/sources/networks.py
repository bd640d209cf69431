"""Build networks from an import path, timm or torchvision."""

from functools import partial
from typing import Any

from torch import nn

from laplace_debias.sources.imports import call_function, describe_error, import_object
from laplace_debias.sources.settings import SourceSettings, nearest
from laplace_debias.sources.weights import load_weights


def build(settings: SourceSettings, num_outputs: int | None) -> tuple[nn.Module, tuple[str, ...]]:
    """Build the network that the settings specify, load its weights, and return it with notes."""
    notes: tuple[str, ...] = ()
    if settings.model is not None:
        model = import_object(settings.model, "model")
        if isinstance(model, nn.Module) and settings.model_args:
            raise ValueError(
                f"The model {settings.model} is already a network, so model_args have no effect. "
                "Remove them."
            )
        if not isinstance(model, nn.Module):
            model = call_function(settings.model, model, settings.model_args, "model")
        if not isinstance(model, nn.Module):
            raise ValueError(
                f"The function {settings.model} of --model returned {type(model).__name__}. "
                "Return a torch.nn.Module."
            )
        if settings.checkpoint is None:
            notes = (f"No checkpoint was specified, so the weights are those of {settings.model}.",)
    else:
        model = _build_published(settings, num_outputs)
    if settings.checkpoint is not None:
        load_weights(model, settings.checkpoint)
    return model.eval(), notes


def _build_published(settings: SourceSettings, num_outputs: int | None) -> nn.Module:
    """Build a network of timm or torchvision."""
    name = settings.timm or settings.torchvision or ""
    pretrained = settings.pretrained
    if settings.checkpoint is None and not pretrained:
        raise ValueError(
            f"{name} is not trained. Pass --checkpoint, or --pretrained for the published weights."
        )
    if settings.timm:
        import timm

        library = "timm"
        names = timm.list_models() + timm.list_pretrained()
        is_there = timm.is_model(name.partition(".")[0])
        make: Any = partial(timm.create_model, name, pretrained=pretrained)
    else:
        from torchvision import models

        library = "torchvision"
        names = models.list_models()
        is_there = name in names
        make = partial(models.get_model, name, weights="DEFAULT" if pretrained else None)
    if not is_there:
        raise ValueError(
            f"There is no {library} architecture {name!r}.{nearest(name, names)} Check the name."
        )
    arguments = dict(settings.model_args)
    # Published weights fix the number of classes, so pass the number only without them.
    if num_outputs is not None and not pretrained:
        arguments.setdefault("num_classes", num_outputs)
    try:
        return make(**arguments)
    except Exception as error:
        if pretrained and not isinstance(error, TypeError):
            raise ConnectionError(
                f"The published weights of {name} could not be downloaded "
                f"({describe_error(error)}). Check the internet connection and the name, or pass "
                "--checkpoint."
            ) from error
        raise ValueError(
            f"{library} could not create {name} with {arguments} ({describe_error(error)}). Check "
            "--model_args."
        ) from error
