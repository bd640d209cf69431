"""A prediction detects that the model has changed since the fit, whatever changed it."""

import copy
import pickle

import pytest
import torch
from oracle import close, flat_jacobian, functional_covariance
from torch import nn
from torch.nn.utils import parametrizations, prune

from laplace_debias import Laplace
from laplace_debias.curvature.network import change_detector, fingerprints
from laplace_debias.curvature.network.change_detector import ChangeDetector
from laplace_debias.curvature.network.fingerprints import fingerprint
from laplace_debias.laplace.state import prediction_cache

LARGE = 100


def network():
    """Its first layer is so large that not every entry of it is read."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, LARGE), nn.BatchNorm1d(LARGE), nn.Linear(LARGE, LARGE), nn.Linear(LARGE, 3)
    ).eval()


def optimizer(kind, **options):
    def step(model):
        torch.manual_seed(1)
        model(torch.randn(5, 4)).square().sum().backward()
        kind(model[2:3].parameters(), lr=0.1, **options).step()
        model.zero_grad()

    return step


@torch.no_grad()
def in_place(model):
    model[2].weight.mul_(2)


def double_data(model):
    model[2].weight.data.mul_(2)


def new_data(model):
    model[2].weight.data = model[2].weight.data * 2


def new_data_twice(model):
    """The second one may lie where the first one lay."""
    for _ in range(2):
        new_data(model)


def by_numpy(model):
    model[2].weight.detach().numpy()[:] *= 2


def by_dlpack(model):
    torch.from_dlpack(model[2].weight.detach()).mul_(2)


def by_storage(model):
    model[2].weight.untyped_storage().fill_(1)


def double_data_by_foreach(model):
    torch._foreach_mul_([p.data for p in model[2].parameters()], 2)


def uncounted(model):
    weight = model[2].weight
    with torch.autograd._unsafe_preserve_version_counter(weight), torch.no_grad():
        weight.mul_(2)


def inference(model):
    with torch.inference_mode():
        model[2].weight.mul_(2)


def swapped(model):
    torch.utils.swap_tensors(model[2].weight, nn.Parameter(model[2].weight.detach() * 2))


def by_vector(model):
    vector = nn.utils.parameters_to_vector(model[2].parameters())
    nn.utils.vector_to_parameters(2 * vector, model[2].parameters())


def loaded(model, **options):
    model[2].load_state_dict({k: 2 * v for k, v in model[2].state_dict().items()}, **options)


def assigned(model):
    loaded(model, assign=True)


def new_layer(model):
    model[2] = nn.Linear(LARGE, LARGE)


def converted(model):
    model[2].bfloat16().float()


def statistics(model):
    model[1].train()(torch.randn(5, LARGE))
    model.eval()


def new_buffer(model):
    model[2].register_buffer("mask", torch.ones(3))


WAYS = {
    **{
        f"{kind.__name__} {options}": optimizer(kind, **options)
        for kind in (torch.optim.SGD, torch.optim.Adam)
        for options in ({"foreach": False}, {"foreach": True}, {"fused": True})
    },
    **{
        way.__name__: way
        for way in (
            *(in_place, double_data, new_data, new_data_twice, by_numpy, by_dlpack, by_storage),
            *(double_data_by_foreach, uncounted, inference, swapped, by_vector, loaded, assigned),
            *(new_layer, converted, statistics, new_buffer),
        )
    },
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_change_a_model_is_found_by_the_next_prediction(way):
    model = network()
    x = torch.randn(6, 4)
    la = Laplace(model, params="last_layer").fit_batches([(x, torch.arange(6) % 3)])
    for _ in range(2):  # the first one reads everything
        la.predict(x, "map")
    WAYS[way](model)
    with pytest.raises(RuntimeError, match=r"[12]\.\w+ has changed since the fit"):
        la.predict(x, "map")


def test_what_did_not_change_is_read_in_full_once(monkeypatch):
    read = []
    full = fingerprints.sum_of_bits
    monkeypatch.setattr(change_detector, "sum_of_bits", lambda x: read.append(x.numel()) or full(x))
    model = network()
    sums = fingerprint(model, [])
    detector = ChangeDetector()

    def entries_read():
        read.clear()
        assert detector.changed_tensor(model, [], sums) is None
        return sum(read)

    num_entries = sum(x.numel() for x in model.state_dict().values())
    assert (entries_read(), entries_read()) == (num_entries, 0)
    model[2].weight.data = model[2].weight.data.clone()
    assert (entries_read(), entries_read()) == (num_entries, 0)


@pytest.mark.parametrize("layer", [0, 3])
@pytest.mark.parametrize(
    "convert", [{"dtype": torch.bfloat16}, {"memory_format": torch.channels_last}]
)
def test_changes_are_found_in_half_precision_and_in_every_memory_format(convert, layer):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 40, 3), nn.ReLU(), nn.Flatten(), nn.Linear(160, 3))
    model.eval().to(**convert)
    x = torch.randn(6, 3, 4, 4).to(model[0].weight.dtype)
    la = Laplace(model, params="last_layer").fit_batches([(x, torch.arange(6) % 3)])
    for _ in range(3):
        la.predict(x)
    model[layer].weight.data.mul_(2)
    with pytest.raises(RuntimeError, match="changed since the fit"):
        la.predict(x)


def test_a_change_is_found_after_a_conversion_to_half_precision_that_rounds_nothing():
    model = network()
    x = torch.randn(6, 4)
    with torch.no_grad():
        for parameter in model[3].parameters():
            parameter.copy_(parameter.bfloat16())
    la = Laplace(model, params="last_layer").fit_batches([(x, torch.arange(6) % 3)])
    la.predict(x)
    model[3].bfloat16()
    for _ in range(2):
        la.predict(x)
    model[3].weight.data.mul_(2)
    with pytest.raises(RuntimeError, match="changed since the fit"):
        la.predict(x)


@pytest.mark.parametrize("make_copy", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_watches_its_own_model(make_copy):
    model = network()
    x = torch.randn(6, 4)
    la = Laplace(model, params="last_layer").fit_batches([(x, torch.arange(6) % 3)])
    la.predict(x, "map")
    duplicate = make_copy(la)
    double_data(model)
    duplicate.predict(x, "map")
    double_data(duplicate.model)
    for posterior in (la, duplicate):
        with pytest.raises(RuntimeError, match="has changed since the fit"):
            posterior.predict(x, "map")


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last),
        torch.randn(3, 4).T,
        torch.randn(3).expand(2, 3),
        torch.randn(4, 4)[:, :2],
        torch.randn(3000, 2)[:, 1],
        torch.randn(3, dtype=torch.complex128),
        torch.randn(3000, dtype=torch.complex128),
        torch.tensor([torch.nan, 1.0]),
        torch.tensor([True, True, False]),
        torch.tensor(3),
        torch.zeros(0),
        torch.eye(3).to_sparse(),
    ],
    ids=lambda x: f"{x.dtype}{tuple(x.shape)}{x.layout}",
)
def test_tensors_of_every_kind_are_watched(tensor):
    model = nn.Module()
    model.register_buffer("held", tensor)
    sums = fingerprint(model, [])
    detector = ChangeDetector()
    for _ in range(3):
        assert detector.changed_tensor(model, [], sums) is None
    if tensor.numel():
        tensor = tensor.to_dense() if tensor.is_sparse else tensor
        model.held = ~tensor if tensor.dtype == torch.bool else tensor + 1
        assert detector.changed_tensor(model, [], sums) == "held"


class Net(nn.Module):
    """A network whose forward pass depends on an attribute."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 5)
        self.head = nn.Linear(5, 3)
        self.uses_head_twice = False
        self.adds_square = False

    def forward(self, x):
        """Shape `[B, 3]`."""
        hidden = torch.tanh(self.body(x))
        outputs = self.head(hidden)
        if self.uses_head_twice:
            outputs = outputs + self.head(2 * hidden)
        if self.adds_square:
            outputs = outputs + self.head.weight.square().sum() * hidden[:, :1]
        return outputs


