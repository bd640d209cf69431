"""A model whose parameters are split over processes is refused, with the remedy."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor

from laplace_debias import Laplace
from laplace_debias.curvature import GGN, KFAC

REMEDY = r"load the full state into it.*last_layer"


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


def of_the_older_kind(mesh):
    return FullyShardedDataParallel(network(), device_id=torch.device("cpu"))


def by_a_tensor(mesh):
    model = network()
    model[2].weight = nn.Parameter(distribute_tensor(model[2].weight.data, mesh, [Replicate()]))
    return model


@pytest.mark.parametrize("split", [in_part, of_the_older_kind, by_a_tensor])
def test_a_split_model_is_refused(mesh, split):
    model = split(mesh)
    data = [(torch.randn(5, 4), torch.randint(3, (5,)))]
    for refuse in (
        lambda: Laplace(model),
        lambda: GGN(model, nn.CrossEntropyLoss(), data),
        lambda: KFAC(model, nn.CrossEntropyLoss(), data),
    ):
        with pytest.raises(NotImplementedError, match=REMEDY):
            refuse()
