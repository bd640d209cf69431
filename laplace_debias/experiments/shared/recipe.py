"""Changes of a test problem's training recipe, as settings."""

from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from laplace_debias.problems import Recipe


@dataclass(frozen=True, kw_only=True)
class RecipeChanges:
    """What differs from a problem's recipe; None means no difference.

    A schedule given here, either `epochs` and `learning_rate` or `cycles`, replaces a schedule of
    the other kind.

    Attributes:
        batch_size: Examples per step.
        epochs: Passes over the data.
        learning_rate: The initial learning rate.
        milestones: Epochs after which the rate is multiplied by `decay`.
        decay: That factor.
        cycles: (epochs, peak learning rate) of each one-cycle schedule.
        optimizer: The optimiser.
        momentum: Momentum of SGD; β₁ of Adam.
        nesterov: Whether SGD takes Nesterov's momentum.
        weight_decay: Of weights; biases have none.
        clip_norm: Largest norm of the whole gradient; `inf` for no limit.
        flips: Whether images are mirrored left to right at random.
        crops: Whether images are cropped at random.
        bfloat16: Whether the network runs under bfloat16 autocast.
    """

    batch_size: int | None = None
    epochs: int | None = None
    learning_rate: float | None = None
    milestones: tuple[int, ...] | None = None
    decay: float | None = None
    cycles: tuple[tuple[int, float], ...] | None = None
    optimizer: Literal["sgd", "adam", "nadamw"] | None = None
    momentum: float | None = None
    nesterov: bool | None = None
    weight_decay: float | None = None
    clip_norm: float | None = None
    flips: bool | None = None
    crops: bool | None = None
    bfloat16: bool | None = None

    def applied_to(self, recipe: Recipe) -> Recipe:
        """The recipe with these changes.

        Raises:
            ValueError: If the result makes no sense.
        """
        changes: dict[str, Any] = {
            entry.name: getattr(self, entry.name)
            for entry in fields(self)
            if getattr(self, entry.name) is not None
        }
        if self.cycles:
            changes = {"epochs": None, "learning_rate": None, "milestones": (), **changes}
        elif recipe.cycles and (self.epochs is not None or self.learning_rate is not None):
            changes = {"cycles": (), **changes}
        return replace(recipe, **changes)
