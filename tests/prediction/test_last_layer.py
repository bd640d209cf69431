"""`params="last_layer"` is the layer that the outputs come from, or it is refused."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from language import with_lora
from networks import Net, dense_ggn
from oracle import flat_jacobian
from timm.models import create_model
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from laplace_debias import Laplace
from laplace_debias.curvature import GGN, KFAC
from laplace_debias.curvature.network.selection import last_layer_parameters

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
Y = torch.arange(8) % 3


def data(dtype=torch.float32):
    return [(X[:4].to(dtype), Y[:4]), (X[4:].to(dtype), Y[4:])]


def net_with_head(forward, **modules):
    """`body` is registered last; the outputs are the head's, whatever `forward` does with them."""
    return Net(forward, head=nn.Linear(5, 3), **modules, body=nn.Linear(4, 5)).eval()


def logits(self, x):
    return self.head(self.body(x).tanh())


HEAD = ["head.weight", "head.bias"]


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.top = nn.ModuleDict({"out": nn.Sequential(nn.Dropout(), nn.Linear(5, 3))})
        self.body = nn.Linear(4, 5)

    def forward(self, x):
        return self.top["out"](self.body(x).relu())


class Hugging(nn.Module):
    """Pools the logits of the last position, and returns them in an object."""

    def __init__(self):
        super().__init__()
        self.score = nn.Linear(5, 3, bias=False)
        self.body = nn.Linear(1, 5)

    def forward(self, x):
        return SimpleNamespace(logits=self.score(self.body(x[..., None]).tanh())[:, -1])


class Saved(nn.Module):
    """As PEFT's `modules_to_save`: a frozen original beside the copy that is used."""

    def __init__(self, layer):
        super().__init__()
        self.copy = nn.ModuleDict({"default": layer})
        self.original = nn.Linear(5, 3).requires_grad_(False)

    def forward(self, x):
        return self.copy["default"](x)


def in_place(self, x):
    z = logits(self, x)
    z /= 2
    return z.add_(1)


def without_gradient(self, x):
    with torch.no_grad():
        h = self.body(x).tanh()
    return self.head(h)


CASES = {
    "registered first": (lambda: net_with_head(logits), HEAD),
    "softmax": (lambda: net_with_head(lambda m, x: logits(m, x).log_softmax(-1)), HEAD),
    "rearranged": (
        lambda: net_with_head(lambda m, x: logits(m, x).T.flip(0).reshape(3, -1).mT[:, :2]),
        HEAD,
    ),
    "in place": (lambda: net_with_head(in_place), HEAD),
    "body without gradient": (lambda: net_with_head(without_gradient), HEAD),
    "twice": (lambda: net_with_head(lambda m, x: logits(m, x) + logits(m, -x)), HEAD),
    "gated by inputs": (lambda: net_with_head(lambda m, x: logits(m, x) * x[:, :3]), HEAD),
    "normalisation": (
        lambda: net_with_head(lambda m, x: m.norm(logits(m, x)), norm=nn.BatchNorm1d(3)),
        HEAD,
    ),
    "temperature": (
        lambda: net_with_head(lambda m, x: m.scale(logits(m, x)), scale=nn.PReLU()),
        HEAD,
    ),
    "nested": (lambda: Nested().eval(), ["top.out.1.weight", "top.out.1.bias"]),
    "in an object": (lambda: Hugging().eval(), ["score.weight"]),
    "modules to save": (
        lambda: Net(logits, head=Saved(nn.Linear(5, 3)), body=nn.Linear(4, 5)).eval(),
        ["head.copy.default.weight", "head.copy.default.bias"],
    ),
    "lora with a trained head": (lambda: with_lora(net_with_head(logits), 2, "body"), None),
    "attention": (
        lambda: Net(
            lambda m, x: m.attend(*[m.up(x[..., None])] * 3)[0].mean(1),
            attend=nn.MultiheadAttention(6, 2, batch_first=True),
            up=nn.Linear(1, 6),
        ).eval(),
        ["attend.out_proj.weight", "attend.out_proj.bias"],
    ),
    "one layer": (lambda: nn.Linear(4, 3).eval(), ["weight", "bias"]),
    "sequential": (
        lambda: nn.Sequential(
            nn.Linear(4, 5), nn.Sequential(nn.Linear(5, 3), nn.LayerNorm(3)), nn.Softmax(-1)
        ).eval(),
        ["1.0.weight", "1.0.bias"],
    ),
    "half a layer": (lambda: nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3)).eval(), ["1.bias"]),
}


def build(name):
    torch.manual_seed(0)
    model, names = CASES[name]
    model = model()
    if name == "lora with a trained head":
        model.head.requires_grad_(True)
        assert [n for n, p in model.named_parameters() if p.requires_grad][-1] == (
            "body.lora_b.weight"
        )
        names = HEAD
    if name == "half a layer":
        model[1].weight.requires_grad_(False)
    return model, names


