"""OpenCode's prune: old tool outputs are hidden, not deleted."""

from dataclasses import dataclass

from kvevict.agent.choosing import block_size
from kvevict.agent.history import History
from kvevict.agent.message_policy import Context, MessagePolicy, Stage, check_count
from kvevict.agent.policies._opencode import prunable
from kvevict.agent.verbs import mask


@dataclass(frozen=True)
class OpenCodePrune(MessagePolicy, name="opencode_prune"):
    """Hide tool outputs beyond the newest 40,000 tokens, if more than 20,000 can be hidden.

    Source: sst/opencode@31e22f65, `session/compaction.ts` (READ): PRUNE_PROTECT 40,000,
    PRUNE_MINIMUM 20,000 (more than, not at least), the last two user turns, `skill` exempt, the
    walk stops at a summary or a hidden part; a hidden part gets a timestamp and renders as
    `[Old tool result content cleared]`, its data stays. Here the timestamp is the number of
    messages seen (`manager.state`), and `manager.restore()` shows hidden parts again. In OpenCode
    prune is opt-in and runs after a turn; here choosing the policy is the opt-in.

    Args:
        protect: tokens of the newest tool outputs that stay.
        minimum: tokens that hiding must exceed.
        turns: last user turns that stay whole.
        exempt: tools whose outputs are never hidden.
    """

    protect: int = 40_000
    minimum: int = 20_000
    turns: int = 2
    exempt: tuple[str, ...] = ("skill",)

    keeps_first = True
    keeps_last = True

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("protect", "minimum", "turns"):
            check_count(self, name)

    def stages(self) -> tuple[Stage, ...]:
        """One stage."""
        return (Stage("prune", "mask", self._prune, self.due, self.min_gain),)

    def _prune(self, view: History, context: Context) -> History | None:
        at = prunable(view, context, self.protect, self.turns, self.exempt)
        if sum(block_size(view, place, context) for place in at) <= self.minimum:
            return None
        return mask(view, context, at)
