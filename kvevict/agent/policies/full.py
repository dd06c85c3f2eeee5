"""full at message granularity: nothing is ever evicted."""

from dataclasses import dataclass

from kvevict.agent.message_policy import Limits
from kvevict.agent.policies._groups import GroupPolicy
from kvevict.policies import Full


@dataclass(frozen=True)
class FullGroups(GroupPolicy, name="full"):
    """Keep every message: the control that every other policy is measured against."""

    def vocabulary(self, limits: Limits) -> Full:
        """Return the token policy of the same name."""
        return Full()
