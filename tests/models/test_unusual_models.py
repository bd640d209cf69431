"""Unusual models have the correct curvature, or raise an error that states the reason."""

import copy
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from networks import dense_ggn, dense_hessian, dense_jacobian
from oracle import flat_jacobian, functional_covariance, ggn_block
from torch import nn

from laplace_debias import Categorical, Laplace
from laplace_debias.curvature import GGN, Hessian


def examples(number=12):
    return torch.randn(number, 4), torch.randint(3, (number,))


def ggn(model, data, params=None):
    return GGN(model, nn.CrossEntropyLoss(), data, params=params)


class Mlp(nn.Module):
    """A small network, with an optional function of its outputs."""

    def __init__(self, ending=None):
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.last = nn.Linear(6, 3)
        self.ending = ending

    def forward(self, x):
        outputs = self.last(torch.tanh(self.first(x)))
        return outputs if self.ending is None else self.ending(outputs)


def divided_in_place(outputs):
    outputs /= 2
    return outputs


def one_output_replaced(outputs):
    outputs[:, 0] = outputs[:, 1].exp()
    return outputs


# --------------------------------------------------------------- outputs overwritten in place


@pytest.mark.parametrize("curvature", ["kfac", "ekfac", "diag"])
@pytest.mark.parametrize(
    "ending",
    [divided_in_place, one_output_replaced, lambda outputs: F.relu(outputs, inplace=True)],
    ids=["divided", "replaced", "relu"],
)
def test_outputs_overwritten_in_place_have_the_dense_variance(ending, curvature):
    model = Mlp(ending).double().eval()
    x, y = examples()
    la = Laplace(model, curvature=curvature).fit_batches([(x.double(), y)])
    J = flat_jacobian(model, x[:3].double(), la.param_names)
    expected = J @ la.posterior.covariance.to_dense() @ J.mT
    mean, covariance = la.functional(x[:3].double())
    torch.testing.assert_close(mean, model(x[:3].double()))
    torch.testing.assert_close(covariance, expected, rtol=1e-9, atol=1e-12)


# ------------------------------------------------------- parameters used outside their layers


class TiedHead(nn.Module):
    """A language model whose head is the embedding's weight, and which has a token of padding."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(7, 4, 3)
        self.layer = nn.Linear(4, 4)

    def forward(self, tokens):
        h = F.embedding(input=tokens, weight=self.table.weight, padding_idx=3)
        return F.linear(torch.tanh(self.layer(h)), self.table.weight)


class Regularised(Mlp):
    def forward(self, x):
        return super().forward(x) + self.last.weight.sum()


class UsedTwice(Mlp):
    def forward(self, x):
        return super().forward(x) + F.linear(x[:, :1].expand(-1, 6), self.last.weight)


def is_that_of_dense_jacobians(la, x):
    J = flat_jacobian(la.model, x, la.param_names)
    covariance = la.posterior.covariance.to_dense()
    torch.testing.assert_close(la.functional(x)[1], functional_covariance(J, covariance))


@pytest.mark.parametrize("curvature", ["kfac", "ekfac", "diag", "full", "lowrank"])
def test_a_tied_head_has_the_curvature_of_both_uses(curvature):
    data = [(torch.randint(2, 5, (5, 3)), torch.randint(7, (5, 3)))]
    model = TiedHead().double().eval()
    is_that_of_dense_jacobians(Laplace(model, curvature=curvature).fit_batches(data), data[0][0])


def transposed_head():
    """A head whose weight is a view of the embedding's."""
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(5, 4, bias=False))
    model[2].weight = nn.Parameter(model[0].weight.detach().T)
    return model


def same_data():
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 5, bias=False))
    model[2].weight.data = model[0].weight.data
    return model


@pytest.mark.parametrize("frozen", [(), ("0.weight",), ("2.weight",)])
@pytest.mark.parametrize("make", [transposed_head, same_data])
def test_two_parameters_in_the_same_memory_are_refused(make, frozen):
    """Derivatives take them for independent, but training changes both at once."""
    model = make().eval()
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    data = [(torch.arange(4), torch.arange(4))]
    message = r"[02]\.weight and [02]\.weight are two parameters in the same memory"
    with pytest.raises(NotImplementedError, match=message):
        Laplace(model).fit_batches(data)
    with pytest.raises(NotImplementedError, match=message):
        ggn(model, data)
    assert Laplace(model, params=["1.weight"])


