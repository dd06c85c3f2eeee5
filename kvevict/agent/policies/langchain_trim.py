"""LangChain's trim_messages: the longest suffix (or prefix) that fits."""

from dataclasses import dataclass
from typing import Literal

from kvevict.agent.choosing import choose, real_users
from kvevict.agent.history import History
from kvevict.agent.message_policy import Context, Limits, MessagePolicy, Stage, check_count
from kvevict.agent.verbs import drop
from kvevict.errors import PolicyError
from kvevict.policies import StreamingLLM, Window


@dataclass(frozen=True)
class LangChainTrim(MessagePolicy, name="langchain_trim"):
    """Keep the longest run of messages from one end that fits into max_tokens.

    Source: langchain-core 1.8.3 `trim_messages` (RAN). Differs where that breaks requests
    (langchain 33265, 38352): the run starts at a whole atom, the system message and the last user
    message always stay (I1, I7), and a floor above the budget is an error.

    Args:
        max_tokens: tokens of the request; None means W - O (LangChain demands a number).
        strategy: "last" keeps the newest, "first" the oldest.
        start_on: "human" moves the start of a "last" run on to a user message where one is left;
            "any" does not.
    """

    max_tokens: int | None = None
    strategy: Literal["last", "first"] = "last"
    start_on: Literal["any", "human"] = "any"

    keeps_last = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_tokens is not None:
            check_count(self, "max_tokens", 1)
        if self.strategy not in ("last", "first") or self.start_on not in ("any", "human"):
            raise PolicyError(f"langchain_trim: strategy={self.strategy}, start_on={self.start_on}")

    def threshold(self, limits: Limits) -> int:
        """Return max_tokens."""
        return limits.usable if self.max_tokens is None else self.max_tokens

    def allowance(self, limits: Limits) -> int:
        """Return max_tokens."""
        return self.threshold(limits)

    def stages(self) -> tuple[Stage, ...]:
        """One stage."""
        return (Stage("trim", "drop", self._trim, self._over, self.min_gain),)

    def _over(self, view: History, context: Context) -> bool:
        return bool(context.moment.force) or context.total(view) > self.trigger_tokens(
            context.limits
        )

    def _trim(self, view: History, context: Context) -> History:
        roots = self.roots(view)
        sizes = context.sizes(view)
        protected = [i in roots for i in range(len(view))]
        room = max(1, self.trigger_tokens(context.limits) - context.limits.overhead)
        groups = [int(g) for g in view.group_index]
        policy = Window(room) if self.strategy == "last" else StreamingLLM(max(0, room - 1), 1)
        kept = choose(policy, sizes, protected, group=groups)
        if self.strategy == "last" and self.start_on == "human":
            users = set(real_users(view))
            run = [i for i, stays in enumerate(kept) if stays and i not in roots]
            first = next((i for i in range(run[0], len(view)) if i in users), None) if run else None
            if first is not None:
                kept = [stays and (i >= first or i in roots) for i, stays in enumerate(kept)]
        return drop(view, [i for i, stays in enumerate(kept) if not stays])
