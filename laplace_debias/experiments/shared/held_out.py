"""Whether validation images were held out of a network's training."""

import math

import torch
from torch import Tensor, nn
from tqdm import tqdm

from laplace_debias.problems import ImageBatches, Images


@torch.no_grad()
def hits_of(model: nn.Module, data: Images, batch_size: int, progress: bool = False) -> Tensor:
    """Whether the network's first choice is the label, float64 [N] of zeros and ones.

    Args:
        model: The network, in evaluation mode.
        data: The images.
        batch_size: Images per batch.
        progress: Whether to show a progress bar.
    """
    device = next(model.parameters()).device
    batches = ImageBatches(data, torch.arange(len(data)), batch_size)
    hits = [
        model(images.to(device)).argmax(1).cpu() == labels
        for images, labels in tqdm(
            batches, desc="checking", unit="batch", leave=False, disable=not progress
        )
    ]
    return torch.cat(hits).double()


def check_held_out(test: Tensor, validation: Tensor) -> None:
    """Refuse validation images that were trained on.

    Args:
        test: Hits of the network on test images, float64 [N] of zeros and ones.
        validation: Its hits on validation images, [M].

    Raises:
        ValueError: If the validation accuracy is higher by five standard errors.
    """
    both = torch.cat([test, validation]).mean().item()
    error = math.sqrt(both * (1 - both) * (1 / len(test) + 1 / len(validation)))
    excess = validation.mean().item() - test.mean().item()
    if excess > 5 * error:
        raise ValueError(
            f"the network's accuracy on the validation images is {validation.mean():.3f}, on test "
            f"images {test.mean():.3f}: it seems to have been trained on the validation images. "
            "Give the data in the order (image folder or torchvision) that the checkpoint's split "
            "is for. For a checkpoint without a split, give the seed of its training"
        )