def test_a_frozen_part_of_a_parameter_is_not_the_parameter():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).eval()
    model.frozen = nn.Parameter(model[0].weight.detach()[:1], requires_grad=False)
    data = [(torch.randn(6, 3), torch.arange(6) % 2)]
    assert "frozen" not in Laplace(model).fit_batches(data).param_names


def test_other_parameters_than_those_in_the_same_memory_are_bayesian():
    """A layer of PEFT has tensors in nested dictionaries that are computed from others."""
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=9, n_embd=4, n_layer=1, n_head=2, n_positions=8)
    lora = peft.LoraConfig(
        r=2,
        target_modules=["wte", "lm_head", "c_attn"],
        task_type="CAUSAL_LM",
        ensure_weight_tying=True,
    )
    model = peft.get_peft_model(transformers.GPT2LMHeadModel(config), lora).eval()
    for parameter in model.parameters():
        parameter.data.normal_()
    x = {"input_ids": torch.arange(10).view(2, 5) % 9}
    data = [(x, torch.arange(10).view(2, 5) % 9)]
    with pytest.raises(NotImplementedError, match="ensure_weight_tying=False"):
        Laplace(model, class_dim=-1).fit_batches(data)
    la = Laplace(model, params=lambda name, _: "c_attn" in name, class_dim=-1).fit_batches(data)
    rows = []
    for output in model(**x).logits[0].flatten():
        parameters = [model.get_parameter(name) for name in la.param_names]
        gradients = torch.autograd.grad(output, parameters, retain_graph=True)
        rows.append(torch.cat([gradient.flatten() for gradient in gradients]))
    J = torch.stack(rows)
    actual = la.functional({"input_ids": x["input_ids"][:1]})[1][0]
    expected = J @ la.posterior.covariance.to_dense() @ J.T
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-4 * float(expected.max()))


@pytest.mark.parametrize("kind", [Regularised, UsedTwice])
@pytest.mark.parametrize("options", [{}, {"joint": True}, {"backend": "hooks"}])
def test_a_weight_used_again_has_the_curvature_of_all_uses(kind, options):
    model = kind().double().eval()
    x, y = examples()
    la = Laplace(model, **options).fit_batches([(x.double(), y)])
    is_that_of_dense_jacobians(la, x.double())
    exact = ggn_block(model, x.double(), "classification", "last.weight")
    actual = la.posterior.curvature.blocks["last.weight"].to_dense()
    torch.testing.assert_close(actual, exact)


class AddedToken(nn.Module):
    """A network that adds the same row of a table to every position of every example."""

    def __init__(self, index):
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.table = nn.Embedding(3, 4)
        self.head = nn.Linear(4, 3)
        self.index = torch.tensor(index)

    def forward(self, x):
        h = torch.tanh(self.body(x) + self.table(self.index))
        return self.head(h.flatten(1, -2).mean(1) if x.ndim > 2 else h)


class Hypernetwork(nn.Module):
    """A network that computes the weights of its layers from rows of a table."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(2, 3)
        self.weights = nn.Linear(3, 16)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        for index in range(2):
            weight = self.weights(self.table(torch.tensor(index))).view(4, 4)
            x = torch.tanh(F.linear(x, weight))
        return self.head(x)


@pytest.mark.parametrize("curvature", ["kfac", "full"])
@pytest.mark.parametrize("positions", [(), (1,), (2,), (3,), (4,)])
@pytest.mark.parametrize("index", [1, [1]])
def test_a_row_that_all_positions_share_has_the_dense_variance(index, positions, curvature):
    """The package checks two and four examples, and there may be as many positions."""
    model = AddedToken(index).double().eval()
    x = torch.randn(5, *positions, 4).double()
    la = Laplace(model, curvature=curvature).fit_batches([(x, torch.randint(3, (5,)))])
    is_that_of_dense_jacobians(la, x)


@pytest.mark.parametrize("curvature", ["kfac", "diag", "full"])
def test_a_hypernetwork_without_examples_has_the_dense_variance(curvature):
    model = Hypernetwork().double().eval()
    x, y = examples()
    la = Laplace(model, curvature=curvature).fit_batches([(x.double(), y)])
    is_that_of_dense_jacobians(la, x.double())


class Upsampled(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.up = nn.ConvTranspose2d(2, 3, 3, stride=2, padding=1, **options)
        self.size = None if options else (10, 10)

    def forward(self, x):
        return self.up(x, output_size=self.size).square().mean((2, 3))


@pytest.mark.parametrize("options", [{}, {"output_padding": 1}])
def test_an_output_size_that_the_layer_does_not_know_is_followed(options):
    x = torch.randn(4, 2, 5, 5).double()
    y = torch.randint(3, (4,))
    la = Laplace(Upsampled(**options).double().eval()).fit_batches([(x, y)])
    is_that_of_dense_jacobians(la, x)


class Router(nn.Linear):
    """A linear layer with its own forward pass, like some routers of experts in transformers."""

    def forward(self, states):
        h = states[0] if isinstance(states, tuple) else states
        logits = super().forward(h)
        return logits.softmax(-1).amax(-1, keepdim=True), logits


class WithRouter(nn.Module):
    """A network that scales its hidden state by a router's first output."""

    def __init__(self, passes_tuple):
        super().__init__()
        self.body = nn.Linear(4, 5)
        self.router = Router(5, 2)
        self.head = nn.Linear(5, 3)
        self.passes_tuple = passes_tuple

    def forward(self, x):
        h = torch.tanh(self.body(x))
        scale, _ = self.router((h, x) if self.passes_tuple else h)
        return self.head(h * scale)


