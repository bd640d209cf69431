"""mobilenet_v3_small of torchvision: Monte-Carlo K-FAC of a network with depthwise convolutions."""

from benchmarks import vision
from benchmarks.settings import Settings
from benchmarks.timing import Row

TITLE = "mobilenet_v3_small, 10 classes, 64 × 64 pixels, Monte-Carlo Fisher"
UNIT = vision.UNIT
REFERENCES = vision.REFERENCES
GOALS = vision.GOALS


def compare(settings: Settings) -> list[Row]:
    """One batch of 32 images, random weights, factors summed in float64; peers' factors."""
    return vision.compare_vision(settings, "mobilenet_v3_small")
