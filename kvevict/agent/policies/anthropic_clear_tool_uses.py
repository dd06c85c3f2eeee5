"""Anthropic's context editing `clear_tool_uses_20250919`."""

from dataclasses import dataclass
from typing import Literal

from kvevict.agent import edit
from kvevict.agent.choosing import choose, is_masked, outputs, tool_name
from kvevict.agent.history import Address, History
from kvevict.agent.memory import CLEARING_WARNING
from kvevict.agent.message_policy import Context, Limits, MessagePolicy, Stage, check_count
from kvevict.agent.verbs import append, emptied, mask
from kvevict.errors import PolicyError
from kvevict.policies import Window

PLACEHOLDER = "[Tool result cleared to save context]"


@dataclass(frozen=True)
class AnthropicClearToolUses(MessagePolicy, name="anthropic_clear_tool_uses"):
    """Clear the oldest tool results beyond the last `keep`; the calls stay.

    Source: Anthropic's context editing documentation and the types of the `anthropic` package
    2.14: `trigger` 100,000 input tokens or a number of tool uses, `keep` 3 tool uses,
    `clear_at_least` (none): the context changes only if at least that much can be removed,
    `exclude_tools`, `clear_tool_inputs` true or a list of tools. The placeholder's words are the
    server's own and not documented. Clearing breaks the prompt cache from the first cleared result
    on. Differs: the trigger reads the context as it stands after earlier clearing.

    Args:
        trigger: tokens of the request, or tool uses, from which results are cleared.
        keep: most recent tool uses whose results stay.
        clear_at_least: tokens that must be freed, at least or nothing; 0 means none.
        exclude_tools: tools whose results are never cleared.
        clear_tool_inputs: whether the inputs of cleared calls are emptied too, or of which tools.
        trigger_type: what `trigger` counts.
        memory: whether the model is warned to save to its memory before results are cleared.
    """

    trigger: int | str | None = 100_000
    keep: int = 3
    clear_at_least: int = 0
    exclude_tools: tuple[str, ...] = ()
    clear_tool_inputs: bool | tuple[str, ...] = False
    trigger_type: Literal["input_tokens", "tool_uses"] = "input_tokens"
    memory: bool = False

    markers = (CLEARING_WARNING[:40],)
    keeps_first = True
    keeps_last = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count(self, "keep")
        check_count(self, "clear_at_least")
        if self.trigger_type not in ("input_tokens", "tool_uses"):
            raise PolicyError(f"{self.name}.trigger_type={self.trigger_type!r}: unknown")
        if self.trigger_type == "tool_uses" and not isinstance(self.trigger, int):
            raise PolicyError(f"{self.name}.trigger={self.trigger!r}: give a number of tool uses")

    def stages(self) -> tuple[Stage, ...]:
        """The warning, where there is a memory; then the clearing."""
        least = max(self.min_gain, self.clear_at_least)
        clear = Stage("clear_tool_uses", "mask", self._clear, self._ready, least)
        warn = Stage("memory_warning", "warn", self._warn, self._unwarned, grows=True)
        return (clear, warn) if self.memory else (clear,)

    def threshold(self, limits: Limits) -> int:
        """Return 100,000, the documented default."""
        return 100_000

    def due(self, view: History, context: Context) -> bool:
        """Whether the trigger, in tokens or tool uses, is exceeded."""
        if context.moment.force:
            return True
        if self.trigger_type == "tool_uses":
            return len(view.find("tool_use")) > int(self.trigger or 0)
        return context.total(view) > self.trigger_tokens(context.limits)

    def _ready(self, view: History, context: Context) -> bool:
        return self.due(view, context) and (not self.memory or context.memory.get("warned", False))

    def _unwarned(self, view: History, context: Context) -> bool:
        if not self.due(view, context):
            return False
        return not context.memory.get("warned") and self._cleared(view, context) is not view

    def _warn(self, view: History, context: Context) -> History:
        context.memory["warned"] = True
        return append(view, edit.inserted(CLEARING_WARNING, note="warning"))

    def _clear(self, view: History, context: Context) -> History:
        new = self._cleared(view, context)
        if new is not view:
            context.memory["warned"] = False
        return new

    def _cleared(self, view: History, context: Context) -> History:
        found = outputs(view)
        kept = choose(Window(self.keep), [1] * len(found)) if self.keep else [False] * len(found)
        allowed = set(outputs(view, exempt=self.exclude_tools))
        old = [at for at, stays in zip(found, kept, strict=True) if not stays and at in allowed]
        new = mask(view, context, old, lambda block: PLACEHOLDER)
        return self._emptied(new, old) if self.clear_tool_inputs else new

    def _emptied(self, view: History, old: list[Address]) -> History:
        only = self.clear_tool_inputs
        tools = None if isinstance(only, bool) else {tool_name(name) for name in only}
        gone = {at for at in old if is_masked(view.block(at))}
        calls = [
            call
            for call, result in view.pairs.results.items()
            if result in gone
            and view.block(call).text not in ("", "{}")
            and not view.block(call).protected
            and (tools is None or tool_name(view.block(call).tool) in tools)
        ]
        return emptied(view, calls)
