"""What the paper's experiments share: the trained network and its mini-batches."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from rich.console import Console
from torch import Tensor, nn

from laplace_debias.experiments.shared.settings import ExperimentSettings
from laplace_debias.experiments.shared.store import Store, open_store, tensor_digest
from laplace_debias.problems import (
    Images,
    ProblemData,
    TestProblem,
    get_problem,
    load_checkpoint,
    load_problem,
    save_checkpoint,
    train,
)
from laplace_debias.system.device import device_from

Batch = tuple[Tensor, Tensor]

_COMPARED = 64
"""How many images of a data set are compared with those of an earlier run."""


@dataclass(frozen=True, eq=False)
class Trained:
    """A trained network with its data.

    Attributes:
        problem: The test problem.
        model: The network, in evaluation mode, on the device of the run.
        data: The problem's data, on the CPU.
        weight_decay: β of its training (Eq. 1); 0 for decoupled weight decay (`nadamw`), which
            minimises no regularised loss.
    """

    problem: TestProblem
    model: nn.Module
    data: ProblemData
    weight_decay: float

    @property
    def device(self) -> torch.device:
        """Where the network is."""
        return next(self.model.parameters()).device

    def batches(self, images: Images, size: int, number: int, seed: int) -> list[Batch]:
        """Disjoint mini-batches of images chosen at random, on the device of the run.

        Args:
            images: The images, for example `data.train`.
            size: Images in a batch.
            number: How many batches. Together they are a partition of the chosen images.
            seed: Seed of the choice. The first `k` images chosen are the same for all sizes.

        Raises:
            ValueError: If there are too few images.
        """
        if size < 1 or number < 1 or size * number > len(images):
            raise ValueError(
                f"{number} batches of {size} images; expected positive numbers, and at most "
                f"{len(images)} images in all: lower the number or the size"
            )
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
        chosen = order[: size * number].split(size)
        return [
            (x.to(self.device), y.to(self.device)) for x, y in (images.batch(i) for i in chosen)
        ]


def begin(
    name: str,
    settings: ExperimentSettings,
    console: Console | None,
    *,
    growing: Sequence[str] = (),
) -> tuple[Console, Store, Trained]:
    """What most experiments begin with: a console, the run's store and the trained network.

    Args:
        name: Name of the experiment.
        settings: Its settings.
        console: Where to print; the standard output if None.
        growing: As for `open_store`.

    Raises:
        FileExistsError, ValueError: As `open_store` and `load_trained`.
    """
    console = console or plain_console()
    store = open_store(name, settings, growing=growing)
    return console, store, load_trained(settings, store, console)


def plain_console() -> Console:
    """The standard output, for plain text."""
    return Console(highlight=False, markup=False)


def load_trained(
    settings: ExperimentSettings, store: Store, console: Console, dtype: torch.dtype | None = None
) -> Trained:
    """The trained network of the settings and its data; trains the network if there is none.

    Args:
        settings: Which network, and where it is.
        store: Where a network that is trained here is stored, finished or not.
        console: Where to print.
        dtype: Of the network's parameters; as they are if None.

    Raises:
        ValueError: If data or checkpoint are missing, damaged, not of this problem, or not those
            of the run that is resumed; if there are too few images.
        ConnectionError: If a download fails.
        FloatingPointError: If training diverges.
    """
    problem = get_problem(settings.problem)
    device = device_from(settings.device)
    recipe = settings.recipe.applied_to(problem.recipe)
    if settings.checkpoint is not None or problem.published is not None:
        model, data = load_problem(
            problem, settings.source, settings.checkpoint, seed=settings.seed
        )
        check_data(data, settings, store)
    else:
        data = problem.data(settings.source, seed=settings.seed)
        check_data(data, settings, store)
        model = trained_model(problem, data, settings, store, console)
    return Trained(problem, model.eval().to(device, dtype), data, recipe.penalty)


def check_data(data: ProblemData, settings: ExperimentSettings, store: Store) -> None:
    """Refuse too little data, or data other than the run's; the first call stores what it is.

    Call it before any work. Images may be on disk, so all labels but only some images of each part
    are compared.

    Raises:
        ValueError: If there are too few images, or they are not those of the run that is resumed.
    """
    settings.check_counts(len(data.train), len(data.test))
    found = [
        {"part": part, "images": len(images), **_digests(images)}
        for part, images in (("train", data.train), ("test", data.test))
    ]
    if not store.matches("data", found):
        raise ValueError(
            f"{store.folder} holds results on other data than {settings.data or 'these'}; "
            "give the earlier data, or choose another --output"
        )


def _digests(images: Images) -> dict[str, str]:
    count = min(len(images), _COMPARED)
    x, _ = images.batch(torch.arange(count) * len(images) // max(count, 1))
    return {"labels": tensor_digest(images.labels), "some_images": tensor_digest(x)}


def trained_model(
    problem: TestProblem,
    data: ProblemData,
    settings: ExperimentSettings,
    store: Store,
    console: Console,
    name: str = "network",
    epochs: Collection[int] = (),
) -> nn.Module:
    """A network trained by the problem's recipe with the settings' changes; the stored one if any.

    Args:
        problem: The problem.
        data: Its data.
        settings: Changes of the recipe, seed and device.
        store: Where the network is stored; an interrupted training continues there.
        console: Where to print.
        name: Name under which it is stored.
        epochs: Epochs after which a checkpoint is stored too, as `<name>.epoch-<number>`.

    Returns:
        The network, in evaluation mode.

    Raises:
        FloatingPointError: If training diverges.
    """
    model = problem.initial_model(settings.seed)
    path = store.part(f"{name}.safetensors")
    if path.exists():
        load_checkpoint(model, path)
        return model.eval()
    state = store.part(f"{name}.state.safetensors")
    state.parent.mkdir(parents=True, exist_ok=True)

    def keep(epoch: int, network: nn.Module) -> None:
        if epoch in epochs:
            save_checkpoint(network, store.part(f"{name}.epoch-{epoch:04d}.safetensors"))

    history = train(
        model,
        data.train,
        settings.recipe.applied_to(problem.recipe),
        generator=torch.Generator().manual_seed(settings.seed),
        device=device_from(settings.device),
        progress=settings.progress,
        on_epoch=keep,
        state=state,
    )
    save_checkpoint(model, path)
    state.unlink()
    console.print(
        f"Trained {problem.name} ({sum(p.numel() for p in model.parameters()):,} parameters): "
        f"training accuracy {history[-1]['accuracy']:.3f}."
    )
    return model.eval()
