"""Properties of the test problems' networks: sizes, shapes, gradients, weights from files."""

from urllib.error import URLError

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from laplace_debias.problems.models import (
    all_cnn_c,
    conv_net,
    digits_net,
    resnet50,
    vit_little,
    wide_resnet,
)

CLASSES = 5


def size_of(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def small_resnet(**changes) -> nn.Module:
    return resnet50(CLASSES, blocks=(1, 1, 1, 1), width_per_group=8, expansion=1, **changes)


def small_vit(**changes) -> nn.Module:
    sizes = {"patch_size": 4, "depth": 2, "embed_dim": 16, "num_heads": 2}
    return vit_little(CLASSES, image_size=16, **sizes, **changes)


IMAGES = (3, 3, 16, 16)
SMALL = {
    "all_cnn_c": (lambda: all_cnn_c(CLASSES), (3, 3, 32, 32)),
    "digits_net": (lambda: digits_net(CLASSES), (3, 1, 8, 8)),
    "conv_net": (lambda: conv_net(2, 4, CLASSES, image_size=16), IMAGES),
    "wide_resnet": (lambda: wide_resnet(10, 1, CLASSES), IMAGES),
    "resnet50": (small_resnet, (3, 3, 64, 64)),
    "vit_little": (small_vit, IMAGES),
}


def made(name: str) -> tuple[nn.Module, torch.Tensor]:
    """A small model in float64, away from its initialisation, and inputs for it."""
    build, shape = SMALL[name]
    model = build().double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    return model, torch.randn(shape).double()


# --- all of them ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SMALL)
def test_logits_of_an_example_depend_on_it_alone_in_evaluation_mode(name):
    model, inputs = made(name)
    model.eval()
    with torch.no_grad():
        whole = model(inputs)
        again = model(inputs)
        singles = torch.cat([model(one[None]) for one in inputs])
    assert whole.shape == (3, CLASSES)
    assert torch.equal(whole, again)
    assert torch.allclose(whole, singles, atol=1e-10)
    assert (whole[0] - whole[1]).abs().max() > 1e-6


@pytest.mark.parametrize("name", SMALL)
def test_the_gradient_reaches_every_trainable_parameter_and_no_other(name):
    model, inputs = made(name)
    logits = model.eval()(inputs)
    # A mean of squares: unlike a sum of logits, no normalisation cancels its gradient.
    logits.square().mean().backward()
    for path, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad.abs().max() > 0, path
        else:
            assert parameter.grad is None, path


# --- WideResNet ----------------------------------------------------------------------------------


def test_wide_resnet_40_4_has_the_published_size():
    assert size_of(wide_resnet(40, 4, 10)) == 8_949_210
    model = wide_resnet()
    assert size_of(model) == 8_972_340
    assert sum(isinstance(module, nn.Conv2d) for module in model.modules()) == 40
    assert model.head.in_features == 256


def test_wide_resnet_blocks_pass_their_input_on_and_halve_the_resolution_twice():
    model = wide_resnet(16, 1, CLASSES).double().eval()
    identity, narrowing = model.blocks[1], model.blocks[2]
    for block in (identity, narrowing):
        nn.init.zeros_(block.conv2.weight)
    x = torch.randn(2, 16, 8, 8).double()
    # Pre-activation: what is passed on was not rectified, what the 1 × 1 convolution sees was.
    assert torch.equal(identity(x), x)
    expected = narrowing.shortcut(torch.relu(narrowing.norm1(x)))
    assert torch.equal(narrowing(x), expected)
    assert model.blocks(torch.zeros(1, 16, 32, 32).double()).shape == (1, 64, 8, 8)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [((39,), "depth 39; expected 6n"), ((4,), "depth 4"), ((40, 0), "width 0")],
)
def test_wide_resnets_that_cannot_be_are_refused(arguments, match):
    with pytest.raises(ValueError, match=match):
        wide_resnet(*arguments)


# --- ConvNet -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("depth", "width"), [(0, 3), (1, 16), (4, 8)])
def test_conv_net_grows_with_depth_and_width(depth, width):
    model = conv_net(depth, width)
    first, hidden = 27 * width + width, 9 * width * width + width
    assert size_of(model) == first + depth * hidden + 64 * width * 10 + 10
    kinds = [type(layer).__name__ for layer in model]
    middle = ["Conv2d", "ReLU"] * depth
    last = ["MaxPool2d", "Flatten", "Linear"]
    assert kinds == ["Conv2d", "ReLU", "MaxPool2d", *middle, *last]