@pytest.mark.parametrize("curvature", ["kfac", "ekfac", "diag", "full"])
@pytest.mark.parametrize("passes_tuple", [False, True])
def test_a_linear_layer_that_returns_a_tuple_is_measured_at_its_calls(passes_tuple, curvature):
    torch.manual_seed(0)
    model = WithRouter(passes_tuple).double().eval()
    x, y = examples()
    la = Laplace(model, curvature=curvature).fit_batches([(x.double(), y)])
    assert {"router.weight", "router.bias"} <= set(la.param_names)
    is_that_of_dense_jacobians(la, x.double())


STATES = []


class HiddenStates(nn.Module):
    """A network that adds hooks for hidden states in its first pass, as in transformers."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        if "has_hooks" not in vars(self):
            for layer in self.layers:
                layer.register_forward_hook(lambda _, __, output: STATES.append(output))
            self.has_hooks = True
        STATES.clear()
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(sum(STATES[-2:]))


@pytest.mark.parametrize("params", ["all", "last_layer"])
@pytest.mark.parametrize("curvature", ["kfac", "diag", "full"])
def test_hooks_that_the_first_pass_adds_are_added_once(curvature, params):
    torch.manual_seed(0)
    model = HiddenStates().double().eval()
    x, y = examples()
    la = Laplace(model, curvature=curvature, params=params).fit_batches([(x.double(), y)])
    assert "has_hooks" not in vars(model)
    mean = la.functional(x.double())[0]
    torch.testing.assert_close(mean, model(x.double()))
    is_that_of_dense_jacobians(la, x.double())


# ------------------------------------------------------------------------- batches and masks


class Centred(Mlp):
    """Subtracts the batch's mean from its inputs, so an example's outputs depend on the others."""

    def forward(self, x):
        return super().forward(x - x.mean(0))


@pytest.mark.parametrize("curvature", ["kfac", "full"])
def test_a_model_that_mixes_the_examples_is_refused(curvature):
    with pytest.raises(ValueError, match="change with the other examples"):
        Laplace(Centred().eval(), curvature=curvature).fit_batches([examples()])


def test_a_random_model_is_told_from_one_that_mixes():
    with pytest.raises(ValueError, match="is not deterministic"):
        Laplace(Mlp(F.dropout).eval()).fit_batches([examples()])


class GraphNetwork(nn.Module):
    """A network of two layers, each of which adds up the messages along the edges of a graph."""

    def __init__(self, edges):
        super().__init__()
        self.first = nn.Linear(4, 5)
        self.last = nn.Linear(5, 3)
        self.register_buffer("edges", edges)

    def forward(self, x):
        source, target = self.edges
        h = self.first(x)
        h = torch.tanh(h.index_add(0, target, h[source]))
        outputs = self.last(h)
        return outputs.index_add(0, target, outputs[source])


class FirstGraph(nn.Module):
    """A network that ignores all graphs of a batch except the first."""

    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, x):
        return self.network(x[0]).unsqueeze(0)


class EachGraph(FirstGraph):
    """A network that runs on every graph of a batch."""

    def forward(self, x):
        return torch.stack([self.network(nodes) for nodes in x])


EDGES = torch.tensor([[0, 1, 2, 3, 4, 5], [1, 2, 0, 5, 3, 1]])


class MeanToLargestLength(nn.Module):
    """A network whose mask has the largest length of the batch, as in torchaudio's Conformer."""

    def __init__(self):
        super().__init__()
        self.features = nn.Linear(4, 5)
        self.head = nn.Linear(5, 3)

    def forward(self, x, lengths):
        mask = torch.arange(int(lengths.max())) < lengths[:, None]
        h = torch.tanh(self.features(x)) * mask.unsqueeze(-1)
        return self.head(h.sum(1) / lengths[:, None])


