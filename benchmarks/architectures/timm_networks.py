"""Reduced classifiers of timm, of families that torchvision does not have."""

from collections.abc import Callable
from functools import partial
from typing import Any

import timm
from timm.layers import GroupNorm1
from torch import nn

from benchmarks.architectures.architecture import CLASSES, Architecture, images, narrow

_VIT: dict[str, Any] = {"embed_dim": 32, "depth": 2, "num_heads": 2, "img_size": 32}
_PYRAMID: dict[str, Any] = {
    "depths": (1, 1, 1, 1),
    "embed_dims": (8, 16, 24, 32),
    "num_heads": (1, 2, 3, 4),
}


def architectures() -> list[Architecture]:
    """Return the networks, reduced by constructor arguments if possible, otherwise by `narrow`."""
    return [
        _architecture(
            "resnetv2_50", 32, layers=(1, 1, 1, 1), channels=(32, 64, 96, 128), stem_chs=32
        ),
        _architecture("vit_tiny_patch16_224", 32, **_VIT, patch_size=8),
        _architecture("deit_tiny_distilled_patch16_224", 32, **_VIT, patch_size=8),
        _architecture("cait_xxs24_224", 32, **_VIT, patch_size=8),
        _architecture(
            "swin_tiny_patch4_window7_224",
            32,
            img_size=32,
            window_size=4,
            embed_dim=16,
            depths=(2, 2),
            num_heads=(2, 4),
        ),
        _architecture("eva02_tiny_patch14_224", 32, **_VIT, patch_size=8),
        _architecture("convnextv2_atto", 32, depths=(1, 1, 1, 1), dims=(8, 16, 24, 32)),
        _narrow("efficientnet_lite0", 32),
        _narrow("mobilenetv4_conv_small", 32),
        _architecture("regnetx_002", 32, build=_regnet),
        _architecture("mixer_s32_224", 32, build=_mixer),
        _architecture("poolformer_s12", 64, build=_poolformer),
        _architecture("davit_tiny", 64, **_PYRAMID, window_size=2),
        _architecture("coatnet_nano_rw_224", 64, build=_coatnet),
        _architecture(
            "levit_128s",
            64,
            img_size=64,
            embed_dim=(16, 24, 32),
            key_dim=8,
            num_heads=(2, 2, 2),
            depth=(1, 1, 1),
        ),
        _architecture("beit_base_patch16_224", 32, **_VIT, patch_size=8),
        _architecture(
            "edgenext_xx_small", 64, depths=(1, 1, 2, 1), dims=(8, 16, 24, 32), heads=(2, 2, 2, 2)
        ),
        _architecture("fastvit_t8", 64, layers=(1, 1, 1, 1), embed_dims=(8, 16, 32, 64)),
        _narrow("nf_regnet_b0", 32),
        _architecture("ghostnet_050", 32, build=_ghostnet),
        _architecture("pvt_v2_b0", 64, **_PYRAMID),
        _architecture("xcit_nano_12_p8_224", 32, **_VIT),
        _architecture("vit_small_patch14_reg4_dinov2", 32, **_VIT, patch_size=8),
        _architecture("volo_d1_224", 32, build=_volo),
        _architecture("tiny_vit_5m_224", 64, **_PYRAMID, window_sizes=(2, 2, 2, 2)),
        _narrow("hgnetv2_b0", 32),
        _architecture("rexnet_100", 32, initial_chs=8, final_chs=40, width_mult=0.5),
        _architecture("dla34", 32, build=_dla),
        _architecture("sequencer2d_s", 56, build=_sequencer),
    ]


def _architecture(
    name: str, side: int, build: Callable[[], nn.Module] | None = None, **options: Any
) -> Architecture:
    build = build or partial(timm.create_model, name, num_classes=CLASSES, **options)
    return Architecture(name, "timm", build, images(side))


def _narrow(name: str, side: int) -> Architecture:
    def build() -> nn.Module:
        with narrow(8):
            return timm.create_model(name, num_classes=CLASSES)

    return _architecture(name, side, build)


def _regnet() -> nn.Module:
    config = timm.models.regnet.RegNetCfg(w0=8, wa=8.0, wm=2.0, group_size=8, depth=6)
    return timm.models.RegNet(config, num_classes=CLASSES)


def _mixer() -> nn.Module:
    return timm.models.MlpMixer(CLASSES, img_size=32, patch_size=8, num_blocks=2, embed_dim=32)


def _ghostnet() -> nn.Module:
    # Each entry is: kernel, hidden channels, channels, squeeze-and-excitation ratio, stride.
    stages: list[list[list[int | float]]] = [
        [[3, 32, 32, 0, 1]],
        [[3, 64, 48, 0.25, 2]],
        [[5, 96, 64, 0.25, 2]],
    ]
    return timm.models.GhostNet(stages, num_classes=CLASSES, width=0.5)


def _poolformer() -> nn.Module:
    return timm.models.MetaFormer(
        depths=(1, 1, 1, 1),
        dims=(8, 16, 24, 32),
        downsample_norm=None,
        mlp_act=nn.GELU,
        mlp_bias=True,
        norm_layers=GroupNorm1,
        layer_scale_init_values=1e-5,
        res_scale_init_values=(None, None, None, None),
        use_mlp_head=False,
        num_classes=CLASSES,
    )


def _coatnet() -> nn.Module:
    config = timm.models.maxxvit.model_cfgs["coatnet_nano_rw"]
    config = timm.models.maxxvit.replace(
        config, embed_dim=(32, 32, 64, 64), depths=(1, 1, 1, 1), stem_width=(8, 16)
    )
    return timm.models.MaxxVit(config, img_size=64, num_classes=CLASSES)


def _volo() -> nn.Module:
    return timm.models.VOLO(
        layers=[1, 1, 1, 1],
        img_size=32,
        stem_hidden_dim=8,
        embed_dims=[16, 24, 24, 24],
        num_heads=[2, 2, 2, 2],
        num_classes=CLASSES,
    )


def _dla() -> nn.Module:
    model = timm.create_model(
        "dla34", levels=(1, 1, 1, 1, 1, 1), channels=(8, 8, 8, 16, 24, 32), num_classes=CLASSES
    )
    # With the initial weights, logits are in the tens, and the probabilities have no curvature.
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.constant_(module.weight, 0.4)
    return model


def _sequencer() -> nn.Module:
    return timm.create_model(
        "sequencer2d_s",
        img_size=56,
        layers=(1, 1, 1, 1),
        embed_dims=(8, 16, 16, 16),
        hidden_sizes=(2, 4, 4, 4),
        num_classes=CLASSES,
    )
