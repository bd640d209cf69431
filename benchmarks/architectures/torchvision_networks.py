"""Reduced classifiers of torchvision, one of each family."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn
from torchvision import models
from torchvision.models.convnext import CNBlockConfig
from torchvision.models.regnet import BlockParams
from torchvision.models.vgg import make_layers

from benchmarks.architectures.architecture import CLASSES, Architecture, images, narrow


def architectures() -> list[Architecture]:
    """Return the networks, reduced by constructor arguments if possible, otherwise by `narrow`.

    If random weights would give logits in the tens, and hence probabilities without curvature,
    residual branches are initialised to zero.
    """
    return [
        _architecture("alexnet", _narrow("alexnet", divisor=16), 64),
        _architecture("vgg11", lambda: _vgg(False), 32),
        _architecture("vgg11_bn", lambda: _vgg(True), 32),
        _architecture("resnet18", _narrow("resnet18"), 32),
        _architecture("resnet50", _narrow("resnet50", zero_init_residual=True), 32),
        _architecture("resnext50_32x4d", _narrow("resnext50_32x4d"), 32),
        _architecture(
            "wide_resnet50_2", _narrow("wide_resnet50_2", divisor=16, zero_init_residual=True), 32
        ),
        _architecture("densenet121", _densenet, 32),
        _architecture("squeezenet1_1", _narrow("squeezenet1_1"), 64),
        _architecture("googlenet", _narrow("googlenet", init_weights=False), 64),
        _architecture("inception_v3", _narrow("inception_v3", init_weights=False), 96),
        _architecture("shufflenet_v2_x0_5", _shufflenet, 32),
        _architecture("mobilenet_v2", _reduced("mobilenet_v2", width_mult=0.1), 32),
        _architecture("mobilenet_v3_small", _narrow("mobilenet_v3_small", width_mult=0.5), 32),
        _architecture("mobilenet_v3_large", _narrow("mobilenet_v3_large", width_mult=0.5), 32),
        _architecture("mnasnet0_5", _narrow("mnasnet0_5", divisor=4), 32),
        _architecture("efficientnet_b0", _narrow("efficientnet_b0"), 32),
        _architecture("regnet_x", lambda: _regnet(None), 32),
        _architecture("regnet_y", lambda: _regnet(0.25), 32),
        _architecture("convnext_tiny", _convnext, 32),
        _architecture("vit_b_16", _vit, 16),
        _architecture("swin_t", lambda: _swin("SwinTransformer"), 32),
        _architecture("swin_v2_t", lambda: _swin("v2"), 32),
        _architecture("maxvit_t", _maxvit, 64),
    ]


def _architecture(name: str, build: Callable[[], nn.Module], side: int) -> Architecture:
    return Architecture(name, "torchvision", build, images(side))


def _reduced(name: str, **options: Any) -> Callable[[], nn.Module]:
    return partial(getattr(models, name), num_classes=CLASSES, **options)


def _narrow(name: str, divisor: int = 8, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        with narrow(divisor):
            return _reduced(name, **options)()

    return build


def _vgg(batch_norm: bool) -> nn.Module:
    widths: list[str | int] = [64, "M", 128, "M", 256, 256, "M", 512, 512, "M", 512, 512, "M"]
    with narrow(16):
        return models.VGG(make_layers(widths, batch_norm), CLASSES)


def _densenet() -> nn.Module:
    return models.DenseNet(4, (3, 3, 3, 3), 8, bn_size=2, num_classes=CLASSES)


def _shufflenet() -> nn.Module:
    return models.ShuffleNetV2([2, 2, 2], [8, 16, 32, 64, 64], num_classes=CLASSES)


def _regnet(se_ratio: float | None) -> nn.Module:
    params = BlockParams.from_init_params(
        depth=6, w_0=16, w_a=8.0, w_m=2.0, group_width=8, se_ratio=se_ratio
    )
    return models.RegNet(params, num_classes=CLASSES, stem_width=8)


def _convnext() -> nn.Module:
    widths = (8, 16, 32, 64)
    stages = [
        CNBlockConfig(width, next_width, depth)
        for width, next_width, depth in zip(widths, (*widths[1:], None), (1, 1, 2, 1), strict=True)
    ]
    return models.ConvNeXt(stages, num_classes=CLASSES)


def _vit() -> nn.Module:
    return models.VisionTransformer(16, 4, 2, 2, 32, 64, num_classes=CLASSES)


def _swin(version: str) -> nn.Module:
    block = models.swin_transformer.SwinTransformerBlock
    merging = models.swin_transformer.PatchMerging
    if version == "v2":
        block = models.swin_transformer.SwinTransformerBlockV2
        merging = models.swin_transformer.PatchMergingV2
    return models.SwinTransformer(
        [2, 2], 16, [2, 2], [2, 4], [4, 4],
        num_classes=CLASSES, block=block, downsample_layer=merging,
    )  # fmt: skip


def _maxvit() -> nn.Module:
    return models.MaxVit(
        input_size=(64, 64),
        stem_channels=8,
        partition_size=2,
        block_channels=[8, 16],
        block_layers=[1, 1],
        head_dim=8,
        stochastic_depth_prob=0.0,
        num_classes=CLASSES,
    )
