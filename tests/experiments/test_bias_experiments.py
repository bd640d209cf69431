"""The experiments on the bias, against dense float64 linear algebra on a tiny network."""

import csv
import dataclasses
from pathlib import Path

import oracle
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.func import functional_call, grad, hessian, jacrev

from laplace_debias.curvature.network.weight_decay import decay_mask
from laplace_debias.experiments.bias import contours, cuts, overlaps
from laplace_debias.experiments.bias.bias_rows import FULL, OTHER, SAME, bias_rows, summary_of
from laplace_debias.experiments.bias.contours import ContoursSettings, run_contours
from laplace_debias.experiments.bias.cuts import (
    BiasSettings,
    cut_along,
    find_directions,
    mean_cut,
    quadratic_on,
)
from laplace_debias.experiments.bias.directional_curvature import (
    DirectionalCurvatureSettings,
    WideResNetSettings,
    bias_figure,
    run_directional_curvature,
)
from laplace_debias.experiments.bias.kfac_batch_size import (
    KFACBatchSizeSettings,
    kfac_magnitudes,
    run_kfac_batch_size,
)
from laplace_debias.experiments.bias.model_size import ModelSizeSettings, run_model_size
from laplace_debias.experiments.bias.over_training import OverTrainingSettings, run_over_training
from laplace_debias.experiments.bias.overlaps import OverlapsSettings, run_overlaps, step_finding
from laplace_debias.experiments.shared.recipe import RecipeChanges
from laplace_debias.experiments.shared.setup import Trained
from laplace_debias.laplace import Laplace
from laplace_debias.linalg import eigsh
from laplace_debias.problems import conv_net, get_problem, log_epochs, save_checkpoint
from laplace_debias.quadratic import Cut

DECAY = 0.3
TINY = {
    "problem": "allcnn-digits",
    "recipe": RecipeChanges(cycles=((2, 0.1),)),
    "full_examples": 40,
    "num_directions": 3,
    "progress": False,
}


@pytest.fixture(scope="module")
def trained() -> Trained:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double().eval()
    problem = get_problem("allcnn-digits")
    return Trained(problem, model, problem.data(), DECAY)


@pytest.fixture(scope="module")
def batches():
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(6, 3, generator=generator, dtype=torch.float64),
            torch.randint(3, (6,), generator=generator),
        )
        for _ in range(4)
    ]


def dense(model: nn.Module, batch, curvature: str):
    """Loss, gradient and curvature of the regularised loss, by automatic differentiation."""
    x, y = batch
    names = [name for name, _ in model.named_parameters()]
    shapes = [p.shape for p in model.parameters()]
    theta = torch.cat([p.detach().flatten() for p in model.parameters()])

    def outputs(vector):
        parts = vector.split([shape.numel() for shape in shapes])
        named = {n: part.view(s) for n, part, s in zip(names, parts, shapes, strict=True)}
        return functional_call(model, named, (x,))

    mask = torch.cat(
        [torch.full((p.numel(),), "bias" not in n) for n, p in model.named_parameters()]
    ).double()

    def loss(vector):
        risk = nn.functional.cross_entropy(outputs(vector), y)
        return risk + DECAY / 2 * (mask * vector * vector).sum()

    if curvature == "hessian":
        matrix = hessian(loss)(theta)
    else:
        jacobian, probs = jacrev(outputs)(theta), outputs(theta).softmax(1)
        middle = torch.diag_embed(probs) - probs[:, :, None] * probs[:, None, :]
        matrix = torch.einsum("nci,ncd,ndj->ij", jacobian, middle, jacobian) / len(x)
        matrix = matrix + DECAY * torch.diag(mask)
    return loss(theta), grad(loss)(theta), matrix