def test_a_mask_of_the_largest_length_in_the_batch_is_refused_with_the_remedy():
    x = (torch.randn(4, 6, 4), torch.tensor([4, 5, 6, 3]))
    model = MeanToLargestLength()
    model(*x)
    with pytest.raises(ValueError, match=r"largest length.*use the size of the padded inputs"):
        Laplace(model).fit([(x, torch.randint(3, (4,)))])


@pytest.mark.parametrize("params", ["all", "last_layer"])
def test_nodes_of_a_graph_as_examples_are_refused_with_the_remedy(params):
    x, y = torch.randn(6, 4), torch.randint(3, (6,))
    message = r"6 examples, but not for one or two.*pass the graph as one example"
    for edges in (EDGES, EDGES[:, :1]):
        la = Laplace(GraphNetwork(edges).eval(), params=params)
        with pytest.raises(ValueError, match=message):
            la.fit_batches([(x, y)])


def test_outputs_of_fewer_examples_are_refused():
    model = FirstGraph(GraphNetwork(EDGES)).eval()
    x, y = torch.randn(2, 6, 4), torch.randint(3, (2, 6))
    message = r"outputs of shape \(1, 6, 3\) for a batch of 2"
    for number in (1, 2):
        la = Laplace(model, class_dim=-1)
        with pytest.raises(ValueError, match=message):
            la.fit_batches([(x[:number], y[:number])])
    with pytest.raises(ValueError, match=message):
        GGN(model, Categorical(), [(x, y)])


@pytest.mark.parametrize("curvature", ["kfac", "diag", "full"])
def test_a_graph_as_one_example_has_the_dense_variance(curvature):
    """Nodes that are not in the training set have the target -100."""
    torch.manual_seed(0)
    model = EachGraph(GraphNetwork(EDGES)).double().eval()
    x, y = torch.randn(1, 6, 4).double(), torch.randint(3, (1, 6))
    y[0, 3:] = -100
    la = Laplace(model, curvature=curvature, class_dim=-1).fit_batches([(x, y)])
    is_that_of_dense_jacobians(la, x)
    if curvature == "full":
        J = flat_jacobian(model, x, la.param_names)[0].unflatten(0, (6, 3))[:3]
        p = model(x)[0, :3].softmax(-1).detach()
        H = torch.diag_embed(p) - p.unsqueeze(2) * p.unsqueeze(1)
        expected = (J.mT @ H @ J).sum(0)
        torch.testing.assert_close(la.posterior.curvature.to_dense(), expected)


class Masked(nn.Module):
    """Self-attention under the mask that torch makes, −Inf above the diagonal."""

    def __init__(self):
        super().__init__()
        mask = nn.Transformer.generate_square_subsequent_mask(5)
        self.register_buffer("mask", mask)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        mixed, _ = self.attention(x, x, x, attn_mask=self.mask, need_weights=False)
        return self.head(mixed.mean(1))


def test_a_mask_of_minus_infinity_is_no_damage():
    model = Masked().double().eval()
    x = torch.randn(6, 5, 4).double()
    la = Laplace(model, params="last_layer").fit_batches([(x, torch.randint(3, (6,)))])
    J = flat_jacobian(model, x[:2], la.param_names)
    expected = J @ la.posterior.covariance.to_dense() @ J.mT
    torch.testing.assert_close(la.functional(x[:2])[1], expected)
    for damage in (torch.nan, torch.inf):
        model.mask[0, 0] = damage
        with pytest.raises(ValueError, match="outputs contain NaN or Inf"):
            Laplace(model).fit_batches([(x, torch.randint(3, (6,)))])


class Bounded(nn.Module):
    """A network with an upper bound on its outputs, as in timm's `gemma4_vit`."""

    def __init__(self, bound):
        super().__init__()
        self.inner = Mlp()
        self.register_buffer("bound", torch.tensor(bound))

    def forward(self, x):
        return self.inner(x).clamp(max=self.bound)


