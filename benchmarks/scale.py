"""What large models take, from shapes alone: `python -m benchmarks.scale` writes docs/scale.md.

No weight is made: the networks lie on torch's meta device. Positions of a layer come from a forward
pass there.
"""

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import plan
from benchmarks.large_networks import TOKENS, llama, resnet
from benchmarks.published import IMAGES, decompositions, kronfluence, projected
from benchmarks.scale_costs import DTYPE, FACTORS, ekfac_costs, largest_load, passes, table
from laplace_debias.curvature.fits.costs import BlockCosts, costs_of, message_bytes
from laplace_debias.curvature.fits.factors import gradient_factor, input_factor
from laplace_debias.curvature.layers.blocks import Block
from laplace_debias.laplace.plan import count, size
from laplace_debias.problems import PROBLEMS
from laplace_debias.problems.models import resnet50

PAGE = Path(__file__).parent.parent / "docs" / "scale.md"
SEQUENCES = 100_000
_SHOWN = (
    *("conv1.weight", "layer1.0.conv2.weight", "layer2.0.conv2.weight", "layer3.1.conv1.weight"),
    *("layer4.1.conv2.weight", "layer4.2.conv3.weight", "fc.weight"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page; with `--check` fail if it is not what would be written."""
    text = page()
    if "--check" in (sys.argv[1:] if arguments is None else arguments):
        return int(PAGE.read_text(encoding="utf-8") != text)
    PAGE.write_text(text, encoding="utf-8")
    return 0


def page() -> str:
    """The page."""
    sections = [_START, _planned()]
    sections.append(_of("ResNet-50 on ImageNet", "images", IMAGES, resnet(), (1, 8)))
    sections += [_of_blocks(), kronfluence()]
    name = f"A language model of 8 billion parameters, sequences of {TOKENS:,} tokens"
    sections.append(_of(name, "sequences", SEQUENCES, llama(), (8, 64)))
    sections.append(projected(llama(), SEQUENCES, (8, 64)))
    return "\n".join([*sections, decompositions(), _END])


def _of(
    title: str, unit: str, examples: int, positions: dict[Block, int], sizes: Sequence[int]
) -> str:
    blocks = list(positions)
    costs = ekfac_costs(positions)
    of_factors, of_table = passes(positions)
    messages = message_bytes(blocks, "ekfac", "full", 2, FACTORS)
    rows: list[tuple[str, ...]] = [
        ("", *(f"{ranks} process{'es' * (ranks > 1)}" for ranks in sizes))
    ]

    def line(name: str, values: Sequence[str]) -> None:
        rows.append((name, *values))

    each = [-(-examples // ranks) for ranks in sizes]
    line("examples of each", [f"{n:,}" for n in each])
    line("pass for the factors, FLOPs of each", [count(n * of_factors) for n in each])
    line("pass for the magnitudes, FLOPs of each", [count(n * of_table) for n in each])
    loads = [largest_load(costs, ranks) for ranks in sizes]
    line("eigendecompositions, FLOPs of the one with most", [count(load) for load in loads])
    same = len(sizes)
    line("factors and eigenbases, bytes on each", [size(_sum(costs, "factors"))] * same)
    line("magnitudes, bytes on each", [size(_sum(costs, "magnitudes"))] * same)
    held = [largest_load(costs, ranks, "posterior") for ranks in sizes]
    line("posterior, bytes on the one with most", [size(load) for load in held])
    for collective, num_bytes in messages.items():
        sent = ["–" if ranks == 1 else size(num_bytes) for ranks in sizes]
        line(f"sent by {collective}, bytes", sent)
    total = sum(block.size for block in blocks)
    return (
        f"## {title}\n\nEKFAC of {len(blocks)} weight matrices with {total:,} parameters, on "
        f'{examples:,} {unit}, one cotangent an example (`fisher="mc"`).\n\n{table(rows)}\n'
    )


def _sum(costs: dict[Block, BlockCosts], key: str) -> int:
    return sum(getattr(of_block, key) for of_block in costs.values())


def _of_blocks() -> str:
    """Some blocks of ResNet-50: what formulas say, and what torch counts."""
    positions = resnet()
    with torch.device("meta"):
        model = resnet50().eval()
    rows: list[tuple[str, ...]] = [
        (
            *("block", "d", "e", "T", "factors, FLOPs an image", "counted by torch"),
            *("magnitudes", "eigendecompositions", "factors, bytes", "sent, bytes"),
        )
    ]
    chosen = [name for name in _SHOWN if any(block.name == name for block in positions)]
    by_name = {block.name: block for block in positions}
    for block in [by_name[name] for name in chosen]:
        T = positions[block]
        of = costs_of(block, "ekfac", T, 1, FACTORS, DTYPE)
        sent = sum(message_bytes([block], "ekfac", "full", 2, FACTORS).values())
        counted = counted_factor_flops(model.get_submodule(block.layer), block, T)
        rows.append(
            (
                *(f"`{block.name}`", f"{block.shape[0]:,}", f"{block.shape[1]:,}", f"{T:,}"),
                *(count(of.factor_flops), count(counted), count(of.rotation_flops)),
                *(count(of.eigh_flops), size(of.factors), size(sent)),
            )
        )
    return (
        "Some of its blocks. What torch counts is for one image, in the code that a fit runs, on "
        "the meta device. It is less than the formula where symmetry (of A from 256 columns on) or "
        "displacements (kernels of 3 × 3 with stride 1) save operations.\n\n"
        f"{table(rows)}\n"
    )


def counted_factor_flops(layer: Any, block: Block, positions: int) -> int:
    """Operations that torch counts while G and A of one image are computed.

    Args:
        layer: A layer on the meta device.
        block: Its weight block.
        positions: T; images are square.
    """
    is_linear = isinstance(layer, nn.Linear)
    stride = 1 if is_linear else layer.stride[0]
    side = math.isqrt(positions)
    x_shape = (1, layer.in_features) if is_linear else (1, layer.in_channels, *[side * stride] * 2)
    z_shape = (1, 1, block.shape[0], *([] if is_linear else [side, side]))
    x, g = (torch.empty(shape, device="meta") for shape in (x_shape, z_shape))
    # torch does not know that a product which is added in place is one.
    in_place = {torch.ops.aten.addmm_: lambda C, A, B, **_: 2 * A[0] * A[1] * B[1]}
    with FlopCounterMode(display=False, custom_mapping=in_place) as counter:
        gradient_factor(layer, block, [(x, g)])
        input_factor(layer, block, [[x]])
    return counter.get_total_flops()


def _planned() -> str:
    """The plans of fits, beside what these took."""
    if not plan.RESULTS.exists():
        return ""
    rows = json.loads(plan.RESULTS.read_text(encoding="utf-8"))
    run = [row for row in rows if "allocated" in row]
    memory = [row["plan"] / row["allocated"] for row in run]
    missed = sum(map(plan.is_missed, run))
    timed = [row for row in run if row["plan_s"] and row["fit_s"]]
    times = sorted(row["fit_s"] / row["plan_s"] for row in timed)
    low, high = times[len(times) // 4], times[-1 - len(times) // 4]
    found = [row for row in rows if "plan" in row]
    lines, of_others = (
        [plan.table_head(), *(plan.table_row(row) for row in some)]
        for some in (
            [row for row in found if row["problem"] not in plan.NETWORKS],
            [row for row in found if row["problem"] in plan.NETWORKS],
        )
    )
    others = [p.name for p in PROBLEMS if p.name not in {row["problem"] for row in run}]
    return f"""## Plans beside fits

`python -m benchmarks.plan --docs` measured these on one thread of a CPU: two batches, every
parameter. *Planned* is `la.plan(loader).peak`. *Allocated* is what torch's allocator had given out
at most, by the profiler, and *resident* by how much the process grew in a second fit: pages that
the process had before are not in it, and pages that are not given back are.

Of {len(run)} fits, planned / allocated is between {min(memory):.2f} and {max(memory):.2f};
{missed or "none"} of them is off by more than a quarter. Seconds are the processor's: other work
ran on the machine.
Those that `la.plan(loader, timed=True)` tells come from one batch. Fits took {times[0]:.1f} to
{times[-1]:.1f} times as long, half of them {low:.1f} to {high:.1f} times. Fits of a fraction of a
second take longer than is told, as what is done once is not in it; large eigendecompositions take
less.
Test problems without a measurement: {", ".join(others) or "none"}.
{_OF_THIS_RUN}

{chr(10).join(lines)}

The plan was not written for these networks. They have random weights; `"full"` is that of the last
layer. `benchmarks/plan_networks.py` builds them. Only bytes were measured.

{chr(10).join(of_others)}

Not run: {_not_run(rows) or "none"}.
"""


def _not_run(rows: Sequence[dict[str, Any]]) -> str:
    """The fits of other networks that there are no bytes of."""
    there = {(row["problem"], row["curvature"]) for row in rows if "allocated" in row}
    found: dict[str, list[str]] = {}
    for case in plan.of_networks():
        if (case.problem, case.curvature) not in there:
            found.setdefault(case.problem, []).append(case.curvature)
    return "; ".join(f"{name} ({', '.join(kinds)})" for name, kinds in found.items())


# To be taken out when all rows are measured again.
_OF_THIS_RUN = """
allcnnc, wrn101, resnet-cifar10, the digits and convnets
of depth 1 and of 2-16 were measured before the tool collected garbage first; what a fit freed of it
was taken off what it held, up to 8 MB in vit-cifar10, which was measured again.
"""
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
| factors, to the owners, once a pass | g(d(d + 1) + e(e + 1)) / 2 |
| eigenbases, from the owners to all, EKFAC | g(d² + d + e² + e) |
| magnitudes, to the owners, EKFAC and diagonal | gde |
| largest curvature, to all | 1 |

With `replicate=True` K-FAC's eigenbases go to all, too, and magnitudes to all instead of the
owners. No message is sent for a batch. On a side of more than 8,192 the factor is diagonal: d or e
numbers instead of their squares, and no eigendecomposition.

## Calls on a sharded posterior

Each process calculates what its blocks give, and one sum gives the result to all. With B inputs, M
outputs of each, P prior precisions, S samples and D parameters:

| call | messages | numbers |
|---|---|---|
| `functional`, `predict`, `predict_grid` | one sum | PBM², or PBM where variances will do |
| `functional(joint=True)` | one sum | B²M² |
| `sample`, `"glm-mc"`, `"nn"` | one sum; the state of rank 0's generator | SD; 5 KB |
| `"glm"` with `samples` | one sum; the state of rank 0's generator | BM²; 5 KB |
| `log_marginal_likelihood` | one sum | 2 a block |
| `tune(method="marglik")` | one sum for each value tried | 2 a block, with `per=` 1 besides |
| `tune`, `evaluate` on data | a part of a batch: its inputs to all, one sum | as `predict_grid` |
| product with the precision, covariance or curvature | one sum | D a column |
| `save` | a message for each tensor that rank 0 does not hold | all blocks, once |
| `save(parts=True)`, `fit(store=)` | names and checksums of files | 100 bytes a tensor |
| `load(folder)` | the index from rank 0; one sum | 1 a block; 100 bytes a tensor |
| `gather` | buckets of 64 MiB | all blocks, once |

Before a message the processes agree through the process group's store, in some hundred bytes. All
of them run the network for the same inputs, and rotate the Jacobians of their own blocks. In `tune`
and `evaluate` on data each process predicts for the examples of all. Where the posterior fits into
each process, `replicate=True` splits the examples.
"""

_END = """## What these figures leave out

They are counts, not measurements; what is projected says so. Operations of attention, of norms and
of activations are not in them, and neither are embeddings and the language model's head. Only one
machine with two cores was at hand, so nothing is said about speed-up. A model that `fully_shard`
has split is whole on each of W processes while a call computes with it: P parameters of b bytes
take Pb there beside the shards of Pb/W, each process receives Pb(W − 1)/W once a call, and no
message is sent for a batch. Every process holds the factors of all blocks during a pass, and its
own blocks' posterior after it.

Where the factors are more than a GPU has, `la.fit(loader, memory_bound=BYTES)` goes through the
blocks in groups. Of the factors it holds those of one group, and each group takes its own passes:
with q groups q forward passes over the data, q times the loader's work, and cotangents that go back
to the group's first layer. `la.plan(loader, memory_bound=BYTES)` tells the groups and their FLOPs.
With `store=FOLDER`, for models on CPUs, the finished groups lie on disk, the posterior's bytes of
the tables above, and predictions read block after block from there. Each process writes its own
blocks, and `load(FOLDER)` reads those that it holds: with W processes about 1/W of the bytes each,
whatever number wrote them. Otherwise take fewer parameters (`params=`), or `curvature="diag"`.
"""


if __name__ == "__main__":
    sys.exit(main())