@pytest.mark.parametrize("curvature", ["ggn", "hessian"])
def test_cuts_are_those_of_dense_quadratics(trained, batches, curvature):
    value, gradient, matrix = dense(trained.model, batches[0], curvature)
    V = torch.linalg.qr(torch.randn(len(gradient), 5, dtype=torch.float64)).Q
    cut = cut_along(trained, batches[0], curvature, DECAY, V)
    torch.testing.assert_close(cut.value, value, rtol=1e-12, atol=0)
    torch.testing.assert_close(cut.slopes, V.T @ gradient, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(cut.curvatures, V.T @ matrix @ V, rtol=1e-10, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("curvature", ["ggn", "hessian"])
def test_the_mean_of_a_partitions_cuts_is_the_full_sets(trained, batches, curvature):
    union = tuple(torch.cat(parts) for parts in zip(*batches, strict=True))
    value, gradient, matrix = dense(trained.model, union, curvature)
    V = torch.linalg.qr(torch.randn(len(gradient), 4, dtype=torch.float64)).Q
    mean = mean_cut([cut_along(trained, batch, curvature, DECAY, V) for batch in batches])
    torch.testing.assert_close(mean.value, value, rtol=1e-12, atol=0)
    torch.testing.assert_close(mean.slopes, V.T @ gradient, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(mean.curvatures, V.T @ matrix @ V, rtol=1e-10, atol=1e-12)


def test_eigenvectors_are_the_top_ones_and_their_curvatures_the_eigenvalues(trained, batches):
    _, _, matrix = dense(trained.model, batches[0], "ggn")
    quadratic = quadratic_on(trained, batches[0], "ggn", DECAY)
    found = find_directions(quadratic, "eigenvectors", 4, 1e-10, seed=0)
    expected = torch.linalg.eigvalsh(matrix).flip(0)[:4]
    cut = cut_along(trained, batches[0], "ggn", DECAY, found.vectors)
    torch.testing.assert_close(cut.curvatures, torch.diag(expected), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found.slopes(cut), cut.slopes, rtol=0, atol=0)


def test_eigenvectors_point_down_the_slope_whatever_the_solver_returns(
    trained, batches, monkeypatch
):
    quadratic = quadratic_on(trained, batches[0], "ggn", DECAY)
    found = find_directions(quadratic, "eigenvectors", 4, 1e-10, seed=0)
    assert (found.vectors.T @ quadratic.gradient < 0).all()

    def negated(*arguments, **options):
        pairs = eigsh(*arguments, **options)
        return dataclasses.replace(pairs, vectors=-pairs.vectors)

    monkeypatch.setattr(cuts, "eigsh", negated)
    again = find_directions(quadratic, "eigenvectors", 4, 1e-10, seed=0)
    assert torch.equal(again.vectors, found.vectors)


def test_slopes_along_cg_directions_are_those_at_its_iterates(trained, batches):
    _, gradient, matrix = dense(trained.model, batches[0], "ggn")
    _, other_gradient, other = dense(trained.model, batches[1], "ggn")
    quadratic = quadratic_on(trained, batches[0], "ggn", DECAY)
    found = find_directions(quadratic, "cg", 5, 1e-10, seed=0)
    own_cut, other_cut = (
        cut_along(trained, batch, "ggn", DECAY, found.vectors) for batch in batches[:2]
    )
    # An independent CG, on the dense matrix.
    x, residual = torch.zeros_like(gradient), -gradient
    direction = residual.clone()
    for step in range(5):
        unit = direction / direction.norm()
        torch.testing.assert_close(found.vectors[:, step], unit, rtol=1e-7, atol=1e-8)
        for cut, g, H in ((own_cut, gradient, matrix), (other_cut, other_gradient, other)):
            slope = unit @ (g + H @ x)
            torch.testing.assert_close(found.slopes(cut)[step], slope, rtol=1e-7, atol=1e-9)
        alpha = residual @ residual / (direction @ matrix @ direction)
        x = x + alpha * direction
        new = residual - alpha * (matrix @ direction)
        direction = new + (new @ new) / (residual @ residual) * direction
        residual = new
    assert (found.slopes(own_cut) < 0).all()


def test_biases_are_not_decayed(trained):
    expected = torch.cat([torch.ones(12), torch.zeros(4), torch.ones(12), torch.zeros(3)]).bool()
    assert torch.equal(decay_mask(trained.model.parameters()), expected)


def test_rows_hold_every_batch_and_their_mean(trained, batches):
    quadratic = quadratic_on(trained, batches[1], "ggn", DECAY)
    found = find_directions(quadratic, "eigenvectors", 2, 1e-10, seed=0)
    of_batches = [cut_along(trained, batch, "ggn", DECAY, found.vectors) for batch in batches]
    rows = bias_rows(1, found, of_batches)
    assert [row["batch"] for row in rows if row["measured_on"] == SAME] == [1, 1]
    assert {row["batch"] for row in rows if row["measured_on"] == OTHER} == {0, 2, 3}
    for index in (1, 2):
        of_index = [row for row in rows if row["index"] == index]
        full = [row for row in of_index if row["measured_on"] == FULL]
        assert len(full) == 1
        for quantity in ("slope", "curvature"):
            values = [row[quantity] for row in of_index if row["measured_on"] != FULL]
            assert full[0][quantity] == pytest.approx(sum(values) / 4, rel=1e-12)


def test_summary_by_hand():
    def row(index, name, batch, value):
        place = {"draw": 0, "index": index, "measured_on": name, "batch": batch}
        return place | {"slope": -value, "curvature": value}

    # Two directions: 6 and 9 on the batch itself, 2 and 3 in full, the others 1, 1 and 0, 3.
    rows = [row(1, SAME, 0, 6.0), row(2, SAME, 0, 9.0), row(1, FULL, None, 2.0)]
    rows += [row(2, FULL, None, 3.0), row(1, OTHER, 1, 1.0), row(2, OTHER, 1, 1.0)]
    rows += [row(1, OTHER, 2, 0.0), row(2, OTHER, 2, 3.0)]
    slope, curvature = summary_of(rows)
    assert curvature["same_mean_error"] == pytest.approx(2.0)
    assert curvature["same_over_full"] == pytest.approx(3.0)
    assert curvature["other_mean_error"] == pytest.approx((-0.5 - 2 / 3 - 1 + 0) / 4)
    assert curvature["others_mean_over_full"] == pytest.approx(0.25)  # the lower median
    assert curvature["top_same_over_full"] == pytest.approx(3.0)
    assert curvature["top_others_mean_over_full"] == pytest.approx(0.25)
    # The error of a negative slope is relative to its size: too steep downhill is negative.
    assert slope["same_mean_error"] == pytest.approx(-2.0)
    assert slope["other_p90"] == pytest.approx(-curvature["other_p10"])


def test_kfac_magnitudes_are_dense_curvatures_along_dense_eigenvectors(trained, batches):
    own = kfac_magnitudes(trained, batches[0], None)
    other = kfac_magnitudes(trained, batches[0], batches[1:3])
    first, second = (
        Laplace(trained.model, "classification", params="weights").fit_batches(data)
        for data in (batches[:1], batches[1:3])
    )
    start = 0
    for name, block in first.posterior.curvature.blocks.items():
        U = torch.kron(block.U_G, block.U_A)
        for matrix, found in (
            (block.to_dense(), own),
            (second.posterior.curvature.blocks[name].to_dense(), other),
        ):
            along = torch.diagonal(U.T @ matrix @ U)
            part = found[start : start + len(along)]
            torch.testing.assert_close(part, along, rtol=1e-9, atol=1e-12)
        start += U.shape[1]
    assert start == len(own)


def read(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
def test_contours_tell_six_numbers_of_each_quadratic(tmp_path):
    settings = ContoursSettings(
        **TINY | {"num_directions": 2, "output": tmp_path / "out", "batch_size": 10, "draws": 2}
    )
    rows = run_contours(settings)
    assert [(row["draw"], row["quadratic"]) for row in rows] == [
        (draw, name) for draw in (0, 1) for name in ("mini-batch", "full-batch")
    ]
    for mini, full in zip(rows[::2], rows[1::2], strict=True):
        # In its own eigenvectors a mini-batch has no mixed term, and the larger curvature first.
        assert abs(mini["curvature_12"]) < 1e-3 * mini["curvature_11"]
        assert mini["curvature_11"] >= mini["curvature_22"]
        newton = -mini["slope_1"] / mini["curvature_11"]
        assert float(mini["newton_1"]) == pytest.approx(float(newton), rel=0.02)
        assert full["loss"] > 0
    assert (tmp_path / "out" / "contours.png").stat().st_size > 10_000


@pytest.mark.slow
@pytest.mark.parametrize(
    ("curvature", "directions", "sizes"),
    [
        ("ggn", "eigenvectors", (10, 20)),
        ("hessian", "cg", (20,)),
        # Each curvature and each kind of directions is above; these are the other pairs.
        pytest.param("ggn", "cg", (20,), marks=pytest.mark.slow),
        pytest.param("hessian", "eigenvectors", (20,), marks=pytest.mark.slow),
    ],
)
def test_directional_curvature_of_every_kind(tmp_path, curvature, directions, sizes):
    settings = DirectionalCurvatureSettings(
        **TINY,
        output=tmp_path / "out",
        batch_sizes=sizes,
        curvature=curvature,
        directions=directions,
    )
    rows = run_directional_curvature(settings)
    for size in sizes:
        of_size = [row for row in rows if row["batch_size"] == size]
        count = max(row["index"] for row in of_size)
        assert len(of_size) == count * (40 // size + 1)
        own = [row["curvature"] for row in of_size if row["measured_on"] == SAME]
        if directions == "eigenvectors":
            assert own == sorted(own, reverse=True)
        slopes = [row["slope"] for row in of_size if row["measured_on"] == SAME]
        if directions == "cg":
            assert max(slopes) < 0
    assert len(read(tmp_path / "out" / "results.csv")) == len(rows)

    # The first direction on the mini-batch itself, and on the next, in double precision.
    size = sizes[-1]
    problem = get_problem("allcnn-digits")
    model, parts = problem.model().double().eval(), tmp_path / "out" / "parts"
    model.load_state_dict(load_file(parts / "network.safetensors"))
    train = problem.data().train
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(0))
    v = load_file(parts / f"{size}-directions-0.safetensors")["vectors"][:, 0].double()
    for batch in (0, 1):
        x, y = train.batch(order[batch * size : (batch + 1) * size])
        expected = bend(model, x.double(), y, v, curvature)
        (row,) = [
            row
            for row in rows
            if (row["batch_size"], row["index"], row["batch"]) == (size, 1, batch)
        ]
        assert row["curvature"] == pytest.approx(expected, rel=1e-3)


@pytest.mark.slow
def test_the_first_slope_on_a_wide_resnet_is_that_of_its_regularised_loss(tmp_path):
    """Eq. 19: along −g/‖g‖ the slope is −‖g‖, of the loss that is trained on (Eq. 1)."""
    problem = get_problem("wrn101-digits")
    torch.manual_seed(0)
    model = problem.model()
    save_checkpoint(model, tmp_path / "network.safetensors")
    settings = WideResNetSettings(
        **TINY
        | {"problem": "wrn101-digits", "recipe": RecipeChanges(weight_decay=DECAY)}
        | {"full_examples": 8, "num_directions": 1, "batch_sizes": (4,), "directions": "cg"},
        checkpoint=tmp_path / "network.safetensors",
        output=tmp_path / "out",
    )
    rows = run_directional_curvature(settings, name="wide_resnet")
    (own,) = [row for row in rows if row["measured_on"] == SAME]
    train = problem.data().train
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(0))
    x, y = train.batch(order[:4])
    model = model.double().eval()
    weights = [p for p in model.parameters() if p.dim() > 1]
    loss = nn.functional.cross_entropy(model(x.double()), y)
    loss = loss + DECAY / 2 * sum(p.square().sum() for p in weights)
    gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss, [*model.parameters()])])
    assert own["slope"] == pytest.approx(-float(gradient.norm()), rel=1e-4)
    assert (tmp_path / "out" / "wide_resnet_4.png").is_file()


