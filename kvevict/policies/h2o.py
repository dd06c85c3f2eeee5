"""H2O: heavy hitters, the tokens with the largest accumulated attention."""

import math
from dataclasses import dataclass
from typing import Any, Literal

from array_api_compat import array_namespace

from kvevict.errors import PolicyError
from kvevict.policy import Policy, Scope, check_scope, check_tokens, is_share
from kvevict.slots import Array, Slots


@dataclass(frozen=True)
class H2O(Policy, name="h2o"):
    """Keep the recent tokens and, of the older, those with the largest accumulated attention.

    Source: Zhang et al. 2023 (arXiv:2306.14048) as in the authors' real-drop code: attend,
    accumulate every query's probabilities (a token's own included), then evict. Differs from
    Algorithm 1 of the paper as that code does: scores count from the first token on and only
    tokens older than the recent part compete. Differs from that code: scores are per row and KV
    head (summed over the query group), so batches and grouped queries work.

    Args:
        heavy: tokens kept for their score, or a share of the prompt such as "20%".
        recent: most recent tokens kept, or a share of the prompt.
        sinks: first tokens that always stay (departure; the authors' code has none).
        normalize: "age" divides a score by the queries that could see the token (departure).
        decay: factor on old scores per new token, 1.0 for the authors' plain sums (departure).
        scope: "head", or "layer" for one set for all heads of a layer (departure).
    """

    heavy: int | str = 512
    recent: int | str = 512
    sinks: int = 0
    normalize: Literal["none", "age"] = "none"
    decay: float = 1.0
    scope: Scope = "head"

    scores = "sum"

    def __post_init__(self) -> None:
        check_tokens(self, "heavy", share=True)
        check_tokens(self, "recent", share=True)
        check_tokens(self, "sinks")
        check_scope(self)
        if self.normalize not in ("none", "age"):
            raise PolicyError(f'H2O.normalize={self.normalize!r}: give "none" or "age"')
        decay = self.decay
        if isinstance(decay, bool) or not isinstance(decay, int | float) or not 0 < decay <= 1:
            raise PolicyError(f"H2O.decay={decay!r}: give a number above 0 and up to 1")
        shares = [v for v in (self.heavy, self.recent) if is_share(v)]
        total = sum(float(str(v).strip()[:-1]) for v in shares)
        if total > 100:
            raise PolicyError(f"H2O heavy={self.heavy}, recent={self.recent}: more than 100%")
        if not shares and not self.heavy + self.recent + self.sinks:  # type: ignore[operator]
            raise PolicyError("H2O heavy=0, recent=0, sinks=0 keeps nothing: give a budget above 0")

    @property
    def extents(self) -> tuple[int, int, int]:
        """The sinks, the recent, the heavy hitters."""
        if self.has_shares:
            raise PolicyError(
                f"{self}: a share needs the prompt's length; use patch() and generate(), "
                "policy.resolve(prompt_length), or give tokens"
            )
        return self.sinks, int(self.recent), int(self.heavy)

    @property
    def decay_factor(self) -> float:  # type: ignore[override]
        """The factor on old scores per new token."""
        return float(self.decay)

    def importance(self, slots: Slots) -> Array:
        """Return accumulated attention, divided by exposure when normalised by age."""
        if self.normalize == "none":
            return slots.score
        xp = array_namespace(slots.position)
        newest = xp.max(slots.position, axis=-1, keepdims=True)
        exposure = xp.astype(newest + 1 - slots.position, xp.float32)
        return slots.score / xp.where(exposure > 0, exposure, xp.full_like(exposure, math.inf))

    def departures(self) -> dict[str, Any]:
        """Return sinks, age normalisation, decay and the layer's one set where they are in use."""
        plain = {"sinks": 0, "normalize": "none", "decay": 1.0, "scope": "head"}
        used = {name: getattr(self, name) for name in plain}
        return {k: v for k, v in used.items() if v != plain[k]}
