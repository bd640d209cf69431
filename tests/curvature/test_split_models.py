"""Models whose parameters are split over processes: which are fitted and which are refused."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from laplace_debias import Laplace
from laplace_debias.curvature import GGN, KFAC

REMEDY = r"load this state dict"


@pytest.fixture(autouse=True)
def mesh(tmp_path):
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


def network():
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)).eval()


def in_part(mesh):
    model = network()
    fully_shard(model[0], mesh=mesh)
    return model


def by_the_older_wrapper(mesh):
    return FullyShardedDataParallel(network(), device_id=torch.device("cpu"))


def by_a_tensor(mesh):
    model = network()
    model[2].weight = nn.Parameter(distribute_tensor(model[2].weight.data, mesh, [Replicate()]))
    return model


def by_a_tensor_of_the_base(mesh):
    model = network()
    parallelize_module(model, mesh, {"0": ColwiseParallel()})
    return model


@pytest.mark.parametrize("split", [in_part, by_the_older_wrapper, by_a_tensor])
def test_split_bayesian_parameters_are_refused(mesh, split):
    model = split(mesh)
    data = [(torch.randn(5, 4), torch.randint(3, (5,)))]
    for refuse in (
        lambda: Laplace(model),
        lambda: GGN(model, nn.CrossEntropyLoss(), data),
        lambda: KFAC(model, nn.CrossEntropyLoss(), data),
    ):
        with pytest.raises(NotImplementedError, match=REMEDY):
            refuse()


@pytest.mark.parametrize("split", [by_the_older_wrapper, by_a_tensor_of_the_base])
def test_other_ways_to_split_the_base_are_refused_with_advice_that_helps(mesh, split):
    model = split(mesh)
    with pytest.raises(NotImplementedError, match=r"tensor parallelism .*\. Use fully_shard"):
        Laplace(model, params="last_layer")


def test_the_last_layer_of_a_sharded_model(mesh):
    """One process fits it, and leaves the model as it is."""
    model = in_part(mesh)
    plain = network()
    state = {name: value.full_tensor() for name, value in model[0].state_dict().items()}
    plain[0].load_state_dict(state)
    plain[2].load_state_dict(model[2].state_dict())
    x = torch.randn(5, 4)
    data = [(x, torch.arange(5) % 3)]
    for operator in (GGN, KFAC):
        with pytest.raises(NotImplementedError, match="Curvature operators do not"):
            operator(model, nn.CrossEntropyLoss(), data, params=["2.weight", "2.bias"])
    kind = type(model[0])
    la = Laplace(model, params="last_layer").fit(data)
    expected = Laplace(plain, params="last_layer").fit(data)
    assert torch.equal(la.predict(x).probs, expected.predict(x).probs)
    assert type(model[0]) is kind
    assert hasattr(model[0].weight, "full_tensor")
    torch.testing.assert_close(model(x), plain(x))
    la.predict(x)
    model[0].weight.to_local().data[0, 0] += 1
    with pytest.raises(RuntimeError, match=r"0.weight has changed since the fit"):
        la.predict(x)
