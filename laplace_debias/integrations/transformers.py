"""A callback for Hugging Face's Trainer: `pip install laplace-debias[transformers]`."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from laplace_debias.curvature.data.batch_forms import TARGETS
from laplace_debias.curvature.losses.likelihoods import Categorical, Likelihood, likelihood_from
from laplace_debias.integrations.end_of_training import (
    NO_VALIDATION_DATA,
    PosteriorAtEnd,
    check_only_one,
    copy_in_eval_mode,
)
from laplace_debias.laplace import Laplace
from laplace_debias.laplace.fitting.modes import check_mode
from laplace_debias.laplace.tuning.result import Tuning
from laplace_debias.system.checks import check_is, imports_of_extra
from laplace_debias.system.shown import warn

with imports_of_extra("transformers", "transformers", "accelerate"):
    from transformers import (
        Trainer,
        TrainerCallback,
        TrainerControl,
        TrainerState,
        TrainingArguments,
    )

__all__ = ["LaplaceCallback"]


class LaplaceCallback(TrainerCallback):
    """A callback that fits, tunes, logs and saves a posterior when training ends.

    The posterior is fitted to the weights at the end of training, which are the best weights if
    `load_best_model_at_end=True`. It is saved by `save_pretrained`, with a model card, in the
    folder of the checkpoint with these weights, or in `output_dir` if there is no such checkpoint.
    If it is tuned, metrics on the evaluation data are logged as `eval_laplace_nll` and others, and
    as `eval_network_nll` and others for the network without the posterior. The model stays in its
    mode (training or evaluation), because a copy that shares its parameters is used.

    Args:
        trainer: The trainer to which the callback is added.
        likelihood: The likelihood; see `Laplace`.
        mode: How much of the training data to use; see `Laplace.fit`.
        tune: Whether to tune and evaluate on the evaluation data.
        **options: Other arguments of `Laplace`, such as `fisher="mc"`.

    Attributes:
        laplace: The fitted posterior; None before the end of training.
        tuning: The result of `tune`, which explains the choice; None before the end of training, or
            without tuning.
        folder: The folder to which the posterior was saved; None before the end of training.

    Raises:
        TypeError: If `trainer` is not a `transformers.Trainer`.
        ValueError: If there is no evaluation data, or there are several sets; when training starts,
            if the likelihood does not match the `problem_type` of the model, or if the trainer has
            several of these callbacks. Also raises the errors of `Laplace`, and when training
            starts those of `Laplace.plan` for the first batches.

    Example:
        >>> from laplace_debias.integrations.transformers import LaplaceCallback
        >>> # trainer.add_callback(LaplaceCallback(trainer, "classification"))
        >>> # trainer.train()
    """

    laplace: Laplace | None = None
    tuning: Tuning | None = None
    folder: Path | None = None

    def __init__(
        self,
        trainer: Trainer,
        likelihood: str | Likelihood = "classification",
        *,
        mode: str = "full",
        tune: bool = True,
        **options: Any,
    ) -> None:
        check_is(trainer, "trainer", Trainer)
        check_mode(mode, None)
        datasets: Any = trainer.eval_dataset
        if tune and datasets is None:
            raise ValueError(NO_VALIDATION_DATA)
        if tune and isinstance(datasets, Mapping) and len(datasets) != 1:
            raise ValueError(
                f"The trainer has {len(datasets)} evaluation data sets, but a "
                "posterior can be tuned on only one. Pass one evaluation data set to the "
                "trainer, or use Laplace after the training."
            )
        label_names = trainer.args.label_names or ()
        if "batch" not in options and len(label_names) == 1 and label_names[0] not in TARGETS:
            options["batch"] = partial(_inputs_and_targets, target_name=label_names[0])
        self._trainer = trainer
        self._settings = PosteriorAtEnd(likelihood, mode, tune, options)
        self._unfitted_posterior()

    def __repr__(self) -> str:
        return self._settings.describe_callback(self.folder)

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Check the loss, the loaders and their first batches before training starts."""
        check_only_one(self._trainer.callback_handler.callbacks, LaplaceCallback)
        model: Any = self._trainer.model
        problem_type = getattr(getattr(model, "config", None), "problem_type", None)
        _check_problem_type(problem_type, self._settings.likelihood)
        if args.label_smoothing_factor and self._trainer.compute_loss_func is None:
            _warn_of_label_smoothing(args.label_smoothing_factor, self._settings.likelihood)
        self._settings.check(model, kwargs["train_dataloader"], self._evaluation_loader())

    def on_train_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Fit, tune, log and save the posterior."""
        trainer = self._trainer
        la = self._unfitted_posterior()
        train_loader = trainer.get_train_dataloader()
        result = self._settings.fit(la, train_loader, self._evaluation_loader())
        trainer.log({f"eval_{name}": number for name, number in result.numbers.items()})
        # Set the attributes before saving, because saving may fail after a long training.
        self.laplace = la
        self.tuning = result.tuning
        folder = _checkpoint_folder(args, state)
        la.save_pretrained(folder, evaluation=result.report)
        self.folder = folder

    def _evaluation_loader(self) -> Any:
        """Return a loader of the evaluation data, or None without tuning."""
        if not self._settings.tune:
            return None
        dataset: Any = self._trainer.eval_dataset
        if isinstance(dataset, Mapping):
            (dataset,) = dataset.values()
        return self._trainer.get_eval_dataloader(dataset)

    def _unfitted_posterior(self) -> Laplace:
        """Return an unfitted `Laplace` for the trainer's model."""
        model: Any = self._trainer.model
        return self._settings.unfitted(copy_in_eval_mode(model))


def _inputs_and_targets(batch: Mapping[str, Any], target_name: str) -> tuple[dict[str, Any], Any]:
    """Split a batch whose targets have a name from `TrainingArguments(label_names=...)`."""
    inputs = dict(batch)
    targets = inputs.pop(target_name, None)
    return inputs, targets


def _check_problem_type(problem_type: str | None, likelihood: str | Likelihood) -> None:
    """Reject the likelihood of a classification if the model's loss is a different one.

    Raises:
        ValueError: If the model's loss is for several labels or for a regression, but the
            likelihood is that of a classification.
    """
    matching = {"multi_label_classification": "multilabel", "regression": "regression"}
    if problem_type in matching and isinstance(likelihood_from(likelihood), Categorical):
        raise ValueError(
            f'The model has `problem_type="{problem_type}"`, but the likelihood of the posterior '
            f'is that of a classification. Pass "{matching[problem_type]}" to the callback.'
        )


def _warn_of_label_smoothing(smoothing: float, likelihood: str | Likelihood) -> None:
    """Warn if the likelihood does not have the label smoothing of the training loss."""
    likelihood = likelihood_from(likelihood)
    if isinstance(likelihood, Categorical) and likelihood.label_smoothing != smoothing:
        warn(
            f"The trainer's loss has `label_smoothing_factor={smoothing}`, but the likelihood of "
            f"the posterior has label smoothing {likelihood.label_smoothing}. Pass "
            f"Categorical(label_smoothing={smoothing}), from laplace_debias, to the callback."
        )


def _checkpoint_folder(args: TrainingArguments, state: TrainerState) -> Path:
    """Return the folder of the checkpoint that contains the weights at the end of training."""
    if args.load_best_model_at_end and state.best_model_checkpoint is not None:
        return Path(state.best_model_checkpoint)
    folder = Path(str(args.output_dir))
    last = folder / f"checkpoint-{state.global_step}"
    return last if last.is_dir() else folder
