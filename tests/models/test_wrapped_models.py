"""Models in wrappers, and outputs in containers: the same posterior under the same names."""

import dataclasses
from collections import OrderedDict, namedtuple
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from laplace_debias import Laplace
from laplace_debias.curvature import GGN, KFAC, Hessian
from laplace_debias.curvature.network.unwrapping import plain_names, unwrapped

X = torch.randn(7, 4, generator=torch.Generator().manual_seed(1))
Y = torch.tensor([0, 2, 1, 0, 1, 2, 2])
DATA = [(X, Y)]


class Parts(nn.Module):
    """A network of two parts, of which one may be compiled."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 5), nn.Tanh())
        self.head = nn.Linear(5, 3)

    def forward(self, x):
        return self.head(self.body(x))


def plain():
    torch.manual_seed(0)
    return Parts().eval()


def compiled_part(model):
    model.body = torch.compile(model.body)
    return model


def compiled_within_parallel(model):
    return nn.DataParallel(torch.compile(compiled_part(model)))


def compiled_in_place(model):
    model.compile()
    return model


def checkpointed_part(model):
    model.body = checkpoint_wrapper(model.body)
    return model


WRAPPERS = {
    "checkpoints": checkpointed_part,
    "DataParallel": nn.DataParallel,
    "compile": torch.compile,
    "compiled part": compiled_part,
    "nested": compiled_within_parallel,
    "in place": compiled_in_place,
}


@pytest.fixture
def process_group(tmp_path):
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def is_the_same(wrap, tmp_path):
    """Assert that a wrapped and a plain model have the same fit, names, predictions and files."""
    model = plain()
    wrapped = wrap(plain())
    for options in ({}, {"curvature": "ekfac"}, {"curvature": "full"}, {"params": "last_layer"}):
        plain_la = Laplace(model, backend="hooks", **options).fit(DATA, num_data=7)
        wrapped_la = Laplace(wrapped, backend="hooks", **options).fit(DATA, num_data=7)
        assert wrapped_la.model is wrapped
        assert wrapped_la.param_names == plain_la.param_names
        assert repr(wrapped_la) == repr(plain_la)
        expected = plain_la.predict(X).probs
        torch.testing.assert_close(wrapped_la.predict(X).probs, expected, rtol=0, atol=0)
        for method in ("glm-mc", "nn"):
            drawn = [
                la.predict(X, method, 3, torch.Generator().manual_seed(0)).probs
                for la in (plain_la, wrapped_la)
            ]
            torch.testing.assert_close(drawn[1], drawn[0], rtol=0, atol=0)
        loaded = []
        for la, other_model in ((plain_la, wrapped), (wrapped_la, model)):
            la.save(tmp_path / "posterior.safetensors")
            again = Laplace.load(tmp_path / "posterior.safetensors", other_model)
            loaded.append(again.predict(X).probs)
        torch.testing.assert_close(*loaded, rtol=0, atol=0)
        # To rounding: a basis from a file lies in rows, one that was decomposed in columns, and
        # some processors' products round differently for the two.
        torch.testing.assert_close(loaded[0], expected)


def operators_are_the_same(wrap):
    model = plain()
    wrapped = wrap(plain())
    for make in (GGN, Hessian, KFAC):
        expected = make(model, nn.CrossEntropyLoss(), DATA)
        actual = make(wrapped, nn.CrossEntropyLoss(), DATA)
        assert actual.layout == expected.layout
        torch.testing.assert_close(actual.to_dense(), expected.to_dense())


@pytest.mark.slow
@pytest.mark.parametrize("name", WRAPPERS)
def test_a_wrapped_model_has_the_posterior_of_the_plain_one(name, tmp_path):
    is_the_same(WRAPPERS[name], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", WRAPPERS)
def test_a_wrapped_model_has_the_operators_of_the_plain_one(name):
    operators_are_the_same(WRAPPERS[name])


def test_a_distributed_model_is_the_plain_one(process_group, tmp_path):
    is_the_same(nn.parallel.DistributedDataParallel, tmp_path)
    operators_are_the_same(nn.parallel.DistributedDataParallel)


@pytest.mark.parametrize("replicates_part", [False, True])
def test_a_replicated_model_is_the_plain_one(process_group, replicates_part, tmp_path):
    def replicated(model):
        replicate(model.body if replicates_part else model)
        return model

    is_the_same(replicated, tmp_path)
    operators_are_the_same(replicated)
    trained = replicated(plain().train())
    trained(X).sum().backward()
    la = Laplace(trained.eval()).fit(DATA)
    assert torch.equal(la.predict(X).probs, Laplace(plain()).fit(DATA).predict(X).probs)


@pytest.mark.parametrize("replicates_part", [False, True])
def test_wrapped_modules_may_be_replicated(process_group, replicates_part, tmp_path):
    def replicated(model):
        if replicates_part:
            model.body = checkpoint_wrapper(model.body)
            replicate(model.body)
            return model
        model = checkpoint_wrapper(checkpointed_part(model))
        replicate(model)
        return model

    is_the_same(replicated, tmp_path)
    wrapped = replicated(plain())
    body = wrapped.body
    Laplace(wrapped, params="last_layer").fit(DATA)
    # The user's own module still has its wrapped part.
    assert wrapped.body is body
    wrapped.register_forward_hook(lambda module, x, outputs: 2 * outputs)
    if not replicates_part:
        with pytest.raises(ValueError, match="around Parts has forward hooks"):
            Laplace(wrapped)


def test_bayesian_layers_of_a_model_replicated_by_fsdp_raise(process_group):
    composable = pytest.importorskip("torch.distributed._composable.replicate_with_fsdp")
    model = plain()
    composable.replicate(model, mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(NotImplementedError, match=r"distributed tensor .*replicate_with_fsdp"):
        Laplace(model).fit(DATA)


def test_the_own_file_of_a_model_with_checkpoints_loads(tmp_path):
    model = checkpointed_part(plain())
    la = Laplace(model).fit(DATA)
    assert torch.equal(la.predict(X).probs, Laplace(plain()).fit(DATA).predict(X).probs)
    la.save(tmp_path / "posterior.safetensors")
    for again in (model, plain()):
        loaded = Laplace.load(tmp_path / "posterior.safetensors", again)
        torch.testing.assert_close(loaded.predict(X).probs, la.predict(X).probs)


@pytest.mark.parametrize("wrap", [torch.compile, checkpoint_wrapper])
def test_wrapped_parts_may_be_sharded(process_group, wrap):
    model = plain()
    model.body = wrap(model.body)
    fully_shard(model.body, mesh=init_device_mesh("cpu", (1,)))
    la = Laplace(model, params="last_layer").fit(DATA)
    expected = Laplace(plain(), params="last_layer").fit(DATA).predict(X).probs
    assert torch.equal(la.predict(X).probs, expected)


@pytest.mark.parametrize("name", ["DataParallel", "nested"])
def test_parameters_are_selected_by_either_name(name):
    wrapped = WRAPPERS[name](plain())
    ends = ("head.weight", "0.bias")
    wrapped_names = [n for n, _ in wrapped.named_parameters() if n.endswith(ends)]
    assert all(n.startswith("module.") for n in wrapped_names)
    la = Laplace(wrapped, params=wrapped_names)
    assert la.param_names == ["body.0.bias", "head.weight"]
    assert Laplace(wrapped, params=la.param_names).param_names == la.param_names
    assert GGN(wrapped, nn.CrossEntropyLoss(), DATA, params=wrapped_names).shape == (20, 20)
    names_seen = []
    Laplace(wrapped, params=lambda n, _: bool(names_seen.append(n)) or True)
    assert names_seen == [n for n, _ in plain().named_parameters()]
    with pytest.raises(ValueError, match=r"module.tail.*these names: \['body.0.weight'"):
        Laplace(wrapped, params=["module.tail"])
    assert plain_names(wrapped, wrapped_names) == la.param_names


def test_what_changes_in_the_wrapped_model_is_seen():
    wrapped = compiled_part(plain())
    la = Laplace(wrapped).fit(DATA, num_data=7)
    operator = GGN(wrapped, nn.CrossEntropyLoss(), DATA)
    original = operator.to_dense()
    with torch.no_grad():
        wrapped.head.weight.mul_(2)
    with pytest.raises(RuntimeError, match="have changed since the fit"):
        la.predict(X)
    changed = plain()
    with torch.no_grad():
        changed.head.weight.mul_(2)
    expected = GGN(changed, nn.CrossEntropyLoss(), DATA).to_dense()
    assert not torch.allclose(original, expected)
    torch.testing.assert_close(operator.to_dense(), expected)


def test_modes_are_those_of_the_moment():
    class Dropping(Parts):
        def __init__(self):
            super().__init__()
            self.drop = nn.Dropout()

        def forward(self, x):
            return self.head(self.drop(self.body(x)))

    wrapped = compiled_part(Dropping().eval())
    la = Laplace(wrapped).fit(DATA, num_data=7)
    wrapped.train()
    with pytest.raises(ValueError, match=r"drop \(Dropout\) is active"):
        la.fit(DATA, num_data=7)
    wrapped.eval()
    la.fit(DATA, num_data=7)


def test_a_model_without_wrappers_is_itself():
    model = plain()
    assert unwrapped(model) is model
    assert unwrapped(nn.DataParallel(torch.compile(model))) is model
    assert unwrapped(compiled_part(model)).head is model.head


def test_hooks_on_a_wrapper_are_not_lost_in_silence():
    wrapped = nn.DataParallel(plain())
    wrapped.register_forward_hook(lambda module, x, outputs: 2 * outputs)
    with pytest.raises(ValueError, match="DataParallel around Parts has forward hooks"):
        Laplace(wrapped)


# ------------------------------------------------------------------------------------- outputs


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    hidden: torch.Tensor


Two = namedtuple("Two", ["first", "logits"])
CONTAINERS = {
    "dataclass": lambda logits: Output(logits, logits.exp()),
    "object": lambda logits: SimpleNamespace(logits=logits, loss=None),
    "dict": lambda logits: {"hidden": logits.exp(), "logits": logits},
    "dict of one": lambda logits: OrderedDict(scores=logits, cache=None),
    "tuple": lambda logits: (logits, logits.exp()),
    "list": lambda logits: [logits],
    "tuple with a loss": lambda logits: (logits.sum(), logits, logits.exp()),
    "named tuple": lambda logits: Two(logits.exp(), logits),
}


class Contained(Parts):
    def __init__(self, container):
        super().__init__()
        self.container = container

    def forward(self, x):
        return self.container(super().forward(x))


def contained(name):
    torch.manual_seed(0)
    return Contained(CONTAINERS[name]).eval()


@pytest.mark.parametrize("name", CONTAINERS)
@pytest.mark.parametrize("params", ["all", "last_layer"])
def test_logits_are_found_in_what_the_model_returns(name, params):
    plain_la = Laplace(plain(), params=params, class_dim=-1).fit_batches(DATA)
    la = Laplace(contained(name), params=params, class_dim=-1).fit_batches(DATA)
    for method, samples in (("glm", None), ("map", None), ("glm-mc", 3), ("nn", 3)):
        expected, actual = (
            posterior.predict(X, method, samples, torch.Generator().manual_seed(0)).probs
            for posterior in (plain_la, la)
        )
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", CONTAINERS)
def test_operators_find_the_logits(name):
    for make in (GGN, Hessian, KFAC):
        expected = make(plain(), nn.CrossEntropyLoss(), DATA).to_dense()
        actual = make(contained(name), nn.CrossEntropyLoss(), DATA).to_dense()
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize(
    ("returns", "message"),
    [
        (lambda logits: {"a": logits, "b": logits}, r"dict with the entries \['a', 'b'\]"),
        (lambda logits: SimpleNamespace(logits=None), "`.logits` is of type NoneType"),
        (lambda logits: (None, logits), r"tuple of \[NoneType, Tensor\]"),
        (lambda logits: logits.tolist(), r"list of \[list"),
        (lambda logits: None, "returned NoneType. Wrap it"),
    ],
)
def test_outputs_without_logits_are_named(returns, message):
    model = Contained(returns).eval()
    for params in ("all", "last_layer"):
        with pytest.raises(TypeError, match=message):
            Laplace(model, params=params).fit_batches(DATA)
        with pytest.raises(TypeError, match=message):
            GGN(model, nn.CrossEntropyLoss(), DATA, params=params)