def test_conv_nets_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="image_size 30; expected a positive multiple of 4"):
        conv_net(1, 4, image_size=30)
    with pytest.raises(ValueError, match="depth -1"):
        conv_net(-1, 4)


# --- published networks --------------------------------------------------------------------------


def test_published_networks_have_the_published_sizes():
    assert size_of(resnet50()) == 25_557_032
    model = vit_little()
    # The model card says 22.5 million; the sum of its layers, by hand:
    width, hidden = 320, int(320 * 5.6)
    block = 4 * width + (width + 1) * 3 * width + (width + 1) * width + 2 * width
    block += (width + 1) * hidden + (hidden + 1) * width
    ends = (3 * 16 * 16 + 1) * width + (256 + 4) * width + 2 * width + (width + 1) * 1000
    assert size_of(model) == 14 * block + ends == 22_516_008
    assert model.reg_token.shape[1] == 4


@pytest.mark.parametrize("build", [small_resnet, small_vit])
@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_weights_of_a_file_are_taken_and_strictly(build, suffix, tmp_path):
    origin = build()
    path = tmp_path / f"weights{suffix}"
    # Batch norm's counts are missing from files older than they are.
    state = {k: v for k, v in origin.state_dict().items() if "num_batches" not in k}
    write = save_file if suffix == ".safetensors" else torch.save
    write(state, path)
    model = build(weights=path)
    assert not model.training
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in state.items())
    write(dict(list(state.items())[1:]), path)
    with pytest.raises(ValueError, match=f"missing from the file: {next(iter(state))}"):
        build(weights=path)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match="damaged"):
        build(weights=path)
    path.unlink()
    with pytest.raises(ValueError, match="no file at"):
        build(weights=path)


class _Harmful:
    def __reduce__(self):
        return (print, ("unpickled",))


def test_nothing_but_tensors_is_unpickled(tmp_path, capsys):
    torch.save({"conv1.weight": _Harmful()}, tmp_path / "weights.pth")
    with pytest.raises(ValueError, match="damaged or not a file of weights"):
        small_resnet(weights=tmp_path / "weights.pth")
    torch.save([torch.ones(2)], tmp_path / "list.pth")
    with pytest.raises(ValueError, match="no state dictionary"):
        small_resnet(weights=tmp_path / "list.pth")
    assert capsys.readouterr().out == ""


def test_named_weights_come_from_torchvision(monkeypatch):
    from torchvision.models import ResNet50_Weights

    asked = []

    def get(self, **_):
        asked.append(self.name)
        return resnet50().state_dict()

    monkeypatch.setattr(ResNet50_Weights, "get_state_dict", get)
    assert not resnet50(weights="IMAGENET1K_V1").training
    assert asked == ["IMAGENET1K_V1"]
    with pytest.raises(ValueError, match=r"'IMAGENET'; expected one of \('DEFAULT'"):
        resnet50(weights="IMAGENET")
    with pytest.raises(ValueError, match="of another shape"):
        resnet50(CLASSES, weights="IMAGENET1K_V1")


def test_the_published_vit_is_asked_for_by_its_tag(monkeypatch):
    import timm

    asked = []

    def create(name, pretrained, **arguments):
        asked.append((name, pretrained, arguments["num_classes"], arguments["img_size"]))
        return nn.Linear(1, 1)

    monkeypatch.setattr(timm, "create_model", create)
    assert not vit_little(pretrained=True).training
    assert asked == [("vit_little_patch16_reg4_gap_256.sbb_in1k", True, 1000, 256)]


def test_a_missing_network_is_said(monkeypatch):
    import timm
    from torchvision.models import ResNet50_Weights

    def offline(*_, **__):
        raise URLError("no route")

    monkeypatch.setattr(timm, "create_model", offline)
    monkeypatch.setattr(ResNet50_Weights, "get_state_dict", offline)
    with pytest.raises(ConnectionError, match="ViT Little sbb_in1k could not be downloaded"):
        vit_little(pretrained=True)
    with pytest.raises(ConnectionError, match="ResNet-50 DEFAULT could not be downloaded"):
        resnet50(weights="DEFAULT")


def test_vits_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="expected one of them"):
        vit_little(pretrained=True, weights="a.pth")
    with pytest.raises(ValueError, match="image_size 30 with patches of 16"):
        vit_little(image_size=30)
