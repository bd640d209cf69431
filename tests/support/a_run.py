"""Small trained networks with their data, and run folders for them, made in seconds."""

import json
import math
import shutil

import torch
from torch import nn

from laplace_debias.assessment import Method, PosteriorChoice, assess
from laplace_debias.assessment.methods import (
    LAST_LAYER,
    NETWORK,
    TEMPERATURE,
)
from laplace_debias.curvature.losses.likelihoods import Categorical, Gaussian, likelihood_from
from laplace_debias.sources.loaded import Loaded

SIDE = 8
CLASSES = ("ant", "bee", "cat <b>", "dog & co", "<script>alert('elk')</script>")
ALL_PARAMETERS = Method(
    key="laplace",
    label="Laplace, all parameters",
    describes="A Laplace approximation (K-FAC) over all parameters, fitted to two batches.",
    posterior=PosteriorChoice(params="all", mode="debiased", fit_examples=32),
    examples=60,
)


def batches_of(x, y, size=50):
    """Batches in a list, so that they can be read again."""
    return list(zip(x.split(size), y.split(size), strict=True))


def trained(model, loss, x, y, steps=60):
    """Train a model with Adam, and return it in eval mode."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()
    return model.eval()


def loaded_images(
    num_test=120, num_ood=80, has_validation=True, severities=(1, 2, 3, 4, 5), seed=0
):
    """Five classes of striped pictures of 8 × 8 pixels, hard to distinguish, with OOD sets."""
    generator = torch.Generator().manual_seed(seed)
    angles = torch.arange(len(CLASSES)) * math.pi / len(CLASSES)
    coordinates = torch.linspace(-1, 1, SIDE)
    rows, columns = torch.meshgrid(coordinates, coordinates, indexing="ij")

    def draw(n, noise=1.4):
        y = torch.randint(len(CLASSES), (n,), generator=generator)
        a = angles[y][:, None, None]
        phase = 6.28 * torch.rand(n, 1, 1, generator=generator)
        x = (5 * (a.cos() * rows + a.sin() * columns) + phase).sin()
        x = x.unsqueeze(1).expand(-1, 3, -1, -1)
        x = x + noise * torch.randn(x.shape, generator=generator)
        random_labels = torch.randint(len(CLASSES), (n,), generator=generator)
        return x, random_labels.where(torch.rand(n, generator=generator) < 0.1, y)

    x, y = draw(200)
    x_val, y_val = draw(150)
    x_test, y_test = draw(num_test)
    noise = 1.4 * torch.randn(x_test.shape, generator=generator)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.ReLU(),
            nn.AvgPool2d(2),
            nn.Flatten(),
            nn.Linear(128, len(CLASSES)),
        )
        trained(model, nn.functional.cross_entropy, x, y, steps=25)
    shuffled = x_test.flatten(2)[:, :, torch.randperm(SIDE**2, generator=generator)]
    ood = {
        "shuffled": batches_of(shuffled.view_as(x_test)[:num_ood], y_test[:num_ood]),
        "static": batches_of(5 * noise[:num_ood], y_test[:num_ood]),
    }
    return Loaded(
        model=model,
        likelihood=Categorical(),
        train=batches_of(x, y),
        num_train=len(x),
        validation=batches_of(x_val, y_val) if has_validation else None,
        test=batches_of(x_test, y_test),
        ood=ood if num_ood else {},
        shifts={s: batches_of(x_test + 0.5 * s * noise, y_test) for s in severities},
        classes=CLASSES,
        picture=lambda x: x.clamp(-2, 2).add(2).mul(63).byte().permute(1, 2, 0),
        input_name="image",
    )


def loaded_rows(num_test=120, num_ood=40, has_validation=True, num_outputs=1, seed=0):
    """A regression for rows of four numbers, with an OOD set of distant rows."""
    generator = torch.Generator().manual_seed(seed)

    def draw(n, scale=1.0):
        x = scale * torch.randn(n, 4, generator=generator)
        y = (x[:, :num_outputs] * 2).sin() + x[:, 3:]
        return x, y + 0.3 * torch.randn(y.shape, generator=generator)

    x, y = draw(200)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, num_outputs))
        trained(model, nn.functional.mse_loss, x, y, steps=300)
    return Loaded(
        model=model,
        likelihood=Gaussian(),
        train=batches_of(x, y),
        num_train=len(x),
        validation=batches_of(*draw(150)) if has_validation else None,
        test=batches_of(*draw(num_test)),
        ood={"far-away": batches_of(*draw(num_ood, 4.0))} if num_ood else {},
        input_name="row",
    )


def loaded_yes_no(task="binary", num_test=120, seed=0):
    """Rows of four numbers with one binary label, or with three of them."""
    generator = torch.Generator().manual_seed(seed)
    num_outputs = 1 if task == "binary" else 3
    weights = torch.randn(4, num_outputs, generator=generator)

    def draw(n):
        x = torch.randn(n, 4, generator=generator)
        y = (x @ weights + torch.randn(n, num_outputs, generator=generator) > 0).float()
        return x, y[:, 0] if task == "binary" else y

    x, y = draw(200)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, num_outputs))
        loss = nn.functional.binary_cross_entropy_with_logits
        trained(model, lambda f, y: loss(f, y.reshape(f.shape)), x, y, steps=200)
    return Loaded(
        model=model,
        likelihood=likelihood_from(task),
        train=batches_of(x, y),
        num_train=len(x),
        validation=batches_of(*draw(150)),
        test=batches_of(*draw(num_test)),
        ood={"large": batches_of(6 * x[:40], y[:40])},
        input_name="row",
    )


def methods_for(loaded):
    """Return the methods to compare, with temperature scaling if it can be fitted."""
    if loaded.likelihood.predicts_numbers or loaded.validation is None:
        return NETWORK, LAST_LAYER, ALL_PARAMETERS
    return NETWORK, TEMPERATURE, LAST_LAYER, ALL_PARAMETERS


def make_run(folder, task="classification", **options):
    """Make a complete run folder.

    Args:
        folder: The folder to write.
        task: `classification` (of pictures), `regression`, `binary` or `multilabel`.
        options: Options of `loaded_images`, `loaded_rows` or `loaded_yes_no`.
    """
    if task == "classification":
        loaded = loaded_images(**options)
    elif task == "regression":
        loaded = loaded_rows(**options)
    else:
        loaded = loaded_yes_no(task, **options)
    title = f"A small {task}"
    assess(loaded, folder, methods_for(loaded), title=title, config="seed: 0\n")
    return folder


def shortened(run, folder, *, shifts=True, ood=True, posterior=True, pictures=True):
    """Copy a run folder without the parts whose option is False."""
    shutil.copytree(run, folder)
    removed_roles = []
    if not shifts:
        removed_roles.append("shift")
    if not ood:
        removed_roles.append("ood")
    meta = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    meta["sets"] = [data for data in meta["sets"] if data["role"] not in removed_roles]
    if not posterior:
        meta["methods"] = [method for method in meta["methods"] if not method["is_laplace"]]
        shutil.rmtree(folder / "sweeps")
    names = [data["name"] for data in meta["sets"]]
    keys = [method["key"] for method in meta["methods"]]
    measured = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))
    for table in ("rows", "differences"):
        measured[table] = [
            row
            for row in measured[table]
            if row["set"] in names and {row["method"], row.get("reference", keys[0])} <= set(keys)
        ]
    examples = json.loads((folder / "examples.json").read_text(encoding="utf-8"))
    if not posterior:
        examples["chosen_by"] = dict.fromkeys(examples["chosen_by"], keys[0])
    if not pictures:
        shutil.rmtree(folder / "examples", ignore_errors=True)
        for entry in examples["most_uncertain"]:
            entry["inputs"] = [0.5, -1.25, 3.0]
    for name, content in (("run", meta), ("metrics", measured), ("examples", examples)):
        write_json(folder / f"{name}.json", content)
    return folder


def write_json(path, content):
    path.write_text(json.dumps(content), encoding="utf-8")