def test_a_bound_of_infinity_is_no_damage():
    x, y = examples()
    curvatures = []
    for bound in (torch.inf, 1e30):
        torch.manual_seed(0)
        la = Laplace(Bounded(bound).eval(), curvature="full").fit_batches([(x, y)])
        curvatures.append(la.posterior.curvature.to_dense())
    assert torch.equal(*curvatures)


# ----------------------------------------------------------------------- the state of the model


@pytest.fixture
def normalised():
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3)).eval()


def scaled(model):
    with torch.no_grad():
        model[0].weight.mul_(-3)
    return r"0\.weight"


def scaled_behind_autograd(model):
    model[0].weight.data.mul_(-3)
    return r"0\.weight"


def new_statistics(model):
    model[1].running_mean += 1
    return r"1\.running_mean"


@pytest.mark.parametrize("change", [scaled, scaled_behind_autograd, new_statistics])
def test_what_is_not_bayesian_must_stay_too(normalised, change, tmp_path):
    x, y = examples()
    la = Laplace(normalised, params="last_layer").fit_batches([(x, y)])
    la.save(tmp_path / "posterior.safetensors")
    la.predict(x)
    Laplace.load(tmp_path / "posterior.safetensors", normalised).predict(x)
    name = change(normalised)
    for use in (la.predict, la.functional):
        with pytest.raises(RuntimeError, match=f"{name} has changed since the fit"):
            use(x)
    with pytest.raises(ValueError, match=f"since the fit: {name} differs"):
        Laplace.load(tmp_path / "posterior.safetensors", normalised)


def test_autocast_is_refused():
    x, y = examples()
    la = Laplace(Mlp().eval())
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(RuntimeError, match="autocast"):
        la.fit_batches([(x, y)])
    la.fit_batches([(x, y)])
    for method in ("glm", "glm-mc", "nn", "map"):
        with torch.autocast("cpu", torch.bfloat16), pytest.raises(RuntimeError, match="autocast"):
            la.predict(x, method)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(RuntimeError, match="autocast"):
        la.sample(2)
    expected = la.predict(x).probs
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(RuntimeError) as error:
            la.predict(x)
        # The error contains a statement that can be executed.
        statement = str(error.value).split("`")[1]
        results = {}
        exec(f"{statement} results['probs'] = la.predict(x).probs")
    assert torch.equal(results["probs"], expected)


@pytest.mark.parametrize("params", ["all", "last_layer"])
def test_the_error_for_a_moved_model_states_how_to_move_the_posterior(params):
    x, y = examples()
    model = Mlp().eval()
    la = Laplace(model, params=params).fit_batches([(x, y)])
    expected = la.predict(x).probs
    model.double()
    with pytest.raises(RuntimeError, match=r"in torch.float64.* with model.to\(torch.float32\)"):
        la.predict(x)
    model.to(torch.float32)
    assert torch.equal(la.predict(x).probs, expected)
    wide = Mlp().double().eval()
    posterior_of_wide = Laplace(wide, params=params).fit_batches([(x.double(), y)])
    wide.float()
    with pytest.raises(RuntimeError, match="has rounded the parameters"):
        posterior_of_wide.predict(x)
    for attribute in ("to", "cuda"):
        with pytest.raises(AttributeError, match=r"la\.save.*Laplace\.load\(path, model\)"):
            getattr(la, attribute)
    model.to("meta")
    for use in (la.predict, la.functional):
        with pytest.raises(RuntimeError, match=r"now on meta, .* Laplace\.load\(path, model\)"):
            use(x)


def test_the_error_for_a_model_rounded_to_half_precision_states_the_cause():
    x, y = examples()
    model = Mlp().eval()
    la = Laplace(model).fit_batches([(x, y)])
    model.half()
    with pytest.raises(RuntimeError, match="conversion to half precision rounds"):
        la.predict(x)