@pytest.mark.parametrize("name", CASES)
def test_it_is_the_layer_that_the_outputs_come_from(name):
    model, names = build(name)
    state_before = {key: value.clone() for key, value in model.state_dict().items()}
    assert last_layer_parameters(model, X) == names
    assert all(p.grad is None for p in model.parameters())
    assert not any(m._forward_hooks for m in model.modules())
    for key, value in model.state_dict().items():
        torch.testing.assert_close(value, state_before[key], rtol=0, atol=0)


# ------------------------------------------------------------------------------------- refusals


class TiedGpt(nn.Module):
    """The head is the table of tokens; a normalisation is registered last."""

    def __init__(self, has_head):
        super().__init__()
        self.table = nn.Embedding(7, 5)
        self.mlp = nn.Linear(5, 5)
        if has_head:
            self.lm_head = nn.Linear(5, 7, bias=False)
            self.lm_head.weight = self.table.weight
        self.norm = nn.LayerNorm(5)

    def forward(self, tokens):
        h = self.norm(self.mlp(self.table(tokens)).tanh()).mean(1)
        return self.lm_head(h) if hasattr(self, "lm_head") else F.linear(h, self.table.weight)


TOKENS = torch.randint(7, (6, 4), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize(
    ("has_head", "says"),
    [
        (True, r"lm_head \(Linear\), whose parameters are shared with \['table.weight'\]"),
        (False, "table.weight, used outside of a layer"),
    ],
)
def test_a_tied_head_is_refused_with_the_remedy(has_head, says):
    la = Laplace(TiedGpt(has_head).eval(), params="last_layer")
    with pytest.raises(ValueError, match=says + r".*params=\["):
        la.fit_batches([(TOKENS, TOKENS[:, 0])])
    with pytest.raises(RuntimeError, match="not fitted"):
        la.posterior
    named = Laplace(la.model, params=["mlp.weight", "mlp.bias"])
    named.fit_batches([(TOKENS, TOKENS[:, 0])])  # The remedy is one.


def test_two_heads_are_refused_by_name():
    torch.manual_seed(0)
    options = {"img_size": 32, "depth": 1, "embed_dim": 24, "num_heads": 2}
    model = create_model("deit_tiny_distilled_patch16_224", num_classes=3, **options).eval()
    batch = (torch.randn(2, 3, 32, 32), torch.tensor([0, 1]))
    heads = ["head.weight", "head.bias", "head_dist.weight", "head_dist.bias"]
    with pytest.raises(ValueError, match=r"head \(Linear\) and head_dist \(Linear\)") as caught:
        Laplace(model, params="last_layer").fit_batches([batch])
    assert f"params={heads}" in str(caught.value)
    la = Laplace(model, params=heads).fit_batches([batch])
    assert la.param_names == heads


def frozen_head():
    model = net_with_head(logits)
    model.head.requires_grad_(False)
    return model


def all_lora():
    return with_lora(net_with_head(logits), 2)


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (frozen_head, r"come from head \(Linear\), which is frozen. .*requires_grad_\(True\)"),
        (lambda: with_lora(net_with_head(logits), 2, "body"), r"head \(Linear\), which is frozen"),
        (
            all_lora,
            r"head.base \(Linear\) and head.lora_b \(Linear\)\. .*=\['head.lora_b.weight'\]",
        ),
        (
            lambda: net_with_head(lambda m, x: logits(m, x) + m.skip(x), skip=nn.Linear(4, 3)),
            r"head \(Linear\) and skip \(Linear\)|skip \(Linear\) and head \(Linear\)",
        ),
        (
            lambda: net_with_head(
                lambda m, x: logits(m, x) + m.offset[0], offset=nn.ParameterList([torch.zeros(3)])
            ),
            r"head \(Linear\) and the parameter offset.0, used outside .*"
            r"=\['head.weight', 'head.bias', 'offset.0'\]",
        ),
        (
            lambda: net_with_head(
                lambda m, x: m.body(x) @ m.classes[0], classes=nn.ParameterList([torch.ones(5, 3)])
            ),
            r"body \(Linear\) and the parameter classes.0, used outside .*"
            r"=\['classes.0', 'body.weight', 'body.bias'\]",
        ),
        (lambda: net_with_head(lambda m, x: logits(m, x).detach()), "the model has no such layer"),
        (lambda: Net(lambda m, x: m.norm(x), norm=nn.LayerNorm(4)).eval(), "no such layer"),
    ],
)
def test_what_is_not_one_trainable_layer_is_refused(model, says):
    torch.manual_seed(0)
    with pytest.raises(ValueError, match=says):
        Laplace(model(), params="last_layer").fit_batches(data())


