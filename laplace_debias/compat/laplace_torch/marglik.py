"""Training with the marginal likelihood under the names of laplace-torch."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from laplace_debias.compat.laplace_torch.absent import explains_absent_arguments
from laplace_debias.compat.laplace_torch.arguments import (
    CURVATURES_BY_NAME,
    LIKELIHOODS_BY_NAME,
    batch_hook,
    check_applies,
    check_has_layers,
    checked_name,
    fisher_of_backend,
    scalar_or_vector,
)
from laplace_debias.compat.laplace_torch.posteriors import Laplace
from laplace_debias.curvature.data.batches import Batches
from laplace_debias.training.marginal_likelihood import marginal_likelihood_training

HESSIAN_STRUCTURES = ("kron", "full", "diag")
PRIOR_STRUCTURES = {"scalar": None, "layerwise": "block"}


@explains_absent_arguments
def marglik_training(
    model: nn.Module,
    train_loader: Batches,
    likelihood: str = "classification",
    hessian_structure: str = "kron",
    backend: type | str | None = None,
    optimizer_cls: Callable[..., Optimizer] = torch.optim.Adam,
    optimizer_kwargs: Mapping[str, Any] | None = None,
    scheduler_cls: Callable[..., LRScheduler] | None = None,
    scheduler_kwargs: Mapping[str, Any] | None = None,
    n_epochs: int = 300,
    lr_hyp: float = 0.1,
    prior_structure: str = "layerwise",
    n_epochs_burnin: int = 0,
    n_hypersteps: int = 10,
    marglik_frequency: int = 1,
    prior_prec_init: float | Tensor = 1.0,
    sigma_noise_init: float | Tensor = 1.0,
    temperature: float = 1.0,
    fix_sigma_noise: bool = False,
    enable_backprop: bool = False,
    dict_key_x: str | None = None,
    dict_key_y: str | None = None,
) -> tuple[Laplace, nn.Module, list[float], list[float]]:
    """Train a network, and learn its prior precision and noise from the marginal likelihood.

    This is `laplace_debias.training.marginal_likelihood_training` with the arguments of
    laplace-torch.

    Args:
        model: The network, which is trained in place and ends in eval mode.
        train_loader: Batches `(x, y)`.
        likelihood: `"classification"` or `"regression"`.
        hessian_structure: `"kron"`, `"full"` or `"diag"`.
        backend: A backend of laplace-torch, or its name; see `Laplace`.
        optimizer_cls: The optimizer class for the weights.
        optimizer_kwargs: Options of the optimizer. `weight_decay` is set to 0, because the prior
            replaces it.
        scheduler_cls: A learning-rate scheduler class. The scheduler steps after each batch.
        scheduler_kwargs: Options of `scheduler_cls`.
        n_epochs: The number of epochs.
        lr_hyp: The learning rate for prior precision and noise.
        prior_structure: `"layerwise"` for one prior precision per block, or `"scalar"`.
        n_epochs_burnin: The epoch with the first fit, counted from 1. 0 also means the first epoch.
        n_hypersteps: The number of steps on prior precision and noise after each fit.
        marglik_frequency: The number of epochs between two fits.
        prior_prec_init: The prior precision at the start, divided by the temperature.
        sigma_noise_init: The noise of a regression if `fix_sigma_noise` is true; must otherwise be
            1.
        temperature: T.
        fix_sigma_noise: Whether to keep the noise of a regression at `sigma_noise_init`.
        enable_backprop: Whether gradients of predictions flow back to the inputs.
        dict_key_x: The name of an entry of each mapping in the data; see `Laplace`.
        dict_key_y: The name of the targets in each mapping; see `Laplace`.

    Returns:
        The posterior with the largest marginal likelihood; the model with the corresponding
        weights; the negative log marginal likelihoods; and the losses. Both lists have one entry
        per fit.

    Raises:
        NotImplementedError: If `prior_structure` is `"diag"`, or `"layerwise"` with
            `hessian_structure="full"`, or if the noise is optimised but does not start at 1.
        ValueError: If a name is unknown, if `scheduler_kwargs` is passed without `scheduler_cls`,
            or if a noise is passed for a classification.
    """
    likelihood = checked_name("likelihood", likelihood, ("classification", "regression"))
    hessian_structure = checked_name("hessian_structure", hessian_structure, HESSIAN_STRUCTURES)
    prior_structure = checked_name("prior_structure", prior_structure, (*PRIOR_STRUCTURES, "diag"))
    if prior_structure == "diag":
        raise NotImplementedError(
            '`prior_structure="diag"` is not supported in training. Use '
            '`prior_structure="layerwise"` or `"scalar"`.'
        )
    if prior_structure == "layerwise":
        check_has_layers(hessian_structure)
    sigma_noise_init = scalar_or_vector(sigma_noise_init)
    is_one = bool((torch.as_tensor(sigma_noise_init) == 1).all())
    if not is_one:
        check_applies("sigma_noise_init", "likelihood", "regression", likelihood)
    if fix_sigma_noise:
        check_applies("fix_sigma_noise", "likelihood", "regression", likelihood)
    if scheduler_kwargs and scheduler_cls is None:
        raise ValueError(
            f"`scheduler_kwargs` is {dict(scheduler_kwargs)}, but there is no scheduler. Pass "
            "`scheduler_cls=`, or remove `scheduler_kwargs=`."
        )
    if not fix_sigma_noise and not is_one:
        raise NotImplementedError(
            f"`sigma_noise_init` is {sigma_noise_init}, but when the noise is "
            "optimised, it always starts from 1. Remove `sigma_noise_init=`, or pass "
            "`fix_sigma_noise=True`."
        )
    options = dict(optimizer_kwargs or {})
    if "weight_decay" in options:
        options["weight_decay"] = 0.0
    optimizer = optimizer_cls(model.parameters(), **options)
    scheduler = None
    if scheduler_cls is not None:
        scheduler = scheduler_cls(optimizer, **(scheduler_kwargs or {}))
    run = marginal_likelihood_training(
        model,
        train_loader,
        LIKELIHOODS_BY_NAME[likelihood],
        optimizer=optimizer,
        epochs=n_epochs,
        scheduler=scheduler,
        every=marglik_frequency,
        burn_in=max(0, n_epochs_burnin - 1),
        per=PRIOR_STRUCTURES[prior_structure],
        steps=n_hypersteps,
        learning_rate=lr_hyp,
        prior_precision=temperature * float(prior_prec_init),
        sigma=sigma_noise_init if fix_sigma_noise else None,
        temperature=temperature,
        curvature=CURVATURES_BY_NAME[hessian_structure],
        fisher=fisher_of_backend(backend, {}),
        batch=batch_hook(likelihood, dict_key_x, dict_key_y),
    )
    la = Laplace(
        model,
        likelihood,
        "all",
        hessian_structure,
        temperature=temperature,
        enable_backprop=enable_backprop,
        backend=backend,
        dict_key_x=dict_key_x,
        dict_key_y=dict_key_y,
    )
    la.posterior = run.laplace
    margliks = [-float(row["log_marginal_likelihood"]) for row in run.history]
    losses = [float(row["loss"]) for row in run.history]
    return la, model, margliks, losses