class AutocastInside(nn.Module):
    """A network whose forward pass computes its body, or all of it, in half precision."""

    def __init__(self, head_is_wide):
        super().__init__()
        self.head_is_wide = head_is_wide
        self.body = nn.Linear(4, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            h = self.body(x).tanh()
            if not self.head_is_wide:
                return self.head(h)
        return self.head(h.float())


@pytest.mark.parametrize("curvature", ["kfac", "ekfac", "diag"])
def test_a_layer_within_autocast_of_the_forward_pass_is_refused(curvature):
    torch.manual_seed(0)
    x = torch.randn(30, 4)
    y = torch.arange(30) % 3
    for head_is_wide, params, layer in ((False, "last_layer", "head"), (True, "all", "body")):
        la = Laplace(AutocastInside(head_is_wide).eval(), curvature=curvature, params=params)
        with pytest.raises(RuntimeError, match=f"outputs of {layer} in torch.bfloat16"):
            la.fit_batches([(x, y)])
    # A body without Bayesian parameters gives features, of whatever precision.
    model = AutocastInside(head_is_wide=True).eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        features = model.body(x).tanh()
    la = Laplace(model, curvature=curvature, params="last_layer").fit_batches([(x, y)])
    expected = Laplace(model.head, curvature=curvature).fit_batches([(features.float(), y)])
    precision = expected.posterior.precision.to_dense()
    torch.testing.assert_close(la.posterior.precision.to_dense(), precision)


# ------------------------------------------------------------------------------- the interface


def test_cross_fitting_leaves_the_diagonal_as_it_is(tmp_path):
    x, y = examples()
    model = Mlp().eval()
    full, crossfit = (
        Laplace(model, curvature="diag").fit_batches([(x, y)], folds=folds) for folds in (None, 5)
    )
    precision = crossfit.posterior.precision.to_dense()
    assert torch.equal(precision, precision.diagonal().diag())
    torch.testing.assert_close(precision, full.posterior.precision.to_dense())
    crossfit.save(tmp_path / "posterior.safetensors")
    loaded = Laplace.load(tmp_path / "posterior.safetensors", model)
    torch.testing.assert_close(loaded.predict(x).probs, crossfit.predict(x).probs)
    with pytest.raises(ValueError, match="2 to 12 folds"):
        crossfit.fit_batches([(x, y)], folds=13)


def test_a_loaded_low_rank_posterior_fits_again_at_the_rank_asked_for(tmp_path):
    x, y = examples()
    model = Mlp().eval()
    la = Laplace(model, curvature="lowrank", rank=9).fit_batches([(x[:2], y[:2])])
    la.save(tmp_path / "posterior.safetensors")
    loaded = Laplace.load(tmp_path / "posterior.safetensors", model)
    torch.testing.assert_close(loaded.predict(x).probs, la.predict(x).probs)
    again = loaded.fit_batches([(x, y)]).posterior.curvature.blocks
    (block,) = again.values()
    assert block.U.shape[1] == 9


def test_grids_are_tensors_or_lists_and_keep_their_digits():
    x, y = examples()
    la = Laplace(Mlp().eval()).fit_batches([(x, y)])
    tried = la.tune([(x, y)], grid=[0.1, 0.3]).table
    assert [row["prior_precision"] for row in tried] == [0.1, 0.3]
    means = la.functional(x[:2], outputs=[[0], [2]])[0]
    torch.testing.assert_close(means[:, 0], la.functional(x[:2])[0][[0, 1], [0, 2]])


# --------------------------------------------------- models whose examples take different ways


class Experts(nn.Module):
    """A mixture of experts, one for each example; the gate may weigh the expert's outputs."""

    def __init__(self, is_weighed, calls_idle):
        super().__init__()
        self.gate = nn.Linear(4, 3)
        self.experts = nn.ModuleList(nn.Linear(4, 3) for _ in range(3))
        self.is_weighed = is_weighed
        self.calls_idle = calls_idle

    def forward(self, x):
        weights = self.gate(x).softmax(1)
        choice = weights.argmax(1)
        outputs = x.new_zeros(len(x), 3)
        for index, expert in enumerate(self.experts):
            rows = (choice == index).nonzero().flatten()
            if len(rows) or self.calls_idle:
                expert_outputs = expert(x[rows])
                if self.is_weighed:
                    expert_outputs = expert_outputs * weights[rows, index, None]
                outputs = outputs.index_copy(0, rows, expert_outputs)
        return outputs


EXPERTS = [(False, False), (True, False), (True, True)]


def routed(seed, is_weighed, calls_idle):
    """Experts, and two batches of seven examples in which each expert has an example."""
    torch.manual_seed(seed)
    model = Experts(is_weighed, calls_idle).double().eval()
    nn.init.zeros_(model.gate.bias)
    x = torch.randn(200, 4).double()
    choice = model.gate(x).argmax(1)
    by_expert = [(choice == index).nonzero().flatten()[:3] for index in range(3)]
    assert all(len(indices) == 3 for indices in by_expert)
    # The first two examples go to the same expert, or to two.
    second = by_expert[0][1] if seed % 2 else by_expert[1][1]
    first = [by_expert[0][0], second, *(indices[2] for indices in by_expert)]
    remaining = [indices[0] for indices in by_expert[1:]]
    x = torch.cat([x[torch.stack([*first, *remaining])], x[torch.stack([*remaining, *first])]])
    return model, x, torch.arange(len(x)) % 3


@pytest.mark.parametrize(("is_weighed", "calls_idle"), EXPERTS)
@pytest.mark.parametrize("seed", range(4))
def test_experts_that_see_some_examples_have_the_dense_curvature(seed, is_weighed, calls_idle):
    model, x, y = routed(seed, is_weighed, calls_idle)
    la = Laplace(model, curvature="full").fit_batches([(x[:7], y[:7]), (x[7:], y[7:])])
    assert la.param_names == [
        name for name, _ in model.named_parameters() if is_weighed or name.startswith("experts")
    ]
    expected = dense_ggn(model, nn.CrossEntropyLoss(), x, y, la.param_names)
    torch.testing.assert_close(la.posterior.curvature.to_dense(), expected)
    J = dense_jacobian(model, x, la.param_names)
    for curvature in ("kfac", "diag"):
        la = Laplace(model, curvature=curvature).fit_batches([(x, y)])
        covariance = la.posterior.covariance.to_dense()
        torch.testing.assert_close(la.functional(x)[1], J @ covariance @ J.mT)
    with pytest.raises(ValueError, match=r"the model has .*experts.0 .*experts.1 .*experts.2"):
        Laplace(model, params="last_layer").fit_batches([(x, y)])


def test_routing_that_the_first_batch_does_not_show_is_found_in_the_next_one():
    model, x, y = routed(1, False, False)
    takes_first_expert = model.gate(x).argmax(1) == 0
    batches = [(x[takes_first_expert], y[takes_first_expert]), (x, y)]
    la = Laplace(model, curvature="full").fit_batches(batches)
    every_x, every_y = torch.cat([x[takes_first_expert], x]), torch.cat([y[takes_first_expert], y])
    expected = dense_ggn(model, nn.CrossEntropyLoss(), every_x, every_y, la.param_names)
    torch.testing.assert_close(la.posterior.curvature.to_dense(), expected)
    # Batches that can be read only once are not searched before the fit.
    message = r"\(as in a mixture of experts\), choose a first batch in which the layer"
    with pytest.raises(NotImplementedError, match=message):
        Laplace(model).fit_batches(iter(batches), num_data=len(every_x))


# ----------------------------------------------------------------- tensors that are no plain ones


@pytest.mark.parametrize("work", [lambda m, d: Laplace(m).fit_batches(d), ggn], ids=["fit", "GGN"])
def test_dynamic_quantisation_is_refused(work):
    """Its rounding depends on the largest number of a batch."""
    first = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    quantised = torch.ao.quantization.quantize_dynamic(first, {nn.Linear})
    model = nn.Sequential(quantised, nn.Linear(4, 3)).eval()
    with pytest.raises(ValueError, match=r"0\.0 \(Linear\) is dynamically quantised"):
        work(model, [examples()])


class Complex(nn.Module):
    """A complex layer; its weight is held as such, or as real and imaginary part."""

    def __init__(self, is_held_apart):
        super().__init__()
        weight = torch.randn(4, 4, dtype=torch.complex128)
        self.weight = nn.Parameter(torch.view_as_real(weight) if is_held_apart else weight)
        self.head = nn.Linear(4, 3).double()

    def forward(self, x):
        weight = self.weight if self.weight.is_complex() else torch.view_as_complex(self.weight)
        return self.head((x.to(weight.dtype) @ weight).abs())


@pytest.mark.parametrize("params", ["all", ["weight"]], ids=str)
def test_complex_parameters_are_held_apart_or_frozen(params):
    x, y = examples()
    x = x.double()
    model = Complex(is_held_apart=False).eval()
    for work in (lambda: Laplace(model, params=params), lambda: ggn(model, [(x, y)], params)):
        with pytest.raises(ValueError, match=r"weight is complex .*torch\.view_as_real.*freeze"):
            work()
    model.weight.requires_grad_(False)
    Laplace(model).fit_batches([(x, y)])
    model = Complex(is_held_apart=True).eval()
    la = Laplace(model, params=params, curvature="full").fit_batches([(x, y)])
    expected = dense_ggn(model, nn.CrossEntropyLoss(), x, y, la.param_names)
    torch.testing.assert_close(la.posterior.curvature.to_dense(), expected)


class Returns(nn.Module):
    """A linear layer whose outputs go through a function."""

    def __init__(self, function):
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.function = function

    def forward(self, x):
        return self.function(self.layer(x))


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=str)
def test_nested_tensors_are_refused(layout):
    def nested(*shapes):
        return torch.nested.nested_tensor([torch.ones(shape) for shape in shapes], layout=layout)

    x, y = examples(2)
    ragged = nested((2, 4), (3, 4))
    model = Returns(lambda z: z.unflatten(-1, (-1, 3)).mean(-2)).eval()
    la = Laplace(model).fit_batches([(x, y)])
    for work in (la.fit_batches, partial(ggn, model)):
        with pytest.raises(TypeError, match=r"Inputs contain a nested tensor.*to_padded_tensor"):
            work([(ragged, y)])
        with pytest.raises(TypeError, match=r"Targets are a nested tensor.*to_padded_tensor"):
            work([(x, nested((1,), (2,)))])
    for method in ("glm", "nn", "map"):
        with pytest.raises(TypeError, match="Inputs contain a nested tensor"):
            la.predict(ragged, method)
    for work in (lambda m: Laplace(m).fit_batches([(x, y)]), lambda m: ggn(m, [(x, y)])):
        model = Returns(nn.Identity()).eval()
        model.table = nn.Parameter(ragged)
        with pytest.raises(NotImplementedError, match="table is a nested tensor"):
            work(model)
        model = Returns(lambda _: nested((2,), (3,)))
        with pytest.raises(TypeError, match="outputs are a nested tensor"):
            work(model)
        model = Returns(lambda z: z.to(torch.complex64))
        with pytest.raises(TypeError, match=r"outputs are complex .*view_as_real"):
            work(model)


