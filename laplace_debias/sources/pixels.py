"""The conversion between a network's inputs and pixels."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from laplace_debias.sources.settings import SourceSettings


@dataclass(frozen=True)
class Pixels:
    """The normalisation of pixels: (pixel / 255 − mean) / std."""

    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)

    def inputs(
        self, pixels: UInt8[Tensor, "*n channels height width"]
    ) -> Float[Tensor, "*n channels height width"]:
        """Convert pixels to float32 inputs of the network."""
        mean, std = self._columns()
        return (pixels.to(torch.float32) / 255 - mean) / std

    def pixels(
        self, inputs: Float[Tensor, "*n channels height width"]
    ) -> UInt8[Tensor, "*n channels height width"]:
        """Convert inputs to pixels, rounded to 0 … 255."""
        mean, std = self._columns()
        levels = (inputs.to(torch.float32).cpu() * std + mean) * 255
        return levels.round().clamp(0, 255).to(torch.uint8)

    def picture(
        self, image: Float[Tensor, "channels height width"]
    ) -> UInt8[Tensor, "height width 3"]:
        """Convert an input to a picture; unless it has 3 channels, show the first one in grey."""
        pixels = self.pixels(image)
        if len(pixels) != 3:
            pixels = pixels[:1].expand(3, -1, -1)
        return pixels.permute(1, 2, 0)

    @classmethod
    def from_settings(cls, settings: SourceSettings) -> "Pixels | None":
        """Return the normalisation by the settings' mean and std, or None if neither is set."""
        if settings.mean is None and settings.std is None:
            return None
        return cls(settings.mean or (0.0,), settings.std or (1.0,))

    def _columns(self) -> tuple[Float[Tensor, "channels 1 1"], Float[Tensor, "channels 1 1"]]:
        mean, std = (torch.tensor(numbers)[:, None, None] for numbers in (self.mean, self.std))
        return mean, std
