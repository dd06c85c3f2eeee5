"""h2o at message granularity: the recent groups and, of the older, the most important."""

from dataclasses import dataclass

from kvevict.agent.message_policy import Limits
from kvevict.agent.policies._groups import GroupPolicy
from kvevict.policies import H2O


@dataclass(frozen=True)
class H2OGroups(GroupPolicy, name="h2o"):
    """Keep the recent groups and the heavy hitters among the older ones.

    Source: Zhang et al. 2023 (arXiv:2306.14048); `kvevict.policies.H2O` itself chooses. A group's
    score is the sum of its messages' (attention mass where the caller gives it, else a prior).

    Args:
        heavy: tokens kept for their score, or a share such as "20%" of what W - O leaves; None
            means half of it.
        recent: most recent tokens, or a share; None means the other half.
        sinks: first tokens that always stay.
    """

    heavy: int | str | None = None
    recent: int | str | None = None
    sinks: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        H2O(
            "50%" if self.heavy is None else self.heavy,
            "50%" if self.recent is None else self.recent,
            self.sinks,
        )

    def vocabulary(self, limits: Limits) -> H2O:
        """Return the token policy of the same name."""
        policy = H2O(
            "50%" if self.heavy is None else self.heavy,
            "50%" if self.recent is None else self.recent,
            self.sinks,
        )
        return policy.resolve(max(2, self.room(limits) - self.sinks))
