"""The networks of the paper and of today: each fits, samples and predicts, at a reduced size."""

import oracle
import pytest
import torch
from cases import one_axis_at_a_time, others_slow
from language import GPT, with_lora
from torch import nn

from examples.paper.networks import all_cnn_c, conv_net, resnet50, vit_little, wide_resnet
from laplace_debias import Laplace

BATCH = 6


def images(size, classes=4):
    torch.manual_seed(1)
    return torch.randn(BATCH, 3, size, size), torch.randint(classes, (BATCH,))


def tokens():
    torch.manual_seed(1)
    x = torch.randint(11, (BATCH, 5))
    y = x.roll(-1, 1)
    y[:, -1] = -100
    return x, y


def layers_of_torch(name, parameter):
    """Whether a parameter belongs to a layer of torch, not to the model or timm's LayerScale."""
    return not name.endswith(("reg_token", "pos_embed", "gamma"))


CASES = {
    "wide_resnet": (lambda: wide_resnet(10, 1, num_classes=4), lambda: images(16), "weights"),
    "all_cnn_c": (lambda: all_cnn_c(4), lambda: images(32), "weights"),
    "conv_net": (lambda: conv_net(1, 8, num_classes=4), lambda: images(32), "all"),
    "resnet50": (
        lambda: resnet50(4, blocks=(1, 1, 1, 1), width_per_group=8, expansion=1),
        lambda: images(32),
        "weights",
    ),
    "vit_little": (
        lambda: vit_little(4, image_size=32, depth=2, embed_dim=48, num_heads=4),
        lambda: images(32),
        layers_of_torch,
    ),
    "gpt": (lambda: GPT(11, context=8, depth=1, width=16, heads=2), tokens, "all"),
    "lora": (
        lambda: with_lora(GPT(11, context=8, depth=1, width=16, heads=2), rank=2),
        tokens,
        "all",
    ),
}