def bend(model: nn.Module, x: torch.Tensor, y: torch.Tensor, v: torch.Tensor, curvature: str):
    """dᵀHd of the mean cross-entropy along d = v / ‖v‖, by forward mode over the parameters."""
    named = {name: p.detach() for name, p in model.named_parameters()}
    parts = (v / v.norm()).split([p.numel() for p in named.values()])
    tangent = {n: d.view_as(p) for (n, p), d in zip(named.items(), parts, strict=True)}

    def outputs(values):
        return functional_call(model, values, (x,))

    if curvature == "ggn":
        logits, change = torch.func.jvp(outputs, (named,), (tangent,))
        p = logits.softmax(1)
        return float(((p * change**2).sum(1) - (p * change).sum(1) ** 2).mean())

    def slope(values):
        def loss(at):
            return nn.functional.cross_entropy(outputs(at), y)

        return torch.func.jvp(loss, (values,), (tangent,))[1]

    return float(torch.func.jvp(slope, (named,), (tangent,))[1])


@pytest.mark.parametrize("draws", [(1.0, -1.0), (-1.0, 1.0), (1.0, 2.0)])
def test_a_negative_curvature_is_seen_in_every_panel(draws):
    rows = [
        {"draw": draw, "index": 1, "measured_on": name, "batch": batch, "slope": 0.1}
        | {"curvature": value}
        for draw, value in enumerate(draws)
        for name, batch in ((SAME, draw), (OTHER, 1 - draw), (FULL, None))
    ]
    panels = bias_figure(rows, 10, "eigenvectors").axes[2:]
    scale = "log" if min(draws) > 0 else "linear"
    assert [ax.get_yscale() for ax in panels] == [scale, scale]