def test_the_error_for_a_model_that_differentiates_its_own_layers_states_the_remedy():
    """The outputs are the force of a potential, as in networks for molecules."""
    torch.manual_seed(0)

    def minus_gradient(model, x):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = logits(model, x).square().sum()
            return -torch.autograd.grad(energy, x, create_graph=True)[0]

    model = net_with_head(minus_gradient).double()
    batch = (X.double(), torch.randint(4, (len(X),)))
    with pytest.raises(ValueError, match=r"differentiates through .* pass the names"):
        Laplace(model, params="last_layer").fit_batches([batch])
    la = Laplace(model, params=HEAD).fit_batches([batch])
    J = flat_jacobian(model, batch[0], HEAD)
    expected = J @ la.posterior.covariance.to_dense() @ J.mT
    torch.testing.assert_close(la.functional(batch[0])[1], expected)


def test_outputs_without_logits_are_refused():
    torch.manual_seed(0)
    model = net_with_head(lambda m, x: {"first": logits(m, x), "second": x})
    with pytest.raises(TypeError, match=r"a dict with the entries \['first', 'second'\]"):
        Laplace(model, params="last_layer").fit_batches(data())


def test_a_frozen_head_is_refused_and_a_frozen_model_at_once():
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3)).eval()
    model[1].requires_grad_(False)
    with pytest.raises(ValueError, match=r"1 \(Linear\), which is frozen"):
        Laplace(model, params="last_layer").fit_batches(data())
    with pytest.raises(ValueError, match="no trainable parameter"):
        Laplace(model.requires_grad_(False), params="last_layer")


# --------------------------------------------------------------------------------- in a fit


def test_the_matrix_free_operators_take_the_same_layer():
    torch.manual_seed(0)
    model = net_with_head(logits).double()
    loss = nn.CrossEntropyLoss()
    G = GGN(model, loss, data(torch.float64), "last_layer")
    assert list(G.layout.names) == HEAD
    expected = dense_ggn(model, loss, X.double(), Y, HEAD)
    torch.testing.assert_close(G.to_dense(), expected)
    assert list(KFAC(model, loss, data(torch.float64), "last_layer").layout.names) == HEAD
    with pytest.raises(TypeError, match="only once"):
        GGN(model, loss, iter(data(torch.float64)), "last_layer")
    with pytest.raises(ValueError, match="empty"):
        GGN(model, loss, [], "last_layer")


def test_before_the_fit_it_is_not_known_and_says_so():
    la = Laplace(
        net_with_head(logits), params="last_layer", prior_precision=torch.tensor([1.0, 2.0])
    )
    for ask in (lambda: la.param_names, lambda: la.block_names):
        with pytest.raises(
            RuntimeError, match=r'`params="last_layer"` finds the last layer of a Net.* Call `fit'
        ):
            ask()
    with pytest.raises(RuntimeError, match="not fitted"):
        la.predict(X)
    with pytest.raises(ValueError, match="prior precision"):
        la.prior_precision = -1.0
    assert la.fit_batches(data()).param_names == la.block_names == HEAD
    assert la.posterior.prior_precision.tolist() == [1, 2]
    wrong = Laplace(net_with_head(logits), params="last_layer", prior_precision=torch.ones(3))
    with pytest.raises(ValueError, match="each of the 2 blocks"):
        wrong.fit_batches(data())


def test_a_hook_of_the_models_own_decides():
    hooked = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3)).eval()
    hooked.register_forward_hook(lambda module, args, output: module[0](args[0]))
    la = Laplace(hooked, params="last_layer")
    with pytest.raises(RuntimeError, match="by running the model on an example"):
        la.param_names
    assert la.fit_batches(data()).param_names == ["0.weight", "0.bias"]


def test_another_last_layer_at_the_next_fit_is_refused():
    model = net_with_head(logits, other=nn.Linear(5, 3))
    la = Laplace(model, params="last_layer").fit_batches(data())
    model.function = lambda m, x: m.other(m.body(x))
    with pytest.raises(
        ValueError, match=r"selected \['head.weight', .* come from \['other.weight'"
    ):
        la.fit_batches(data())


class Counting:
    def __init__(self, batches):
        self.batches = batches
        self.passes = 0

    def __iter__(self):
        self.passes += 1
        return iter(self.batches)


@pytest.mark.parametrize(("curvature", "passes"), [("kfac", 1), ("ekfac", 2)])
def test_the_data_is_not_read_once_more_to_find_it(curvature, passes):
    source = Counting(data())
    model = net_with_head(logits)
    la = Laplace(model, curvature=curvature, params="last_layer").fit_batches(source)
    assert source.passes == passes
    assert la.num_data == 8
    named = Laplace(model, curvature=curvature, params=HEAD).fit_batches(data())
    torch.testing.assert_close(la.functional(X)[1], named.functional(X)[1])


