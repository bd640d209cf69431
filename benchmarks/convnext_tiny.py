"""convnext_tiny of torchvision: Monte-Carlo K-FAC of a network with depthwise convolutions."""

from benchmarks import vision
from benchmarks.settings import Settings
from benchmarks.timing import Row

TITLE = "convnext_tiny, 10 classes, 64 × 64 pixels, Monte-Carlo Fisher"
UNIT = vision.UNIT
REFERENCES = vision.REFERENCES
GOALS = vision.GOALS


def compare(settings: Settings) -> list[Row]:
    """One batch of 32 images, random weights, factors summed in float64; peers' factors."""
    return vision.compare_vision(settings, "convnext_tiny")
