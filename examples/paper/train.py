"""Train a test problem's network, for the `--checkpoint` of the other experiments."""

from dataclasses import dataclass

from safetensors.torch import save_file

from examples.paper.common import ExperimentSettings, load


@dataclass(kw_only=True)
class Settings(ExperimentSettings):
    """The network to train.

    Attributes:
        output: The safetensors file of the weights and the split of the training images.
    """


def run(settings: Settings) -> None:
    """Train the problem's network and save it, with its split."""
    trained = load(settings)
    tensors = {**trained.model.state_dict(), **trained.split}
    settings.output.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: value.contiguous() for name, value in tensors.items()}, settings.output)
    print(f"Checkpoint: {settings.output}")
