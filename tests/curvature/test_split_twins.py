"""The twin of a model that `fully_shard` has split computes what the model computes."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from laplace_debias import Laplace, gathered
from laplace_debias.curvature.network.shadow import shadow
from laplace_debias.curvature.network.wrappers import plain_names, unwrapped

X = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def mesh(tmp_path):
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.b(self.a(x).tanh())


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.LSTM(4, 3, batch_first=True)

    def forward(self, x):
        return self.cell(x[:, None])[0][:, 0]


class Hidden(nn.Module):
    """Modules in lists and functions of theirs, a tensor that a pass has left, a buffer."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 3)
        self.layers = [self.a]
        self.function = self.a.forward
        self.kept = {}
        self.register_buffer("shift", torch.arange(3.0))

    def forward(self, x):
        if "loss" not in self.kept:
            self.kept["loss"] = self.a.weight.square().sum()
        self.last = self.layers[0](x)
        return self.last + self.function(x) + self.shift + self.kept["loss"]


class Named(nn.Module):
    """Its parameters are used in another method than `forward`."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 3)

    def forward(self, x):
        return self.body(x).tanh()

    def encode(self, x):
        return self.body(x)


class Norm(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 3), nn.BatchNorm1d(3))
        self[0].register_forward_hook(lambda module, x, z: 2 * z)
        self.eval()


def split(kind, mesh):
    torch.manual_seed(0)
    model = kind()
    if kind is Norm:
        fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    if kind is Named:
        register_fsdp_forward_method(model, "encode")
    return model


@pytest.mark.parametrize("kind", [Tied, Recurrent, Hidden, Named, Norm])
def test_a_twin_computes_what_the_model_computes(kind, mesh):
    torch.manual_seed(0)
    plain = kind()
    model = split(kind, mesh)
    expected = plain(X)
    torch.testing.assert_close(model(X), expected)
    with gathered(model):
        twin = unwrapped(model)
        assert type(twin) is kind
        assert [n for n, _ in twin.named_parameters()] == [n for n, _ in plain.named_parameters()]
        copied = shadow(twin)
        del model  # Nothing of it is called.
        assert not any("FSDP" in type(module).__name__ for module in copied.modules())
        assert not any(isinstance(p, DTensor) for p in copied.parameters())
        torch.testing.assert_close(copied(X), expected, rtol=1e-6, atol=1e-6)
        if kind is Named:
            torch.testing.assert_close(twin.encode(X), plain.encode(X))


def test_a_twin_is_in_memory_of_its_own_and_let_go(mesh):
    model = split(Tied, mesh)
    outline = unwrapped(model).a.weight
    assert outline.isnan().all()
    assert outline.untyped_storage().nbytes() == 4
    with gathered(model):
        weight = unwrapped(model).a.weight
        with gathered(model):
            assert unwrapped(model).a.weight is weight
        assert unwrapped(model).a.weight is weight
        assert weight.untyped_storage().data_ptr() != model.a.weight.to_local().data_ptr()
    assert unwrapped(model).a.weight.isnan().all()


def test_a_fit_keeps_nothing_of_the_whole_model(mesh):
    model = split(Tied, mesh)
    la = Laplace(model, params=["b.bias"])
    with gathered(model):
        twin = weakref.ref(unwrapped(model).a.weight)
        la.fit([(X, torch.tensor([0, 1, 2, 3, 0]))], num_data=5).predict(X)
        assert twin() is not None
    gc.collect()
    assert twin() is None


def test_parameters_are_selected_by_either_name_where_parts_are_compiled(mesh):
    torch.manual_seed(0)
    model = Tied()
    model.b.weight = nn.Parameter(torch.eye(4))
    model.a = torch.compile(model.a)
    fully_shard(model.a, mesh=mesh)
    fully_shard(model, mesh=mesh)
    own = ["a._orig_mod.weight", "b.bias"]
    assert set(own) <= {name for name, _ in model.named_parameters()}
    assert plain_names(model, own) == ["a.weight", "b.bias"]
    la = Laplace(model, params=own).fit([(X, torch.tensor([0, 1, 2, 3, 0]))], num_data=5)
    assert la.param_names == ["a.weight", "b.bias"]


def test_a_module_that_cannot_be_copied_is_named(mesh):
    model = split(Tied, mesh)
    model.lock = iter([])
    model.others = [fully_shard(nn.Linear(2, 2), mesh=mesh)]
    with pytest.raises(TypeError, match=r"Tied cannot be copied .*not registered"):
        Laplace(model)