@pytest.mark.parametrize("params", ["last_layer", "all"])
@pytest.mark.parametrize("mode", [nullcontext, torch.inference_mode])
def test_a_model_that_was_created_in_inference_mode_is_fitted_as_any_other(mode, params):
    def build():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 2)).eval()

    x = torch.randn(12, 3, generator=torch.Generator().manual_seed(0))
    y = torch.arange(12) % 2
    expected = Laplace(build(), params=params).fit([(x, y)])
    with torch.inference_mode():
        model = build()
    with mode():
        la = Laplace(model, params=params).fit([(x, y)])
        actual = la.predict(x).probs
    torch.testing.assert_close(actual, expected.predict(x).probs)
    draws = []
    for fit in (la, expected):
        generator = torch.Generator().manual_seed(0)
        draws.append(fit.predict(x, method="nn", samples=2, generator=generator).probs)
    torch.testing.assert_close(*draws)
    model[0].weight.data.mul_(2)
    with pytest.raises(RuntimeError, match=r"changed since the fit"):
        la.predict(x)


# --------------------------------------------------------- values kept between forward passes


class Scale(nn.Module):
    """A scale that is computed in the first forward pass, and kept for later ones."""

    def __init__(self):
        super().__init__()
        self.root = nn.Parameter(torch.tensor([1.0, 2.0, 0.5]))
        self.kept = {}

    def forward(self, x):
        if "scale" not in self.kept:
            self.kept["scale"] = self.root.square()
        return self.kept["scale"] * x


class Student(nn.Module):
    """A layer whose copies do not contain its teacher."""

    def __init__(self):
        super().__init__()
        self.teacher = nn.Linear(4, 3).requires_grad_(False)
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        return self.layer(x)

    def __deepcopy__(self, memo):
        copied = Student()
        del copied.teacher
        copied.layer = copy.deepcopy(self.layer, memo)
        return copied


@pytest.mark.parametrize("operator", [GGN, Hessian])
@pytest.mark.parametrize("layer", [lambda: nn.Linear(4, 3), Student])
def test_operators_ignore_values_that_a_module_keeps(layer, operator):
    """They are kept by the user's model, or by its copy, which may lack submodules."""
    torch.manual_seed(0)
    model = nn.Sequential(layer(), Scale()).double().eval()
    x, y = examples()
    x = x.double()
    loss = nn.CrossEntropyLoss()
    params = ["1.root"]
    dense = dense_ggn if operator is GGN else dense_hessian
    expected = dense(model, loss, x, y, params)
    model[1].kept.clear()
    model(x)
    torch.testing.assert_close(operator(model, loss, [(x, y)], params=params).to_dense(), expected)
