"""TOVA: keep what the last query attends to."""

from dataclasses import dataclass
from typing import Any

from kvevict.errors import PolicyError
from kvevict.policy import Policy, Scope, check_scope, check_tokens


@dataclass(frozen=True)
class TOVA(Policy, name="tova"):
    """Keep the tokens that the newest query attends to most.

    Source: Oren et al. 2024 (arXiv:2401.06104), section 4: after each token the one of the lowest
    attention leaves; no part is protected for being recent. Differs by default: per KV head (summed
    over its query group); `scope="layer"` is the paper's one set per layer, by the mean over heads.

    Args:
        budget: tokens kept.
        sinks: of these, first tokens that always stay (departure; the paper has none).
        scope: "head" (departure) or "layer".
    """

    budget: int = 1024
    sinks: int = 0
    scope: Scope = "head"

    scores = "last"

    def __post_init__(self) -> None:
        check_tokens(self, "budget", minimum=1)
        check_tokens(self, "sinks")
        check_scope(self)
        if self.sinks >= self.budget:
            raise PolicyError(
                f"TOVA.sinks={self.sinks} leaves nothing of budget={self.budget}: give fewer sinks"
            )

    @property
    def extents(self) -> tuple[int, int, int]:
        """The sinks, no recent part, the rest by attention."""
        return self.sinks, 0, self.budget - self.sinks

    def departures(self) -> dict[str, Any]:
        """Return the sinks where they are in use, and that heads choose alone."""
        used: dict[str, Any] = {"sinks": self.sinks} if self.sinks else {}
        return used if self.scope == "layer" else {**used, "scope": self.scope}
