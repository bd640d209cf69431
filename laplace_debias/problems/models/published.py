"""Networks whose trained weights are published: ResNet-50 and ViT Little."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from laplace_debias.problems.models.checkpoints import load_state
from laplace_debias.problems.storage import read_tensors

VIT_LITTLE = "vit_little_patch16_reg4_gap_256"
VIT_LITTLE_TAG = "sbb_in1k"


def resnet50(
    num_classes: int = 1000,
    *,
    weights: str | Path | None = None,
    blocks: tuple[int, int, int, int] = (3, 4, 6, 3),
    width_per_group: int = 64,
    expansion: int = 4,
) -> nn.Module:
    """Torchvision's ResNet-50 for images [B, 3, H, W]: 25,557,032 parameters for 1,000 classes.

    Args:
        num_classes: Number of classes, C.
        weights: `"IMAGENET1K_V1"` (what the paper uses), `"IMAGENET1K_V2"` or `"DEFAULT"` (of
            torchvision, downloaded on the first call); a `.safetensors`, `.pth` or `.pt` file of
            such weights; random ones by default.
        blocks: Bottleneck blocks of each of the four groups; fewer make a small relative.
        width_per_group: Inner channels of the first group's blocks; 64 in ResNet-50.
        expansion: Output channels of a block over 64, 128, 256 and 512 in the four groups.

    Returns:
        A network from float images [B, 3, H, W] to logits [B, C], in evaluation mode where it has
        trained weights.

    Raises:
        ImportError: If torchvision is missing.
        ValueError: If a name of weights is unknown, or a file is missing, damaged or of another
            network.
        ConnectionError: If the weights cannot be downloaded.

    Reference:
        He et al. (2016), Deep Residual Learning for Image Recognition.
    """
    try:
        from torchvision.models import ResNet50_Weights
        from torchvision.models.resnet import Bottleneck, ResNet
    except ImportError as error:
        raise ImportError(
            "ResNet-50 is torchvision's: pip install 'laplace-debias[cli]'"
        ) from error
    names = ("DEFAULT", *(entry.name for entry in ResNet50_Weights))
    is_name = isinstance(weights, str) and not Path(weights).suffix
    if is_name and weights not in names:
        raise ValueError(f"weights {weights!r}; expected one of {names}, or the path of a file")
    # Torchvision reads the expansion off the class.
    block = type("Bottleneck", (Bottleneck,), {"expansion": expansion})
    model = ResNet(block, list(blocks), num_classes=num_classes, width_per_group=width_per_group)
    if weights is None:
        return model
    if not is_name:
        return _loaded(model, _read_weights(Path(weights)), str(weights))
    try:
        state = ResNet50_Weights[str(weights)].get_state_dict(check_hash=True)
    except OSError as error:
        raise _offline(f"ResNet-50 {weights}", error) from error
    return _loaded(model, state, f"torchvision's {weights}")


def vit_little(
    num_classes: int = 1000,
    *,
    pretrained: bool = False,
    weights: str | Path | None = None,
    image_size: int = 256,
    **changes: Any,
) -> nn.Module:
    """Timm's ViT Little, `vit_little_patch16_reg4_gap_256`; 22.5 million parameters.

    Patches of 16 × 16 pixels, 14 blocks of 320 features and five heads, four register tokens, the
    mean over the positions before the head.

    Args:
        num_classes: Number of classes, C.
        pretrained: Whether to take the published `sbb_in1k` weights, downloaded on the first call.
            They are for images normalised by mean 0.5 and standard deviation 0.5.
        weights: A `.safetensors`, `.pth`, `.pt` or `.bin` file of trained weights instead.
        image_size: Height and width of the images, in pixels; a multiple of the patch size.
        **changes: Other arguments of timm's `VisionTransformer`, e.g. `depth`, `embed_dim`,
            `num_heads` and `patch_size` for a small relative.

    Returns:
        A network from float images [B, 3, S, S] to logits [B, C], in evaluation mode where it has
        trained weights.

    Raises:
        ImportError: If timm is missing.
        ValueError: If both kinds of weights are asked for, the image size does not fit the patches,
            or a file is missing, damaged or of another network.
        ConnectionError: If the weights cannot be downloaded.

    Reference:
        Dosovitskiy et al. (2021), An Image is Worth 16×16 Words; Darcet et al. (2024), Vision
        Transformers Need Registers.
    """
    try:
        import timm
    except ImportError as error:
        raise ImportError("ViT Little is timm's: pip install 'laplace-debias[cli]'") from error
    if pretrained and weights is not None:
        raise ValueError(f"pretrained and weights={weights}; expected one of them")
    patch = changes.get("patch_size", 16)
    if image_size < patch or image_size % patch:
        raise ValueError(
            f"image_size {image_size} with patches of {patch}; expected a positive multiple"
        )
    try:
        model = timm.create_model(
            f"{VIT_LITTLE}.{VIT_LITTLE_TAG}" if pretrained else VIT_LITTLE,
            pretrained=pretrained,
            num_classes=num_classes,
            img_size=image_size,
            **changes,
        )
    # Without a network the Hugging Face client raises several kinds of OSError or a RuntimeError;
    # a mismatch of shapes is a RuntimeError with another text.
    except (OSError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "size mismatch" in str(error):
            raise ValueError(
                f"the published weights do not fit a network with {changes} ({error}); "
                "leave its sizes as they are, or set pretrained=False"
            ) from error
        if not pretrained:
            raise
        raise _offline("ViT Little sbb_in1k", error) from error
    if weights is not None:
        return _loaded(model, _read_weights(Path(weights)), str(weights))
    return model.eval() if pretrained else model


def _read_weights(path: Path) -> Mapping[str, Tensor]:
    """A state dictionary from a file, never by unpickling anything but tensors."""
    if path.suffix == ".safetensors":
        return read_tensors(path)
    if not path.is_file():
        raise ValueError(f"no file at {path}; expected .safetensors, .pth, .pt or .bin")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    # On broken bytes `torch.load` raises errors of any type.
    except Exception as error:
        raise ValueError(
            f"{path} is damaged or not a file of weights ({error}); fetch it again"
        ) from error
    if not isinstance(state, Mapping) or not all(isinstance(v, Tensor) for v in state.values()):
        raise ValueError(f"{path} holds no state dictionary; expected tensors by name")
    return state


def _loaded(model: nn.Module, state: Mapping[str, Tensor], source: str) -> nn.Module:
    # Weights published before batch norm counted its batches lack the counts. Nothing reads them.
    counts = {k: v for k, v in model.state_dict().items() if k.endswith("num_batches_tracked")}
    load_state(model, {**counts, **state}, source)
    return model.eval()


def _offline(what: str, error: Exception) -> ConnectionError:
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return ConnectionError(
        f"the weights of {what} could not be downloaded ({reason}); check the network, or give "
        "the path of a copy as weights"
    )
