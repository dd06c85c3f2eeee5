"""votes: which queries of a forward count in the scores, and by how much."""

import torch
from torch import Tensor

from kvevict.policy import Policy


def first_scored(policy: Policy, length: int) -> int:
    """Return the first query of a forward whose probabilities count."""
    if policy.scores == "last":
        return length - 1
    if policy.scores == "window":
        return max(0, length - policy.score_window)
    return 0


def by_query(policy: Policy, length: int, device: torch.device) -> Tensor | None:
    """Return by how much each query of a forward counts, float32 `[Q]`; None where all do by 1."""
    first = first_scored(policy, length)
    if not first and policy.decay_factor == 1.0:
        return None
    later = torch.arange(length - 1, -1, -1, dtype=torch.float32, device=device)
    weight = torch.pow(policy.decay_factor, later)
    weight[:first] = 0.0
    return weight


def decayed(policy: Policy, lse: Tensor, later: Tensor) -> Tensor:
    """Fold decay ** (tokens that come later) into the log-sum-exp that scores are read from."""
    if policy.decay_factor == 1.0:
        return lse
    return lse - later * torch.log(torch.tensor(policy.decay_factor, dtype=torch.float64)).item()
