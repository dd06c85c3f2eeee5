"""Random: a seeded control that keeps a uniform sample of what was seen."""

from dataclasses import dataclass
from typing import Any

from array_api_compat import array_namespace

from kvevict.errors import PolicyError
from kvevict.policy import Policy, check_tokens
from kvevict.slots import Array, Slots

_PRIME = 2_147_483_647  # 2**31 - 1: products of two residues fit into int64


@dataclass(frozen=True)
class Random(Policy, name="random"):
    """Keep a uniform random sample of all tokens seen: the control for importance.

    Every position draws a fixed pseudo-random rank from the seed and the highest ranks stay, which
    is reservoir sampling: always a uniform sample, and the same for any chunk size.

    Args:
        budget: tokens kept in all.
        sinks: of these, first tokens that always stay.
        recent: of these, most recent tokens that always stay.
        seed: of the draw.
    """

    budget: int = 1024
    sinks: int = 0
    recent: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        check_tokens(self, "budget", minimum=1)
        check_tokens(self, "sinks")
        check_tokens(self, "recent")
        check_tokens(self, "seed")
        if self.sinks + self.recent > self.budget:
            raise PolicyError(
                f"Random.budget={self.budget} is below sinks + recent = "
                f"{self.sinks + self.recent}: give a larger budget"
            )

    @property
    def extents(self) -> tuple[int, int, int]:
        """The sinks, the recent, the sample."""
        return self.sinks, self.recent, self.budget - self.sinks - self.recent

    def importance(self, slots: Slots) -> Array:
        """Return the pseudo-random rank of every position."""
        xp = array_namespace(slots.position)
        state: Any = xp.astype(slots.position, xp.int64) + 1
        for salt in (48_271, 69_621 + self.seed % 1_000_003):  # two multiplicative rounds
            state = (state * salt + self.seed % _PRIME) % _PRIME
            state = (state * state) % _PRIME
        return xp.astype(state, xp.float64)
