"""random at message granularity: a seeded sample of groups, the control for importance."""

from dataclasses import dataclass

from kvevict.agent.message_policy import Limits, check_count
from kvevict.agent.policies._groups import GroupPolicy
from kvevict.policies import Random
from kvevict.policy import Policy


@dataclass(frozen=True)
class RandomGroups(GroupPolicy, name="random"):
    """Keep a uniform random sample of groups: the control for importance.

    `kvevict.policies.Random` itself chooses: every group draws a fixed rank from its place in the
    full history, so the choice does not change as the history grows.

    Args:
        budget: tokens kept in all; None means what W - O leaves.
        sinks: of these, first tokens that always stay.
        recent: of these, most recent tokens that always stay.
        seed: of the draw.
    """

    budget: int | None = None
    sinks: int = 0
    recent: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("sinks", "recent", "seed"):
            check_count(self, name)
        if self.budget is not None:
            check_count(self, "budget", 1)
            Random(self.budget, self.sinks, self.recent, self.seed)

    def vocabulary(self, limits: Limits) -> Policy:
        """Return the token policy of the same name."""
        room = max(self.room(limits), self.sinks + self.recent, 1)
        budget = room if self.budget is None else self.budget
        return Random(budget, self.sinks, self.recent, self.seed)