@pytest.mark.parametrize(("name", "curvature"), one_axis_at_a_time(CASES, ["kfac", "ekfac"]))
def test_fits_samples_and_predicts(name, curvature):
    torch.manual_seed(0)
    make, data, params = CASES[name]
    model = make().eval()
    x, y = data()
    original = {key: value.clone() for key, value in model.state_dict().items()}
    la = Laplace(model, curvature=curvature, params=params, fisher="mc", factor_dtype=torch.float32)
    halves = [(x[:3], y[:3]), (x[3:], y[3:])]
    la.fit(halves, mode="debiased", num_data=100)
    draws = la.sample(2, torch.Generator().manual_seed(0))
    assert draws.isfinite().all()
    assert (draws[0] - draws[1]).abs().max() > 0
    outputs = model(x[:2]).detach()
    for method in ("glm", "glm-mc", "nn"):
        samples = None if method == "glm" else 2
        predictive = la.predict(x[:2], method, samples)
        assert predictive.probs.shape == outputs.shape
        assert predictive.probs.isfinite().all()
    mean, variances = la.functional(x[:2], diagonal=True)
    torch.testing.assert_close(mean, outputs, rtol=1e-4, atol=1e-5)
    assert (variances > 0).all()
    assert all(torch.equal(value, original[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("name", ["gpt", "lora", "vit_little", "wide_resnet"])
def test_variances_are_those_of_dense_jacobians(name):
    """The variances are diag(J P⁻¹ Jᵀ) with the diagonal precision P of the fit."""
    torch.manual_seed(0)
    make, data, params = CASES[name]
    model = make().double().eval()
    x, y = data()
    x, y = (x.double() if x.is_floating_point() else x)[:2], y[:2]
    la = Laplace(model, curvature="diag", params=params, prior_precision=2.0, fisher="empirical")
    la.fit_batches([(x, y)])
    precision = la.posterior.precision @ torch.ones(len(la.mean)).double()
    J = oracle.flat_jacobian(model, x, la.param_names)
    expected = (J.square() / precision).sum(-1)
    torch.testing.assert_close(la.functional(x, diagonal=True)[1].flatten(1), expected)


def test_frozen_parameters_cost_nothing():
    """A LoRA-adapted network's base is neither in the posterior nor differentiated."""
    torch.manual_seed(0)
    model = with_lora(GPT(11, context=8, depth=2, width=16, heads=2), rank=2).eval()
    la = Laplace(model, fisher="mc").fit_batches([tokens()])
    trainable = [name for name, p in model.named_parameters() if p.requires_grad]
    assert la.param_names == trainable
    assert len(la.mean) == sum(model.get_parameter(name).numel() for name in trainable)
    assert {block.layer.rpartition(".")[2] for block in la._parameters.blocks} == {
        "lora_a",
        "lora_b",
    }


# ------------------------------------------------------------------------------ last layer


@pytest.mark.parametrize("curvature", ["kfac", "ekfac", "diag"])
@pytest.mark.parametrize("joint", [False, True])
def test_the_last_layer_in_closed_form_is_that_of_dense_jacobians(curvature, joint):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4)).double().eval()
    x = torch.randn(6, 3).double()
    y = torch.randint(4, (6,))
    for params in ("last_layer", "all"):
        la = Laplace(model, curvature=curvature, params=params, joint=joint, prior_precision=0.7)
        la.fit_batches([(x, y)], num_data=11)
        J = oracle.flat_jacobian(model, x, la.param_names)
        expected = J @ la.posterior.covariance.to_dense() @ J.mT
        torch.testing.assert_close(la.functional(x)[1], expected)
        variances = expected.diagonal(dim1=1, dim2=2)
        torch.testing.assert_close(la.functional(x, diagonal=True)[1], variances)
        outputs = torch.tensor([[3, 0], [1, 2]] * 3)
        output_covariance = torch.stack(
            [
                covariance[index][:, index]
                for covariance, index in zip(expected, outputs, strict=True)
            ]
        )
        torch.testing.assert_close(la.functional(x, outputs=outputs)[1], output_covariance)


def test_a_thousand_classes_take_no_jacobian(monkeypatch):
    """The variances of 1,100 logits come from `U_Aᵀφ` and `U_G` alone: no backward pass is run."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 256), nn.Tanh(), nn.Linear(256, 1100)).eval()
    x = torch.randn(3, 8)
    y = torch.randint(1100, (3,))
    la = Laplace(
        model, params="last_layer", fisher="mc", factor_dtype=torch.float32, memory_bound=2**21
    )
    la.fit_batches([(x, y)])

    def refuse(*_, **__):
        raise AssertionError("A gradient was asked for.")

    monkeypatch.setattr(torch.autograd, "grad", refuse)
    mean, variances = la.functional(x, diagonal=True)
    assert mean.shape == variances.shape == (3, 1100)
    weight, bias = la.posterior.curvature.blocks.values()
    phi = torch.tanh(model[0](x[:1]))[0].detach()
    along = weight.input_directions.coordinates(phi).square() / (3 * weight.expanded_magnitudes + 1)
    frames = weight.output_directions.frame(), bias.output_directions.frame()
    expected = frames[0].square() @ along.sum(1) + frames[1].square() @ (
        1 / (3 * bias.expanded_magnitudes[:, 0] + 1)
    )
    torch.testing.assert_close(variances[0], expected, rtol=1e-4, atol=1e-5)


# ----------------------------------------------------------------- libraries' architectures

# One for each way in which parameters act.
LIBRARY_BY_NETWORK = {
    "regnet_y": "torchvision",
    "densenet121": "torchvision",
    "convnext_tiny": "torchvision",
    "vit_tiny_patch16_224": "timm",
    "xcit_nano_12_p8_224": "timm",
    "resnetv2_50": "timm",
    "swin_tiny_patch4_window7_224": "timm",
    "eva02_tiny_patch14_224": "timm",
    "levit_128s": "timm",
    "sequencer2d_s": "timm",
    "T5ForSequenceClassification": "transformers",
    "LlamaForCausalLM, tied": "transformers",
    "LlamaForSequenceClassification, LoRA": "peft",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    others_slow(LIBRARY_BY_NETWORK, "regnet_y", "vit_tiny_patch16_224", "LlamaForCausalLM, tied"),
)
def test_the_defaults_work_and_variances_are_those_of_plain_autograd(name):
    library = LIBRARY_BY_NETWORK[name]
    pytest.importorskip(library)
    # Not above: these import other libraries, which takes seconds.
    from benchmarks.architectures.measurement import disagreement
    from benchmarks.architectures.zoo import architectures

    architecture = architectures()[name]
    model = architecture.model()
    x, y = architecture.data(4)
    la = Laplace(model).fit([(x, y)])
    assert la.param_names == [n for n, p in model.named_parameters() if p.requires_grad]
    assert la.predict(x).probs.isfinite().all()
    # Normalisations of Hugging Face compute in single precision for inputs of any precision.
    has_single_precision = library in ("transformers", "peft")
    assert disagreement(architecture) < (1e-6 if has_single_precision else 1e-11)