class Half(nn.Linear):
    """A linear layer with another forward pass."""

    def forward(self, x):
        """Half of the outputs."""
        return super().forward(x) / 2


def half_head(model):
    head = Half(5, 3).double()
    head.load_state_dict(model.head.state_dict())
    model.head = head


def half_head_by_class(model):
    model.head.__class__ = Half


def square_of_head(model):
    model.adds_square = True


def fitted_net(params):
    torch.manual_seed(0)
    x = torch.randn(6, 4, dtype=torch.float64)
    la = Laplace(Net().double().eval(), params=params, curvature="full")
    return la.fit_batches([(x, torch.arange(6) % 3)]), x


@pytest.mark.parametrize("predicts_before", [False, True])
@pytest.mark.parametrize("params", ["all", "last_layer"])
@pytest.mark.parametrize("change", [half_head, half_head_by_class, square_of_head])
def test_a_layer_that_is_used_otherwise_than_at_the_fit_raises(change, params, predicts_before):
    la, x = fitted_net(params)
    if predicts_before:
        la.predict(x)
    change(la.model)
    for size in (6, 1):
        for options in ({}, {"joint": True}, {"differentiable": True}):
            with pytest.raises(
                RuntimeError, match=r"changed since the fit.*\['head.weight'.*Undo.*or fit again"
            ):
                la.functional(x[:size], **options)
    with pytest.raises(RuntimeError, match="changed since the fit"):
        la.predict(x, "nn")