@pytest.mark.slow
def test_overlaps_are_those_of_the_stored_eigenvectors(tmp_path):
    settings = OverlapsSettings(
        **TINY, output=tmp_path / "out", batch_sizes=(10,), draws=2, cg_steps=2
    )
    rows = run_overlaps(settings)
    parts = tmp_path / "out" / "parts"
    U, V = (load_file(parts / f"10-directions-{d}.safetensors")["vectors"] for d in (0, 1))
    expected = (U.double().T @ V.double()) ** 2
    found = torch.tensor([row["overlap"] for row in rows], dtype=torch.float64).view(3, 3)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-6)
    steps = read(tmp_path / "out" / "step_sizes.csv")
    assert all(float(row["step_size"]) > 0 for row in steps if row["measured_on"] == SAME)
    assert {row["measured_on"] for row in steps} == {SAME, OTHER, FULL}
    assert (tmp_path / "out" / "steps.pdf").is_file()


def step_rows(**sizes):
    return [
        {"index": i, "measured_on": name, "batch": 0, "step_size": size}
        for name, of_name in sizes.items()
        for i, size in enumerate(of_name, start=1)
    ]


def test_the_sentence_on_step_sizes_is_made_from_the_numbers():
    def told(same, other):
        return step_finding(step_rows(**{SAME: same, OTHER: other, FULL: [1.0]}))

    assert "own mini-batch all are positive; 1 of 2 that" in told([1.0, 2.0], [1.0, -1.0])
    assert "own mini-batch 1 of 2 are positive; 0 of 1 that" in told([1.0, -2.0], [1.0, None])


