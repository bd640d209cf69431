"""Networks that the plan was not written for, with random weights, and batches for them."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

CLASSES = 10
_VOCABULARY = 500
_LENGTH = 32
_SIDE = 64
_WIDTH = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 256,
}
_IDS = {"vocab_size": _VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
_TEXT = {**_IDS, **_WIDTH, "max_position_embeddings": _LENGTH, "num_labels": CLASSES}
_GPT2 = {**_IDS, "n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": _LENGTH}
_T5 = {
    **_IDS,
    "d_model": 128,
    "d_kv": 32,
    "d_ff": 256,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
    "num_labels": CLASSES,
}

Inputs = Tensor | Mapping[str, Tensor]
Batches = list[tuple[Inputs, Tensor]]


class _Recurrent(nn.Module):
    """An LSTM over a sequence, and a linear layer on its last state."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(32, 128, batch_first=True)
        self.head = nn.Linear(128, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


class _UNet(nn.Module):
    """Two levels down, two up, and a skip: classes of each pixel, `[B, 8, 8, 3]`."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.middle = nn.Conv2d(2 * width, 2 * width, 3, padding=1)
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.last = nn.Conv2d(2 * width, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        first = self.first(x).relu()
        up = self.up(self.middle(self.down(first).relu()).relu()).relu()
        return self.last(torch.cat([first, up], 1)).movedim(1, -1)


def _sequence_convolutions() -> nn.Module:
    layers = [nn.Conv1d(8, 64, 5, stride=2), nn.ReLU(), nn.Conv1d(64, 128, 5, dilation=2)]
    layers += [nn.ReLU(), nn.Conv1d(128, 128, 3, groups=4), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(128, CLASSES))


def _of_timm(name: str, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import timm

        model: nn.Module = timm.create_model(name, num_classes=CLASSES, **options)
        return model

    return build


def _mixer() -> nn.Module:
    import timm

    model: nn.Module = timm.models.MlpMixer(
        CLASSES, img_size=_SIDE, patch_size=8, num_blocks=2, embed_dim=192
    )
    return model


def _of_torchvision(name: str, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import torchvision

        model: nn.Module = getattr(torchvision.models, name)(num_classes=CLASSES, **options)
        return model

    return build


def _resnext() -> nn.Module:
    from torchvision.models.resnet import Bottleneck, ResNet

    return ResNet(Bottleneck, [1, 1, 1, 1], CLASSES, groups=32, width_per_group=4)


def _of_transformers(name: str, config: str, options: dict[str, Any]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers

        model: nn.Module = getattr(transformers, name)(getattr(transformers, config)(**options))
        return model

    return build


def _images(side: int) -> Callable[[int], tuple[Inputs, Tensor]]:
    return lambda n: (torch.randn(n, 3, side, side), torch.randint(CLASSES, (n,)))


def _sequences(n: int, *shape: int) -> tuple[Inputs, Tensor]:
    return torch.randn(n, *shape), torch.randint(CLASSES, (n,))


def _sentences(n: int) -> tuple[Inputs, Tensor]:
    ids = torch.randint(2, _VOCABULARY, (n, _LENGTH))
    ids[:, -1] = 1
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return inputs, torch.randint(CLASSES, (n,))


def _language(n: int) -> tuple[Inputs, Tensor]:
    return _sentences(n)[0], torch.randint(2, _VOCABULARY, (n, _LENGTH))


def _pixels(n: int) -> tuple[Inputs, Tensor]:
    return torch.randn(n, 3, 8, 8), torch.randint(3, (n, 8, 8))


_Network = tuple[Callable[[], nn.Module], Callable[[int], tuple[Inputs, Tensor]]]
_SWIN = {"img_size": 32, "window_size": 4, "embed_dim": 48, "depths": (2, 2), "num_heads": (3, 6)}
NETWORKS: dict[str, _Network] = {
    "timm convnext_atto": (_of_timm("convnext_atto"), _images(_SIDE)),
    "timm mobilenetv3_small_100": (_of_timm("mobilenetv3_small_100"), _images(_SIDE)),
    "timm efficientnet_b0": (_of_timm("efficientnet_b0"), _images(_SIDE)),
    "timm swin_tiny, narrow": (_of_timm("swin_tiny_patch4_window7_224", **_SWIN), _images(32)),
    "timm mixer_s32, narrow": (_mixer, _images(_SIDE)),
    "torchvision densenet121": (_of_torchvision("densenet121"), _images(32)),
    "torchvision resnext, 4 blocks": (_resnext, _images(32)),
    "transformers BERT": (
        _of_transformers("BertForSequenceClassification", "BertConfig", _TEXT),
        _sentences,
    ),
    "transformers GPT-2": (_of_transformers("GPT2LMHeadModel", "GPT2Config", _GPT2), _language),
    "transformers T5": (
        _of_transformers("T5ForSequenceClassification", "T5Config", _T5),
        _sentences,
    ),
    "transformers Llama": (
        _of_transformers("LlamaForSequenceClassification", "LlamaConfig", _TEXT),
        _sentences,
    ),
    "LSTM": (_Recurrent, lambda n: _sequences(n, 20, 32)),
    "1-D convolutions": (_sequence_convolutions, lambda n: _sequences(n, 8, 100)),
    "U-Net": (_UNet, _pixels),
}
"""From a name to what builds the network, and from a number of examples to a batch."""


def network(name: str, batch: int) -> tuple[nn.Module, Batches]:
    """A network and two batches.

    Args:
        name: One of `NETWORKS`.
        batch: Examples in each.
    """
    build, data = NETWORKS[name]
    torch.manual_seed(0)
    model = build().eval()
    return model, [data(batch), data(batch)]