def test_an_iterator_loses_nothing_to_it():
    model = net_with_head(logits)
    once = Laplace(model, params="last_layer").fit_batches(iter(data()))
    again = Laplace(model, params=HEAD).fit_batches(data())
    assert once.num_data == again.num_data == 8
    torch.testing.assert_close(once.functional(X)[1], again.functional(X)[1], rtol=0, atol=0)
    with pytest.raises(ValueError, match="no example"):
        Laplace(model, params="last_layer").fit_batches([])


@pytest.mark.parametrize("mode", ["full", "mini", "debiased", "crossfit"])
def test_every_mode_finds_it_and_a_file_keeps_it(mode, tmp_path):
    model = net_with_head(logits)
    loader = DataLoader(TensorDataset(X.repeat(2, 1), Y.repeat(2)), batch_size=8)
    la = Laplace(model, params="last_layer").fit(loader, mode=mode)
    assert la.param_names == HEAD
    la.save(tmp_path / "posterior.safetensors")
    loaded = Laplace.load(tmp_path / "posterior.safetensors", model)
    assert loaded.param_names == HEAD
    torch.testing.assert_close(loaded.predict(X).probs, la.predict(X).probs)
    assert repr(loaded) == repr(la)
    assert f"N = 16, {mode}" in repr(la)


def test_a_generator_serves_the_loader_and_leaves_the_global_one():
    """The first batch is read once, in the loader's own order, whoever finds the last layer."""
    model = net_with_head(logits)
    loader = DataLoader(TensorDataset(X, Y), batch_size=4, shuffle=True)
    state_before = torch.get_rng_state()
    fits = [
        Laplace(model, params=params, curvature="ekfac", fisher="mc").fit(
            loader, mode, generator=torch.Generator().manual_seed(3)
        )
        for mode in ("full", "debiased")
        for params in ("last_layer", HEAD)
    ]
    assert torch.equal(torch.get_rng_state(), state_before)
    for by_name, by_parameters in (fits[:2], fits[2:]):
        torch.testing.assert_close(by_name.functional(X)[1], by_parameters.functional(X)[1])


# ------------------------------------------------------------------------------------- repr


def test_repr_tells_what_is_approximated(tmp_path):
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).eval()
    la = Laplace(model, params="weights", curvature="ekfac", prior_precision=torch.tensor([0.5, 2]))
    assert repr(la) == (
        "Laplace(\n  model: Sequential\n  likelihood: classification\n  curvature: ekfac\n"
        "  parameters: 35 of 43\n  blocks: 2: 0.weight, 2.weight\n"
        "  prior precision: 0.5 to 2, one per block\n  fit: none yet\n)"
    )
    la.fit_batches(data()[:1], data()[1:], num_data=12000)
    assert "fit: N = 12,000, debiased\n" in repr(la)
    la.prior_precision = 3e-5
    assert "prior precision: 3e-05\n" in repr(la)
    la.fit(DataLoader(TensorDataset(X, Y), batch_size=4), mode="mini")
    assert "fit: N = 8, mini\n" in repr(la)
    la.fit_batches(data())
    assert "fit: N = 8, given batches\n" in repr(la)
    regression = Laplace(model, "regression", "full", sigma=0.1)
    assert "blocks: 1: parameters\n" in repr(regression)
    assert "likelihood: regression, sigma = 0.1\n" in repr(regression)
    unknown = repr(Laplace(net_with_head(logits), params="last_layer"))
    assert "parameters: those of the last layer, found at the fit, of 43\n" in unknown
    assert "blocks: found at the fit\n" in unknown


@pytest.mark.parametrize("diagonal", [True, False])
def test_predictions_of_the_last_layer_run_the_network_on_many_examples_at_once(diagonal):
    calls = []
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)).double().eval()
    x = torch.randn(64, 3, dtype=torch.float64)
    model[0].register_forward_hook(lambda *_: calls.append(1))
    la = Laplace(model, params="last_layer").fit_batches([(x, torch.randint(3, (64,)))])
    alone = torch.cat([la.functional(example, diagonal)[1] for example in x.split(1)])
    calls.clear()
    covariance = la.functional(x, diagonal)[1]
    # The first example alone shows how much memory one takes.
    assert len(calls) <= 2
    torch.testing.assert_close(covariance, alone, rtol=1e-10, atol=1e-12)


def test_a_module_of_the_model_is_refused_with_the_names_of_its_parameters():
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).eval()
    with pytest.raises(TypeError, match=r"`params=\['2.weight', '2.bias'\]`"):
        Laplace(model, params=model[2])