def hook_of_body(model):
    model.body.register_forward_hook(lambda module, inputs, outputs: 2 * outputs)


def hook_of_head(model):
    model.head.register_forward_pre_hook(lambda module, inputs: (inputs[0].square(),))


def half_body(model):
    model.body.__class__ = Half


def head_twice(model):
    model.uses_head_twice = True


def train(model):
    model.train()


@pytest.mark.parametrize("change", [hook_of_body, hook_of_head, half_body, head_twice, train])
def test_a_change_that_the_blocks_describe_is_accepted(change):
    la, x = fitted_net("last_layer")
    la.predict(x)
    change(la.model)
    J = flat_jacobian(copy.deepcopy(la.model).eval(), x, la.param_names)
    expected = functional_covariance(J, la.posterior.covariance.to_dense())
    for size in (6, 1):
        close(la.functional(x[:size])[1], expected[:size])


def multiply_outputs_by_number_of_calls(module, inputs, outputs):
    module.num_calls = getattr(module, "num_calls", 0) + 1
    return outputs * module.num_calls


def multiply_inputs_by_number_of_calls(module, inputs):
    module.num_calls = getattr(module, "num_calls", 0) + 1
    return (inputs[0] * module.num_calls,)


@pytest.mark.parametrize("params", ["all", "last_layer"])
@pytest.mark.parametrize(
    ("method", "hook"),
    [
        ("register_forward_hook", multiply_outputs_by_number_of_calls),
        ("register_forward_pre_hook", multiply_inputs_by_number_of_calls),
    ],
)
def test_attributes_that_a_hook_sets_do_not_change_later_predictions(params, method, hook):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    x = torch.randn(8, 3, dtype=torch.float64)
    expected = model(x).detach()
    getattr(model[0], method)(hook)
    la = Laplace(model, "classification", params=params).fit([(x, torch.arange(8) % 2)])
    for _ in range(3):
        close(la.functional(x)[0], expected)
    assert not hasattr(model[0], "num_calls")


def test_a_changed_model_is_verified_once(monkeypatch):
    verified = []
    verify = prediction_cache.differing_blocks
    monkeypatch.setattr(
        prediction_cache, "differing_blocks", lambda *args: verified.append(args) or verify(*args)
    )
    la, x = fitted_net("all")
    for num_verified in (0, 1, 2):
        for _ in range(3):
            la.predict(x)
            la.functional(x, differentiable=True)
        assert len(verified) == num_verified
        hook_of_body(la.model)


