"""Fallback: what is left when no summariser may be asked: cut old results, then the oldest atoms.

Source: gemini-cli (after one failure only truncation is used), Codex (head trimming), Cline
("recovery must not depend on another LLM call").
"""

from __future__ import annotations

from kvevict.agent.choosing import anchors, oldest_until, outputs
from kvevict.agent.history import History
from kvevict.agent.message_policy import Context, MessagePolicy, Stage
from kvevict.agent.verbs import drop, truncate

KEEP_CHARS = 2_000  # of an old result; OpenCode's and Cline's bound for tool text


class Fallback(MessagePolicy):
    """The stages that stand in for a policy whose summariser is not asked any more.

    Old results are cut as far as the trigger demands; whole atoms go only where the request would
    not fit, oldest first.

    Args:
        policy: the policy that it stands in for.
    """

    name = "fallback"

    def __init__(self, policy: MessagePolicy) -> None:
        object.__setattr__(self, "policy", policy)

    def stages(self) -> tuple[Stage, ...]:
        """Cut old results; where that is not enough drop the oldest atoms."""
        return (
            Stage("truncate_old_results", "truncate", self._cut),
            Stage("head_trimming", "drop", self._trim),
        )

    def _over(self, view: History, context: Context, goal: int) -> int:
        if context.moment.force == "overflow":  # the provider's word counts, not the estimate
            return max(1, context.estimate(view) // 4)
        return max(0, context.total(view) - goal + 1)

    def _cut(self, view: History, context: Context) -> History | None:
        policy: MessagePolicy = vars(self)["policy"]
        need = self._over(view, context, policy.trigger_tokens(context.limits))
        roots = anchors(view, last_group=True)
        old = [at for at in outputs(view, shell=True) if at[0] not in roots]
        return truncate(view, context, old, KEEP_CHARS, need) if need else None

    def _trim(self, view: History, context: Context) -> History | None:
        policy: MessagePolicy = vars(self)["policy"]
        need = self._over(view, context, policy.allowance(context.limits) + 1)
        roots = anchors(view, last_group=True)
        return drop(view, oldest_until(view, context, roots, need)) if need else None
