"""Fallback: what is left when no summariser may be asked: cut old results, then the oldest atoms.

Source: gemini-cli (after one failure only truncation is used), Codex (head trimming), Cline
("recovery must not depend on another LLM call").
"""

from __future__ import annotations

from kvevict.agent.history import History
from kvevict.agent.message_policy import Context, MessagePolicy, Stage
from kvevict.agent.verbs import anchors, drop, oldest_until, outputs, truncate

KEEP_CHARS = 2_000  # of an old result; OpenCode's and Cline's bound for tool text


def fallback_stages(policy: MessagePolicy) -> tuple[Stage, ...]:
    """Return the stages that stand in for a policy's summary.

    Old results are cut as far as the trigger demands; whole atoms go only where the request would
    not fit, oldest first.
    """

    def need(view: History, context: Context) -> int:
        if context.moment.force == "overflow":  # the provider's word counts, not the estimate
            return max(1, context.estimate(view) // 4)
        goal = policy.trigger_tokens(context.limits)
        return max(0, round((context.total(view) - goal + 1) / context.ratio))

    def cut(view: History, context: Context) -> History | None:
        roots = anchors(view, last_group=True)
        old = [at for at in outputs(view, shell=True) if at[0] not in roots]
        wanted = need(view, context)
        return truncate(view, context, old, KEEP_CHARS, wanted) if wanted else None

    def trim(view: History, context: Context) -> History | None:
        roots = anchors(view, last_group=True)
        over = round((context.total(view) - policy.allowance(context.limits)) / context.ratio)
        over = need(view, context) if context.moment.force == "overflow" else over
        return drop(view, oldest_until(view, context, roots, over)) if over > 0 else None

    return (Stage("truncate_old_results", "truncate", cut), Stage("head_trimming", "drop", trim))
