"""window at message granularity: the most recent groups (and the roots) only."""

from dataclasses import dataclass

from kvevict.agent.message_policy import Limits, check_count
from kvevict.agent.policies._groups import GroupPolicy
from kvevict.policies import Window


@dataclass(frozen=True)
class WindowGroups(GroupPolicy, name="window"):
    """Keep the most recent groups; the roots stay, since no request is valid without them.

    Source: the window baseline of Xiao et al. 2023; `kvevict.policies.Window` itself chooses.

    Args:
        window: tokens kept; None means what W - O leaves.
    """

    window: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window is not None:
            check_count(self, "window", 1)

    def vocabulary(self, limits: Limits) -> Window:
        """Return the token policy of the same name."""
        return Window(self.room(limits) if self.window is None else self.window)