def pruned(model):
    prune.l1_unstructured(model.head, "weight", 0.5)


def parametrised(model):
    parametrizations.weight_norm(model.head)


def deleted(model):
    del model.head


def wrapped(model):
    model.head = nn.Sequential(model.head)


def without_weight(model):
    model.head.weight = None


@pytest.mark.parametrize("params", ["all", "last_layer"])
@pytest.mark.parametrize("change", [pruned, parametrised, deleted, wrapped, without_weight])
def test_a_bayesian_parameter_that_is_gone_is_named(change, params):
    la, x = fitted_net(params)
    la.predict(x)
    change(la.model)
    for predict in (la.predict, la.functional):
        with pytest.raises(
            RuntimeError, match=r"no longer has the parameter head\.weight.*Undo.*, or fit again"
        ):
            predict(x)


class EmbeddingNet(nn.Module):
    """An embedding, a linear layer and a head."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.body = nn.Linear(4, 5)
        self.head = nn.Linear(5, 3)

    def forward(self, x):
        return self.head(self.body(self.embedding(x)).tanh())


def with_two_adapters(active, **options):
    """A network with the adapters "a" and "b", none of which is zero."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = peft.LoraConfig(r=2, target_modules=["body"], **options)
    model = peft.get_peft_model(Net(), config, adapter_name="a")
    model.add_adapter("b", config)
    model.set_adapter(active)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    return model.double().eval()


def with_two_prompts(active):
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    base = transformers.BertConfig(
        vocab_size=9,
        hidden_size=4,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=4,
        num_labels=3,
    )
    config = peft.PromptTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=2)
    model = transformers.BertForSequenceClassification(base)
    model = peft.get_peft_model(model, config, adapter_name="a")
    model.add_adapter("b", config)
    model.set_adapter(active)
    return model.double().eval()


def switched(model):
    model.set_adapter("b")


def disabled(model):
    model.base_model.disable_adapter_layers()


def scaled(model):
    for module in model.modules():
        if hasattr(module, "set_scale"):
            module.set_scale("a", 3.0)


def merged(model):
    model.merge_adapter()


@pytest.mark.parametrize("predicts_before", [False, True])
@pytest.mark.parametrize("options", [{}, {"modules_to_save": ["head"]}, {"use_dora": True}])
@pytest.mark.parametrize(
    ("change", "state"),
    [
        (switched, r"active adapters \['b'\]"),
        (disabled, "disabled adapters"),
        (scaled, r"scaled by \{'a': 12.0\}"),
        (merged, r"the merged adapters \['a'\]"),
    ],
)
def test_other_adapters_than_at_the_fit_raise(change, state, options, predicts_before):
    """No tensor changes when PEFT switches to another adapter."""
    model = with_two_adapters("a", **options)
    x = torch.randn(6, 4, dtype=torch.float64)
    la = Laplace(model, curvature="full").fit_batches([(x, torch.arange(6) % 3)])
    if predicts_before:
        la.predict(x)
    change(model)
    for call in (la.predict, la.functional, lambda x: la.predict(x, "nn", 2)):
        with pytest.raises(
            RuntimeError, match=rf"{state}.*the active adapters \['a'\].*at the fit"
        ):
            call(x)


