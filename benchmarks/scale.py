"""What large models take, from shapes alone: `python -m benchmarks.scale` writes docs/scale.md.

No weight is made: the networks lie on torch's meta device. Positions of a layer come from a forward
pass there.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from laplace_debias.curvature.fits.costs import (
    BlockCosts,
    costs_of,
    factor_flops,
    message_bytes,
    network_flops,
    rotation_flops,
)
from laplace_debias.curvature.fits.over_ranks import owners_by_cost
from laplace_debias.curvature.layers.blocks import Block, curvature_blocks
from laplace_debias.laplace.plan import count, size
from laplace_debias.problems.models import resnet50

PAGE = Path(__file__).parent.parent / "docs" / "scale.md"
_DTYPE, _FACTORS = torch.float32, torch.float64
# Of Llama 3 with 8 billion parameters.
_LAYERS, _WIDTH, _HIDDEN, _KEYS, _TOKENS = 32, 4096, 14336, 1024, 2048
_IMAGES, _SEQUENCES = 1_281_167, 100_000
# Kronfluence's published seconds: ResNet-50 on ImageNet, A100s.
_KRONFLUENCE = (
    ("one A100", 454, 10.6, 1057),
    ("four A100", 138, 7.8, 299),
    ("one A100, half precision", 157, 5.7, 232),
)


class _Layer(nn.Module):
    """The matrices of one layer of a language model of Llama's shape."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(_WIDTH, _WIDTH, bias=False)
        self.key = nn.Linear(_WIDTH, _KEYS, bias=False)
        self.value = nn.Linear(_WIDTH, _KEYS, bias=False)
        self.out = nn.Linear(_WIDTH, _WIDTH, bias=False)
        self.gate = nn.Linear(_WIDTH, _HIDDEN, bias=False)
        self.up = nn.Linear(_WIDTH, _HIDDEN, bias=False)
        self.down = nn.Linear(_HIDDEN, _WIDTH, bias=False)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page; with `--check` fail if it is not what would be written."""
    text = page()
    if "--check" in (sys.argv[1:] if arguments is None else arguments):
        return int(PAGE.read_text(encoding="utf-8") != text)
    PAGE.write_text(text, encoding="utf-8")
    return 0


def resnet() -> dict[Block, int]:
    """ResNet-50's weight blocks and their positions for an image of 224 × 224."""
    with torch.device("meta"):
        model = resnet50().eval()
        x = torch.empty(1, 3, 224, 224)
    names = [
        f"{path}.weight"
        for path, layer in model.named_modules()
        if isinstance(layer, (nn.Conv2d, nn.Linear))
    ]
    positions: dict[str, int] = {}
    for path, layer in model.named_modules():

        def record(_: nn.Module, __: object, z: Tensor, path: str = path) -> None:
            positions[path] = z[0, 0].numel()

        layer.register_forward_hook(record)
    model(x)
    return {block: positions[block.layer] for block in curvature_blocks(model, names)}


def llama() -> dict[Block, int]:
    """The matrices in the layers of an 8-billion-parameter model, for a sequence."""
    with torch.device("meta"):
        model = nn.ModuleList(_Layer() for _ in range(_LAYERS))
    names = [name for name, _ in model.named_parameters()]
    return dict.fromkeys(curvature_blocks(model, names), _TOKENS)


def page() -> str:
    """The page."""
    sections = [_START, _of("ResNet-50 on ImageNet", "images", _IMAGES, resnet(), (1, 8))]
    sections.append(_kronfluence())
    name = f"A language model of 8 billion parameters, sequences of {_TOKENS:,} tokens"
    sections.append(_of(name, "sequences", _SEQUENCES, llama(), (8, 64)))
    return "\n".join([*sections, _END])