def test_a_direction_of_no_curvature_has_no_step_size():
    common = {"index": 1, "batch": 0, "slope": -2.0}
    rows = [
        {**common, "measured_on": name, "curvature": curvature}
        for name, curvature in ((SAME, 4.0), (OTHER, 0.0), (FULL, -4.0))
    ]
    steps = overlaps._step_sizes(rows)
    assert [row["step_size"] for row in steps] == [0.5, None, -0.5]
    for some in (steps, steps[1:]):
        drawn = overlaps.step_figure(some).axes[0].collections
        assert [len(dots.get_offsets()) for dots in drawn] == [0, 1, len(some) - 2]


def test_contours_are_of_heights_above_the_very_minimum():
    C = torch.tensor([[50.0, 3.0], [3.0, 0.7]], dtype=torch.float64)
    minimum = torch.tensor([0.123, -0.77], dtype=torch.float64)
    cut = Cut(torch.tensor(2.0, dtype=torch.float64), -C @ minimum, C)
    axis = torch.linspace(-1, 1, 5, dtype=torch.float64)
    found = contours._heights(cut, cut.minimizer(), cut(axis[None, :], axis[:, None]))
    offsets = torch.cartesian_prod(axis, axis).view(5, 5, 2).flip(-1) - minimum
    expected = torch.einsum("rci,ij,rcj->rc", offsets, C, offsets) / 2
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("decay", [float("nan"), float("inf"), -1.0])
def test_weight_decay_that_is_no_number_is_refused(decay):
    with pytest.raises(ValueError, match="weight_decay is"):
        BiasSettings(output=Path("unused"), weight_decay=decay)
    with pytest.raises(ValueError, match="weight_decay"):
        BiasSettings(output=Path("unused"), recipe=RecipeChanges(weight_decay=decay))


