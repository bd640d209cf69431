"""Settings of the debiasing study."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from laplace_debias.experiments.debiasing.schemes import USUAL_FOLDS, Plan
from laplace_debias.experiments.shared.checks import check_at_least, check_prior_precisions
from laplace_debias.experiments.shared.settings import ExperimentSettings


@dataclass(frozen=True, kw_only=True)
class DebiasingSettings(ExperimentSettings):
    """What is studied, and on how much data.

    Attributes:
        batch_size: b: every method sees 2b examples.
        draws: How many times these are drawn. No example is drawn twice or is in the reference.
            A resumed run takes more.
        ekfac_draws: In how many of the draws EKFAC is fitted too.
        groups: Number of groups of the 2b examples; the largest number of folds.
        folds: Numbers of folds to cross-fit with, divisors of `groups`.
        stratified: Whether a draw's examples are dealt to the groups in the order of their losses,
            so that all folds, and both halves, hold equally many hard ones.
        further_batches: How many further magnitude batches of b examples there are.
        average_batch_size: Examples in a batch of the running averages, which see the further
            batches too.
        average_decays: Decays of the running averages, one average each.
        full_examples: How many training examples, chosen at random, stand for full-batch.
        ekfac_full_examples: On how many of these EKFAC's full-batch magnitudes are measured.
        test_examples: How many test images are predicted.
        prior_precisions: The grid of δ, ascending.
        fisher: How the curvature's columns are found.
        params: Which parameters are Bayesian.
        eval_batch_size: Images per batch.

    Raises:
        ValueError: If a number is out of range or does not divide another as it must.
    """

    output: Path = Path("results/debiasing")
    batch_size: int = 64
    draws: int = 8
    ekfac_draws: int = 3
    groups: int = 32
    folds: tuple[int, ...] = (2, 4, 8, 16, 32)
    stratified: bool = False
    further_batches: int = 3
    average_batch_size: int = 16
    average_decays: tuple[float, ...] = (0.5, 0.9)
    full_examples: int = 4000
    ekfac_full_examples: int = 1000
    test_examples: int = 100
    prior_precisions: tuple[float, ...] = (0.1, 0.316, 1.0, 3.16, 10.0)
    fisher: Literal["exact", "mc", "empirical"] = "exact"
    params: Literal["all", "weights", "last_layer"] = "weights"
    eval_batch_size: int = 50

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(self, 1, "batch_size", "draws", "full_examples", "ekfac_full_examples")
        check_at_least(self, 1, "test_examples", "further_batches", "eval_batch_size")
        if not 0 <= self.ekfac_draws <= self.draws:
            raise ValueError(f"ekfac_draws is {self.ekfac_draws}; expected 0 … {self.draws}")
        check_at_least(self, 0, "seed")
        if self.groups < 4 or self.groups % 4 or 2 * self.batch_size % self.groups:
            raise ValueError(
                f"groups is {self.groups}; expected a multiple of 4 that divides 2 batch_size = "
                f"{2 * self.batch_size}"
            )
        wrong = [folds for folds in self.folds if folds < 2 or self.groups % folds]
        if wrong or min(USUAL_FOLDS, self.groups) not in self.folds:
            raise ValueError(
                f"folds is {self.folds}; expected divisors of groups = {self.groups}, at least "
                f"2, with {min(USUAL_FOLDS, self.groups)} among them"
            )
        size = self.average_batch_size
        if size < 1 or size % (2 * self.batch_size // self.groups) or self.batch_size % size:
            raise ValueError(
                f"average_batch_size is {size}; expected a divisor of batch_size = "
                f"{self.batch_size} and a multiple of a group's "
                f"{2 * self.batch_size // self.groups} examples"
            )
        if not all(0 < decay < 1 for decay in self.average_decays):
            raise ValueError(
                f"average_decays is {self.average_decays}; expected numbers between 0 and 1"
            )
        check_prior_precisions(self.prior_precisions)

    def check_counts(self, num_train: int, num_test: int) -> None:
        """Refuse to ask for more images than there are; see `ExperimentSettings`."""
        a_draw = (2 + self.further_batches) * self.batch_size
        needed = self.full_examples + self.draws * a_draw
        if needed > num_train or self.test_examples > num_test:
            raise ValueError(
                f"the study takes {needed} training and {self.test_examples} test images; there "
                f"are {num_train} and {num_test}: lower draws, full_examples or test_examples"
            )

    @property
    def plan(self) -> Plan:
        """How a draw's examples are divided."""
        return Plan(
            batch_size=self.batch_size,
            groups=self.groups,
            folds=self.folds,
            further_batches=self.further_batches,
            average_batch_size=self.average_batch_size,
            average_decays=self.average_decays,
        )