def _of(
    title: str, unit: str, examples: int, positions: dict[Block, int], sizes: Sequence[int]
) -> str:
    blocks = list(positions)
    costs = {
        block: costs_of(block, "ekfac", T, 1, _FACTORS, _DTYPE) for block, T in positions.items()
    }
    through = 2 * sum(network_flops(block, T) for block, T in positions.items())
    of_factors = through + sum(factor_flops(block, T, 1) for block, T in positions.items())
    of_table = through + sum(rotation_flops(block, T, 1) for block, T in positions.items())
    messages = message_bytes(blocks, "ekfac", "full", 2, _FACTORS)
    rows: list[tuple[str, ...]] = [
        ("", *(f"{ranks} process{'es' * (ranks > 1)}" for ranks in sizes))
    ]

    def line(name: str, values: Sequence[str]) -> None:
        rows.append((name, *values))

    each = [-(-examples // ranks) for ranks in sizes]
    line("examples of each", [f"{n:,}" for n in each])
    line("pass for the factors, FLOPs of each", [count(n * of_factors) for n in each])
    line("pass for the magnitudes, FLOPs of each", [count(n * of_table) for n in each])
    loads = [_largest_load(costs, ranks) for ranks in sizes]
    line("eigendecompositions, FLOPs of the one with most", [count(load) for load in loads])
    same = len(sizes)
    line("factors and eigenbases, bytes on each", [size(_sum(costs, "factors"))] * same)
    line("magnitudes, bytes on each", [size(_sum(costs, "magnitudes"))] * same)
    line("posterior, bytes on each", [size(_sum(costs, "posterior"))] * same)
    for collective, num_bytes in messages.items():
        sent = ["–" if ranks == 1 else size(num_bytes) for ranks in sizes]
        line(f"sent by {collective}, bytes", sent)
    total = sum(block.size for block in blocks)
    return (
        f"## {title}\n\nEKFAC of {len(blocks)} weight matrices with {total:,} parameters, on "
        f'{examples:,} {unit}, one cotangent an example (`fisher="mc"`).\n\n{_table(rows)}\n'
    )


def _largest_load(costs: dict[Block, BlockCosts], ranks: int) -> int:
    owners = owners_by_cost(list(costs), ranks)
    loads = [0] * ranks
    for block, of_block in costs.items():
        loads[owners[block]] += of_block.eigh_flops
    return max(loads)


def _sum(costs: dict[Block, BlockCosts], key: str) -> int:
    return sum(getattr(of_block, key) for of_block in costs.values())


def _kronfluence() -> str:
    positions = resnet()
    through = 2 * sum(network_flops(block, T) for block, T in positions.items())
    of_factors = through + sum(factor_flops(block, T, 1) for block, T in positions.items())
    of_table = through + sum(rotation_flops(block, T, 1) for block, T in positions.items())
    rows: list[tuple[str, ...]] = [
        ("", "covariance, s", "eigendecomposition, s", "lambda, s", "lambda / covariance")
    ]
    for name, *seconds in _KRONFLUENCE:
        ratio = f"{seconds[2] / seconds[0]:.2f}"
        rows.append((f"Kronfluence, {name}", *(f"{s:,}" for s in seconds), ratio))
    rows.append(("FLOPs by our formulas", "", "", "", f"{of_table / of_factors:.2f}"))
    return (
        "Kronfluence publishes seconds for the same network and data. Its covariance pass is our "
        "pass for the factors, its lambda pass ours for the magnitudes. We have not run this: the "
        f"last row is a ratio of operations, not of seconds.\n\n{_table(rows)}\n"
    )


def _table(rows: Sequence[Sequence[str]]) -> str:
    first, *rest = rows
    lines = [first, ["---", *["---:"] * (len(first) - 1)], *rest]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


_START = """# Scale

What a fit of a large model takes: operations, bytes and messages, by formula, from shapes alone.
`python -m benchmarks.scale` writes this page. Tests compare the formulas with the operations that
torch counts in a pass for the factors, with the bytes of the sums, and with the bytes that several
processes send.

`la.plan(loader)` gives the same for your model and data, with working memory and seconds.

With d outputs, e inputs, g groups, T positions and K cotangents of an example. An addition and a
multiplication are two operations; numbers of factors are in double precision.

| | operations |
|---|---|
| forward pass, an example | 2gTde |
| one cotangent back, an example | 2gTde |
| factor G, an example | 2gKTd² |
| factor A, an example | 2gTe² at most: symmetry and displacements save up to ten times |
| magnitudes of EKFAC, an example | 2g(KTd² + Te² + KTde) |
| eigendecompositions, once | about 9g(d³ + e³) |

| | numbers |
|---|---|
| factors, and the eigenbases in their place | g(d² + e²) |
| magnitudes | gde |
| sent to the owners, once a pass | g(d(d + 1) + e(e + 1)) / 2 |
| sent back by the owners, once a fit | g(d² + d + e² + e) |
| summed on all, EKFAC | gde |

No message is sent for a batch. On a side of more than 8,192 the factor is diagonal: d or e numbers
instead of their squares, and no eigendecomposition.
"""

_END = """## What these figures leave out

They are counts, not measurements. Operations of attention, of norms and of activations are not in
them, and neither are embeddings and the language model's head. Only one machine with two cores was
at hand, so nothing is said about speed-up. A model that `fully_shard` has split is whole on each of
W processes while a call computes with it: P parameters of b bytes take Pb there beside the shards
of Pb/W, each process receives Pb(W − 1)/W once a call, and no message is sent for a batch. Every
process holds the factors of all blocks during a pass, and the whole posterior after it. A posterior
that is split over processes does not exist yet.

Where the factors are more than a GPU has, `la.fit(loader, memory_bound=BYTES)` goes through the
blocks in groups. Of the factors it holds those of one group, and each group takes its own passes:
with q groups q forward passes over the data, q times the loader's work, and cotangents that go back
to the group's first layer. `la.plan(loader, memory_bound=BYTES)` tells the groups and their FLOPs.
With `store=FOLDER` the finished groups lie on disk, the posterior's bytes of the tables above, and
predictions read block after block from there. Otherwise take fewer parameters (`params=`), or
`curvature="diag"`.
"""


if __name__ == "__main__":
    sys.exit(main())