@pytest.mark.slow
def test_kfac_against_batch_size(tmp_path):
    settings = KFACBatchSizeSettings(
        **TINY | {"num_directions": 20, "full_examples": 60},
        output=tmp_path / "out",
        batch_sizes=(5, 20),
        others=2,
    )
    rows = run_kfac_batch_size(settings)
    assert len(rows) == 2 * 20 * 4
    for size in (5, 20):
        own = [
            row["curvature"]
            for row in rows
            if row["batch_size"] == size and row["measured_on"] == SAME
        ]
        assert own == sorted(own, reverse=True)

    # The largest eigenvalue of G ⊗ A over the layers, from an independent K-FAC.
    problem = get_problem("allcnn-digits")
    model = problem.model().double().eval()
    model.load_state_dict(load_file(tmp_path / "out" / "parts" / "network.safetensors"))
    train = problem.data().train
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(0))
    x, _ = train.batch(order[:5])
    largest = 0.0
    for layer in oracle.weighted_layers(model):
        factors = oracle.kfac_factors(model, x.double(), "classification", layer)
        values = [oracle.eigen(factors[name])[0][0] for name in "GA"]
        largest = max(largest, float(values[0] * values[1]))
    (row,) = [
        row for row in rows if (row["batch_size"], row["measured_on"], row["index"]) == (5, SAME, 1)
    ]
    assert row["curvature"] == pytest.approx(largest, rel=1e-3)


@pytest.mark.slow
def test_over_training_is_the_same_from_checkpoints_of_before(tmp_path):
    base = TINY | {"batch_size": 20, "draws": 1, "num_checkpoints": 2}
    here = run_over_training(OverTrainingSettings(**base, output=tmp_path / "a"))
    assert [row["epoch"] for row in here[::2]] == list(log_epochs(2, 2))
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    for epoch in (1, 2):
        kept = tmp_path / "a" / "parts" / f"network.epoch-{epoch:04d}.safetensors"
        (folder / f"epoch-{epoch:04d}.safetensors").write_bytes(kept.read_bytes())
    settings = OverTrainingSettings(**base, output=tmp_path / "b", checkpoints=folder)
    assert run_over_training(settings) == here
    with pytest.raises(ValueError, match="no epoch-"):
        run_over_training(OverTrainingSettings(**base, output=tmp_path / "c", checkpoints=tmp_path))
    assert not (tmp_path / "c").exists()


@pytest.mark.slow
def test_model_size_counts_the_parameters_of_each_network(tmp_path):
    settings = ModelSizeSettings(
        **TINY
        | {
            "problem": "convnet-digits",
            "recipe": RecipeChanges(epochs=1),
            "output": tmp_path / "out",
            "batch_size": 20,
            "draws": 1,
            "models": ((0, 2), (1, 3)),
        }
    )
    rows = run_model_size(settings)
    # Convolutions of 9 weights and a bias, then a linear layer from 2 × 2 positions.
    counts = [(9 + 1) * 2 + (2 * 4 + 1) * 10, (9 + 1) * 3 + (27 + 1) * 3 + (3 * 4 + 1) * 10]
    assert [row["parameters"] for row in rows[::2]] == counts

    # The smaller network's top curvature on the mini-batch over that on all, by dense matrices.
    problem = get_problem("convnet-digits")
    model = conv_net(0, 2, 10, in_channels=1, image_size=8).double().eval()
    model.load_state_dict(load_file(tmp_path / "out" / "parts" / "network-0-2.safetensors"))
    train = problem.data().train
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(0))
    names = [name for name, _ in model.named_parameters()]
    own, full = (
        oracle.ggn(model, train.batch(order[:n])[0].double(), "classification", names)
        for n in (20, 40)
    )
    top = oracle.eigen(own)[1][:, 0]
    (row,) = [row for row in rows[:2] if row["quantity"] == "curvature"]
    expected = float((top @ own @ top) / (top @ full @ top))
    assert row["top_same_over_full"] == pytest.approx(expected, rel=1e-2)
    assert (tmp_path / "out" / "model_size.png").is_file()


def test_a_partition_must_be_of_equal_batches():
    settings = BiasSettings(output=Path("unused"), full_examples=100, draws=3)
    assert settings.num_batches(20) == 5
    with pytest.raises(ValueError, match="divisor"):
        settings.num_batches(30)
    with pytest.raises(ValueError, match="more than draws = 3"):
        settings.num_batches(50)
