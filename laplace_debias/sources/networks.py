"""Networks by name: import path, timm, torchvision."""

from typing import Any

from torch import nn

from laplace_debias.sources.imports import called, described, imported
from laplace_debias.sources.settings import SourceSettings, nearest
from laplace_debias.sources.weights import load_weights


def build(settings: SourceSettings, num_outputs: int | None) -> tuple[nn.Module, tuple[str, ...]]:
    """The trained network of the settings, on the CPU, in evaluation mode; and notes."""
    notes: tuple[str, ...] = ()
    if settings.model is not None:
        model = _own(settings.model, settings.model_args)
        if settings.checkpoint is None:
            notes = (f"No checkpoint: the weights are those that {settings.model} gives.",)
    else:
        if settings.checkpoint is None and not settings.pretrained:
            raise ValueError(
                f"{settings.timm or settings.torchvision} has no trained weights; give "
                "--checkpoint, or --pretrained for the published ones"
            )
        arguments = dict(settings.model_args)
        # Published weights have the classes that they were trained on.
        if num_outputs is not None and not settings.pretrained:
            arguments.setdefault("num_classes", num_outputs)
        model = _timm(settings, arguments) if settings.timm else _torchvision(settings, arguments)
    if settings.checkpoint is not None:
        load_weights(model, settings.checkpoint)
    return model.eval(), notes


def _own(path: str, arguments: dict[str, Any]) -> nn.Module:
    source = imported(path, "model")
    if isinstance(source, nn.Module):
        if arguments:
            raise ValueError(f"model {path} is a network already, which takes no model_args")
        return source
    model = called(path, source, arguments, "model")
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"model {path} returned {type(model).__name__}; expected a torch.nn.Module"
        )
    return model


def _timm(settings: SourceSettings, arguments: dict[str, Any]) -> nn.Module:
    import timm

    name = settings.timm or ""
    names = timm.list_models() + timm.list_pretrained()
    if not timm.is_model(name.partition(".")[0]):
        raise ValueError(f"there is no timm architecture {name!r}{nearest(name, names)}")
    return _made(timm.create_model, name, "timm", settings.pretrained, arguments)


def _torchvision(settings: SourceSettings, arguments: dict[str, Any]) -> nn.Module:
    from torchvision import models

    name = settings.torchvision or ""
    names = models.list_models()
    if name not in names:
        raise ValueError(f"there is no torchvision architecture {name!r}{nearest(name, names)}")

    def make(name: str, pretrained: bool, **options: Any) -> nn.Module:
        return models.get_model(name, weights="DEFAULT" if pretrained else None, **options)

    return _made(make, name, "torchvision", settings.pretrained, arguments)


def _made(
    make: Any, name: str, library: str, pretrained: bool, arguments: dict[str, Any]
) -> nn.Module:
    try:
        return make(name, pretrained=pretrained, **arguments)
    except Exception as error:
        if pretrained and not isinstance(error, TypeError):
            raise ConnectionError(
                f"the published weights of {name} could not be downloaded ({described(error)}); "
                "check the network and the name, or give --checkpoint"
            ) from error
        raise ValueError(
            f"{library} could not make {name} with {arguments}: {described(error)}; check "
            "--model_args"
        ) from error
