"""Full: keep everything; the control that every other policy is measured against."""

from dataclasses import dataclass

from kvevict.policy import Policy


@dataclass(frozen=True)
class Full(Policy, name="full"):
    """Keep every token: the unbounded cache, the control of every comparison."""

    @property
    def extents(self) -> None:
        """Nothing is ever evicted."""
        return
