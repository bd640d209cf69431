"""Adapters on a frozen base that is quantised or offloaded, against the plain base."""

import copy
from itertools import pairwise

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForSequenceClassification

from laplace_debias import Laplace
from laplace_debias.curvature import GGN

IDS = torch.randint(1, 64, (8, 6), generator=torch.Generator().manual_seed(1))
LABELS = torch.randint(3, (8,), generator=torch.Generator().manual_seed(2))
BATCHES = [({"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}, LABELS)]
INPUTS = {"input_ids": IDS[:3], "attention_mask": torch.ones_like(IDS[:3])}


def base():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_labels=3,
        pad_token_id=0,
    )
    return LlamaForSequenceClassification(config).eval()


def with_adapters(model):
    config = LoraConfig(
        r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="SEQ_CLS"
    )
    adapted = get_peft_model(model, config).eval()
    generator = torch.Generator().manual_seed(3)
    for name, parameter in adapted.named_parameters():
        if parameter.requires_grad:
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.data.copy_(0.1 * noise if "lora" in name else noise)
    return adapted


def base_layers(model):
    """Paths of the base's linear layers, without the head."""
    for path, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and "score" not in path:
            yield path, module


def replaced(model, make):
    for path, layer in base_layers(model):
        parent, _, key = path.rpartition(".")
        setattr(model.get_submodule(parent), key, make(layer))
    return model


def int8_by_torchao(model):
    quantization = pytest.importorskip("torchao.quantization")
    paths = {path for path, _ in base_layers(model)}
    quantization.quantize_(
        model, quantization.Int8WeightOnlyConfig(), filter_fn=lambda _, path: path in paths
    )
    return model


def nf4_by_bitsandbytes(model):
    bnb = pytest.importorskip("bitsandbytes")

    def make(layer):
        quantised = bnb.nn.Linear4bit(
            layer.in_features, layer.out_features, bias=False, compute_dtype=torch.float32
        )
        weight = layer.weight.data
        quantised.weight = bnb.nn.Params4bit(weight, requires_grad=False, quant_type="nf4")
        return quantised.to("cpu")

    return replaced(model, make)


def int8_by_bitsandbytes(model):
    bnb = pytest.importorskip("bitsandbytes")

    def make(layer):
        quantised = bnb.nn.Linear8bitLt(
            layer.in_features, layer.out_features, bias=False, has_fp16_weights=False
        )
        weight = layer.weight.data
        quantised.weight = bnb.nn.Int8Params(weight, requires_grad=False, has_fp16_weights=False)
        return quantised.to("cpu")

    return replaced(model, make)


def dequantised_weight(layer):
    """The weight that a quantised layer multiplies by, out of its own forward pass."""
    with torch.no_grad():
        return layer(torch.eye(layer.in_features)).T.contiguous()


QUANTISED = {
    "torchao int8": int8_by_torchao,
    "bitsandbytes nf4": nf4_by_bitsandbytes,
    "bitsandbytes int8": int8_by_bitsandbytes,
}
# bitsandbytes' int8 layers round their inputs, too, so that no plain layer computes the same.
EXACT = ["torchao int8", "bitsandbytes nf4"]


@pytest.fixture(scope="module", params=EXACT)
def pair(request):
    """A quantised model with adapters, and the same with a dequantised base; both fitted."""
    quantised = with_adapters(QUANTISED[request.param](base()))
    plain = base()
    originals = dict(QUANTISED[request.param](base()).named_modules())
    for path, layer in base_layers(plain):
        layer.weight.data.copy_(dequantised_weight(originals[path]))
    plain = with_adapters(plain)
    options = {"prior_precision": 2.0}
    return tuple(
        Laplace(model, **options).fit(BATCHES, num_data=50) for model in (quantised, plain)
    )


def assert_close(actual, expected, tolerance=2e-6):
    difference = float((actual - expected).detach().abs().max())
    assert difference <= tolerance * max(float(expected.detach().abs().max()), 1)


def test_curvature_and_covariances_are_those_of_the_dequantised_base(pair):
    quantised, plain = pair
    # torchao multiplies by the integers first and by their scale afterwards, which rounds in
    # another way, in single precision.
    tolerance = 2e-5
    assert torch.equal(quantised.mean, plain.mean)
    for name, block in plain.posterior.curvature.blocks.items():
        quantised_block = quantised.posterior.curvature.blocks[name]
        expected = block.to_dense()
        difference = (quantised_block.to_dense() - expected).abs().max() / expected.abs().max()
        assert difference < tolerance, name
    for actual, expected in zip(
        quantised.functional(INPUTS), plain.functional(INPUTS), strict=True
    ):
        assert_close(actual, expected, tolerance)
    assert_close(quantised.log_marginal_likelihood(), plain.log_marginal_likelihood())


@pytest.mark.parametrize("was_run", [False, True])
@pytest.mark.parametrize("name", QUANTISED)
def test_a_quantised_base_goes_through_every_verb_and_is_left_alone(name, was_run, tmp_path):
    model = with_adapters(QUANTISED[name](base()))
    original = {key: value.detach().clone() for key, value in model.named_parameters()}
    reference = with_adapters(QUANTISED[name](base()))
    with torch.no_grad():
        outputs = (model if was_run else reference)(**INPUTS).logits
    types = [type(parameter) for parameter in model.parameters()]
    la = Laplace(model).fit(BATCHES, num_data=50)
    la.tune(BATCHES)
    probs = la.predict(INPUTS).probs
    assert probs.isfinite().all()
    assert la.predict(INPUTS, method="nn", samples=3).probs.isfinite().all()
    assert 0 < la.thin(INPUTS).share <= 1
    la.save(tmp_path / "adapters.safetensors")
    again = Laplace.load(tmp_path / "adapters.safetensors", model)
    assert_close(again.predict(INPUTS).probs, la.predict(INPUTS).probs)
    assert [type(parameter) for parameter in model.parameters()] == types
    for key, value in model.named_parameters():
        # bitsandbytes packs weights when it first runs them.
        if type(value) is nn.Parameter and not was_run:
            assert torch.equal(value, original[key]), key
    with torch.no_grad():
        assert torch.equal(model(**INPUTS).logits, outputs)


def test_a_bayesian_parameter_that_is_quantised_is_refused_by_name():
    model = int8_by_torchao(base())
    name = "model.layers.0.self_attn.q_proj.weight"
    model.get_parameter(name).requires_grad_(True)
    with pytest.raises(
        NotImplementedError, match=rf"{name} is quantised \((Int8|AffineQuantized)Tensor\)"
    ):
        Laplace(model, params=[name])


def test_a_quantised_base_in_half_precision_stays_so():
    model = with_adapters(int8_by_torchao(base().bfloat16()).bfloat16())
    dtypes = [parameter.dtype for parameter in model.parameters()]
    assert torch.bfloat16 in dtypes
    la = Laplace(model).fit(BATCHES, num_data=50)
    assert la.predict(INPUTS).probs.isfinite().all()
    assert [parameter.dtype for parameter in model.parameters()] == dtypes


def test_operators_leave_a_quantised_base_as_it_is(pair):
    quantised, plain = (la.model for la in pair)
    loss = nn.CrossEntropyLoss()
    products = []
    for model in (quantised, plain):
        names = [name for name, p in model.named_parameters() if p.requires_grad]
        operator = GGN(model, loss, BATCHES, params=names)
        products.append(operator @ torch.ones(operator.shape[1]))
    assert_close(products[0], products[1], 2e-5)


def adapted_layers(number):
    """Linear layers of 24 x 40 and 40 x 24, each with an adapter, and a head."""
    torch.manual_seed(0)
    sizes = [24, 40] * (number // 2) + [24]
    layers = [nn.Linear(*shape, bias=False) for shape in pairwise(sizes)]
    base = nn.Sequential(*layers, nn.Linear(24, 3)).requires_grad_(False)
    config = LoraConfig(r=2, target_modules=[str(n) for n in range(number)])
    return base, config


class LiveStorages(TorchDispatchMode):
    """Counts the storages of a number of bytes that are alive at once."""

    def __init__(self, num_bytes):
        super().__init__()
        self.num_bytes = num_bytes
        self.storages = {}
        self.most = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if type(result) is Tensor and result.untyped_storage().nbytes() == self.num_bytes:
            storage = StorageWeakRef(result.untyped_storage())
            self.storages[storage.cdata] = storage
            is_alive = [not storage.expired() for storage in self.storages.values()]
            self.most = max(self.most, sum(is_alive))
        return result


def test_a_pass_holds_one_dequantised_layer_at_once():
    quantization = pytest.importorskip("torchao.quantization")
    base, config = adapted_layers(20)
    quantization.quantize_(
        base[:20], quantization.Int8WeightOnlyConfig(), filter_fn=lambda m, _: type(m) is nn.Linear
    )
    model = get_peft_model(base, config).eval()
    x = torch.randn(5, 24)
    with LiveStorages(24 * 40 * torch.float32.itemsize) as live:
        model(x)
    assert live.most >= 19, "the graph of the user's own pass keeps the dequantised weights"
    with LiveStorages(24 * 40 * torch.float32.itemsize) as live:
        Laplace(model).fit([(x, torch.arange(5) % 3)]).predict(x)
    assert 1 <= live.most <= 2
    assert not any("forward" in vars(module) for module in model.modules())


def test_sequential_layers_around_a_quantised_layer_have_the_plain_posterior():
    quantization = pytest.importorskip("torchao.quantization")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 3)).eval()
    model[2].requires_grad_(False)
    plain = copy.deepcopy(model)
    quantization.quantize_(model[2], quantization.Int8WeightOnlyConfig())
    plain[2].weight.data.copy_(model[2].weight.dequantize())
    x = torch.randn(7, 6)
    data = [(x, torch.arange(7) % 3)]
    with pytest.raises(
        NotImplementedError, match=r"2.weight is quantised \((Int8|AffineQuantized)Tensor\)"
    ):
        Laplace(model, backend="backpack")
    actual = Laplace(model).fit(data)
    expected = Laplace(plain).fit(data)
    assert_close(actual.posterior.precision.to_dense(), expected.posterior.precision.to_dense())
    assert_close(actual.predict(x).probs, expected.predict(x).probs)


def test_a_changed_quantised_base_is_noticed():
    model = with_adapters(nf4_by_bitsandbytes(base()))
    la = Laplace(model).fit(BATCHES, num_data=50)
    la.predict(INPUTS)
    name, weight = next((n, p) for n, p in model.named_parameters() if p.dtype == torch.uint8)
    weight.data[0] ^= 1
    with pytest.raises(RuntimeError, match=f"{name} has changed since the fit"):
        la.predict(INPUTS)


@pytest.mark.parametrize("to_disk", [False, True])
def test_an_offloaded_base_is_run_as_it_is(to_disk, tmp_path):
    accelerate = pytest.importorskip("accelerate")
    model = base()
    if to_disk:
        accelerate.disk_offload(model.model, tmp_path)
    else:
        accelerate.cpu_offload(model.model)
    assert any(parameter.is_meta for parameter in model.parameters())
    for parameter in model.model.parameters():
        parameter.requires_grad_(False)
    offloaded = Laplace(model, params=["score.weight"]).fit(BATCHES, num_data=50)
    in_memory = Laplace(base(), params=["score.weight"]).fit(BATCHES, num_data=50)
    assert torch.equal(
        offloaded.posterior.precision.to_dense(), in_memory.posterior.precision.to_dense()
    )
    assert torch.equal(offloaded.predict(INPUTS).probs, in_memory.predict(INPUTS).probs)
    assert any(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize("to_disk", [False, True])
def test_adapters_of_an_offloaded_base_have_the_posterior_of_those_of_a_plain_one(
    to_disk, tmp_path
):
    accelerate = pytest.importorskip("accelerate")
    expected = Laplace(with_adapters(base())).fit(BATCHES, num_data=50)
    model = with_adapters(base())
    for number, module in enumerate(model.modules()):
        if isinstance(module, nn.Linear) and hasattr(module, "weight"):
            if module.weight.requires_grad:
                continue
            if to_disk:
                accelerate.disk_offload(module, tmp_path / str(number))
            else:
                accelerate.cpu_offload(module)
    assert any(parameter.is_meta for parameter in model.parameters())
    la = Laplace(model).fit(BATCHES, num_data=50)
    assert la.param_names == expected.param_names
    precision = la.posterior.precision.to_dense()
    assert_close(precision, expected.posterior.precision.to_dense())
    assert_close(la.predict(INPUTS).probs, expected.predict(INPUTS).probs)


def test_the_last_layer_of_a_model_whose_first_layers_are_offloaded():
    """The first layers are offloaded, but not frozen."""
    accelerate = pytest.importorskip("accelerate")
    inputs = torch.randn(6, 4, dtype=torch.float64)
    data = [(inputs, torch.arange(6) % 3)]

    def build():
        torch.manual_seed(0)
        layers = (nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
        return nn.Sequential(*layers).double().eval()

    model = build()
    accelerate.cpu_offload(model[0])
    assert model[0].weight.is_meta
    la = Laplace(model, params="last_layer").fit(data)
    expected = Laplace(build(), params="last_layer").fit(data)
    assert torch.equal(la.predict(inputs).probs, expected.predict(inputs).probs)
    v = torch.ones(18, dtype=torch.float64)
    loss = nn.CrossEntropyLoss()
    operators = [GGN(m, loss, data, params="last_layer") for m in (model, build())]
    assert torch.equal(operators[0] @ v, operators[1] @ v)
    accelerate.cpu_offload(model[2])
    with pytest.raises(NotImplementedError, match=r"0.weight is offloaded"):
        Laplace(model, params="last_layer")


def test_a_bayesian_parameter_that_is_offloaded_is_refused_by_name():
    accelerate = pytest.importorskip("accelerate")
    model = base()
    accelerate.cpu_offload(model)
    with pytest.raises(NotImplementedError, match=r"embed_tokens.weight is offloaded"):
        Laplace(model)
