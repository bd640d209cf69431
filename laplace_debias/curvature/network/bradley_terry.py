"""Reward models, which are trained on preferences between two inputs."""

from typing import Any

from torch import Tensor, nn

from laplace_debias.system.checks import check_is


class BradleyTerry(nn.Module):
    r"""A reward model that returns the logit for preferring the first of two inputs.

    $$p(a \succ b) = \sigma(r(a) - r(b))$$

    `Laplace(BradleyTerry(model), "binary")` is fitted to batches `((a, b), y)` with labels y = 1
    where a was preferred. `la.predict((a, b))` is then the probability of a preference, and
    `la.functional(x)` is the mean and the variance of the reward of single inputs.

    Adding a constant to all rewards does not change any preference. Only the prior determines this
    constant, so the variance of a reward contains the prior variance of the constant. Differences
    of rewards do not contain this constant.

    Args:
        model: A network with one output, `[B, 1]` or `[B]`.

    Raises:
        TypeError: If `model` is not a module.

    Reference:
        Bradley, Terry. Rank analysis of incomplete block designs. Biometrika, 1952.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from laplace_debias import Laplace
        >>> from laplace_debias.curvature import BradleyTerry
        >>> rewards = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).eval()
        >>> a, b = torch.randn(2, 64, 4)
        >>> la = Laplace(BradleyTerry(rewards), "binary")
        >>> la = la.fit([((a, b), torch.randint(2, (64,)))])
        >>> la.predict((a[:5], b[:5])).probs.shape, la.functional(a[:5])[0].shape
        (torch.Size([5]), torch.Size([5, 1]))
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        check_is(model, "model", nn.Module)
        self.model = model

    def forward(self, first: Any, second: Any = None) -> Tensor:
        """Compute the reward of each input, or the difference of rewards for each pair."""
        rewards = self._rewards(first)
        return rewards if second is None else rewards - self._rewards(second)

    def _rewards(self, x: Any) -> Tensor:
        """Return the rewards of inputs, `[B, 1]`."""
        rewards = self.model(x)
        if rewards.ndim == 1:
            rewards = rewards.unsqueeze(1)
        if rewards.ndim != 2 or rewards.shape[1] != 1:
            raise ValueError(
                f"The reward model returned outputs of shape {tuple(rewards.shape)}. Use a network "
                "with one output per input, [B, 1]."
            )
        return rewards