def test_the_error_after_merging_and_unmerging_names_the_cause():
    model = with_two_adapters("a").float()
    x = torch.randn(6, 4)
    la = Laplace(model).fit_batches([(x, torch.arange(6) % 3)])
    model.merge_adapter()
    model.unmerge_adapter()
    with pytest.raises(RuntimeError, match=r"base_layer.* changed .*`unmerge_adapter` .*rounding"):
        la.predict(x)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"modules_to_save": ["head"]},
        {"use_dora": True},
        {"target_modules": ["embedding", "body"]},
    ],
)
def test_adapters_that_are_not_active_do_not_matter(options, tmp_path):
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = peft.LoraConfig(**{"r": 2, "target_modules": ["body"], **options})
    model = peft.get_peft_model(EmbeddingNet(), config, adapter_name="a").eval()
    x = torch.arange(6)
    la = Laplace(model).fit_batches([(x, x % 3)])
    probs = la.predict(x).probs
    la.save(tmp_path / "alone.safetensors")
    model.add_adapter("b", config)
    for _ in range(2):
        assert torch.equal(la.predict(x).probs, probs)
        for name, parameter in model.named_parameters():
            if ".b." in f"{name}.":
                nn.init.normal_(parameter)
    loaded = Laplace.load(tmp_path / "alone.safetensors", model)
    assert torch.equal(loaded.predict(x).probs, probs)
    la.save(tmp_path / "beside.safetensors")
    model.delete_adapter("b")
    loaded = Laplace.load(tmp_path / "beside.safetensors", model)
    assert torch.equal(loaded.predict(x).probs, probs)
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad and "original_module" not in name:
            parameter.data += 1.0
    with pytest.raises(RuntimeError, match=r"weight has changed"):
        la.predict(x)


def test_another_prompt_than_at_the_fit_raises():
    model = with_two_prompts("a")
    x = {"input_ids": torch.arange(12).view(3, 4) % 9}
    la = Laplace(model, curvature="full").fit_batches([(x, torch.arange(3))])
    la.predict(x)
    model.set_adapter("b")
    with pytest.raises(RuntimeError, match=r"\['b'\], but had .*\['a'\] at the fit"):
        la.predict(x)


def test_adapters_that_are_active_again_have_the_same_posterior(tmp_path):
    model = with_two_adapters("a")
    x = torch.randn(6, 4, dtype=torch.float64)
    la = Laplace(model).fit_batches([(x, torch.arange(6) % 3)])
    probs = la.predict(x).probs
    model.set_adapter("b")
    model.set_adapter("a")
    with model.disable_adapter():
        pass
    assert torch.equal(la.predict(x).probs, probs)
    la.save(tmp_path / "a.safetensors")
    reloaded = Laplace.load(tmp_path / "a.safetensors", model)
    assert torch.equal(reloaded.predict(x).probs, probs)
    model.set_adapter("b")
    with pytest.raises(RuntimeError, match=r"\['b'\].*\['a'\]"):
        reloaded.predict(x)


@pytest.mark.parametrize("value", [3, True, torch.ones(2), [1, 2], {"a": 1}])
def test_an_attribute_that_is_called_like_one_of_peft_means_nothing(value):
    model = nn.Sequential(nn.Linear(3, 2)).eval()
    model.active_adapter = value
    x = torch.randn(6, 3)
    la = Laplace(model).fit([(x, torch.arange(6) % 2)])
    assert la.predict(x).probs.shape == (6, 2)


@pytest.mark.parametrize("is_earlier_version", [False, True])
def test_a_posterior_loads_whatever_the_original_of_a_trained_head_is(
    tmp_path, monkeypatch, is_earlier_version
):
    """PEFT keeps the original of a head beside its trained copy, often with new random weights."""
    x = torch.randn(6, 4, dtype=torch.float64)
    y = torch.arange(6) % 3
    model = with_two_adapters("a", modules_to_save=["head"])
    la = Laplace(model).fit_batches([(x, y)])
    with monkeypatch.context() as patch:
        if is_earlier_version:  # Its files also describe the original head.
            patch.setattr(fingerprints, "unused_prefixes", lambda model: ())
            la = Laplace(model).fit_batches([(x, y)])
        la.save(tmp_path / "posterior.safetensors")
        expected = la.predict(x).probs
    again = with_two_adapters("a", modules_to_save=["head"])
    nn.init.normal_(again.base_model.model.head.original_module.weight)
    loaded = Laplace.load(tmp_path / "posterior.safetensors", again)
    assert torch.equal(loaded.predict(x).probs, expected)
    again.base_model.model.body.base_layer.weight.data += 1.0
    with pytest.raises(ValueError, match=r"body.base_layer.weight differs"):
        Laplace.load(tmp_path / "posterior.safetensors", again)
