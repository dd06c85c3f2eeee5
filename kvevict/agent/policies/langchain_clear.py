"""LangChain's ClearToolUsesEdit: like Anthropic's, but clear_at_least means "stop after"."""

from dataclasses import dataclass

from kvevict.agent.choosing import choose, is_masked, outputs
from kvevict.agent.history import Address, History
from kvevict.agent.message_policy import Context, Limits, MessagePolicy, Stage, check_count
from kvevict.agent.verbs import emptied, mask
from kvevict.policies import Window

PLACEHOLDER = "[cleared]"


@dataclass(frozen=True)
class LangChainClear(MessagePolicy, name="langchain_clear"):
    """Clear the oldest tool results but the last `keep`, up to a number of tokens.

    Source: langchain 1.5.2 `ClearToolUsesEdit` (READ and RAN): trigger 100,000 estimated tokens,
    keep 3, placeholder `[cleared]`; `clear_at_least` stops the clearing once that much is freed,
    and clears all the same when it is out of reach, unlike Anthropic's parameter of that name.

    Args:
        trigger: tokens of the request.
        keep: most recent results that stay.
        clear_at_least: tokens after which clearing stops; 0 clears all but `keep`.
        exclude_tools: tools whose results are never cleared.
        clear_tool_inputs: whether the inputs of cleared calls are emptied too.
    """

    trigger: int | str | None = 100_000
    keep: int = 3
    clear_at_least: int = 0
    exclude_tools: tuple[str, ...] = ()
    clear_tool_inputs: bool = False

    keeps_first = True
    keeps_last = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count(self, "keep")
        check_count(self, "clear_at_least")

    def threshold(self, limits: Limits) -> int:
        """Return 100,000, the default."""
        return 100_000

    def stages(self) -> tuple[Stage, ...]:
        """One stage."""
        return (Stage("clear_tool_uses", "mask", self._clear, self._over, self.min_gain),)

    def _over(self, view: History, context: Context) -> bool:
        return bool(context.moment.force) or context.total(view) > self.trigger_tokens(
            context.limits
        )

    def _clear(self, view: History, context: Context) -> History:
        found = outputs(view)
        kept = choose(Window(self.keep), [1] * len(found)) if self.keep else [False] * len(found)
        allowed = set(outputs(view, exempt=self.exclude_tools))
        old: list[Address] = [
            at for at, stays in zip(found, kept, strict=True) if not stays and at in allowed
        ]
        need = self.clear_at_least or None
        new = mask(view, context, old, lambda block: PLACEHOLDER, need)
        if not self.clear_tool_inputs:
            return new
        gone = {at for at in old if is_masked(new.block(at))}
        calls = [
            call
            for call, result in new.pairs.results.items()
            if result in gone and new.block(call).text not in ("", "{}")
        ]
        return emptied(new, calls)
