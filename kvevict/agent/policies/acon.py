"""ACON: condense observations and history by an optimised guideline."""

from dataclasses import dataclass
from pathlib import Path

from kvevict.agent import edit
from kvevict.agent.acon import DEFAULT_GUIDELINE, Guidelines
from kvevict.agent.choosing import block_size, choose, is_masked, others, outputs, steps, whole
from kvevict.agent.history import Address, History
from kvevict.agent.message_policy import Context, Limits, MessagePolicy, Stage, check_count
from kvevict.agent.summarizers import SummaryInput
from kvevict.agent.verbs import LANGUAGE, ask_summary, compact
from kvevict.errors import PolicyError
from kvevict.policies import Window

PREFIX = "[Condensed history]\n"
CONDENSED = "[Condensed observation] "
HEADINGS = ("REASONING", "VARIABLES", "PROGRESS", "NEXT STEPS")


@dataclass(frozen=True)
class Acon(MessagePolicy, name="acon"):
    """Condense long observations one by one and a long history as a whole, by a guideline.

    Source: ACON (arXiv:2510.00615): history above a threshold, observation above a threshold, an
    LLM with a guideline that `kvevict.agent.acon.optimise` revises from paired runs. The
    thresholds of 4,096 and 1,024 tokens are from memory of the paper's main setting and were not
    checked.

    Args:
        history: tokens of the request above which the history is condensed.
        observation: tokens above which a new observation is condensed; 0 never.
        recent: most recent steps of the model that stay.
        guideline: a file that `Guidelines.save` wrote (its best version), or the text itself; ""
            is the default text.
    """

    history: int = 4_096
    observation: int = 1_024
    recent: int = 1
    guideline: str = ""

    markers = (PREFIX,)
    keeps_first = True
    keeps_last = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count(self, "history", 1)
        check_count(self, "observation")
        check_count(self, "recent", 1)
        if self.guideline.endswith(".json") and not Path(self.guideline).is_file():
            raise PolicyError(f"acon.guideline={self.guideline!r}: no such file")

    def text(self) -> str:
        """Return the guideline."""
        if self.guideline.endswith(".json"):
            return Guidelines.load(self.guideline).best.text
        return self.guideline or DEFAULT_GUIDELINE

    def threshold(self, limits: Limits) -> int:
        """Return the history's threshold."""
        return self.history

    def stages(self) -> tuple[Stage, ...]:
        """Observations first; then the history."""
        history = Stage("history", "summarise", self._condense, self.due, self.min_gain)
        if not self.observation:
            return (history,)
        return (Stage("observations", "summarise", self._observations), history)

    def _observations(self, view: History, context: Context) -> History:
        for at in outputs(view):
            block = view.block(at)
            size = block_size(view, at, context)
            if size <= self.observation or is_masked(block) or block.text.startswith(CONDENSED):
                continue
            text = self._condensed(view, context, at, size)
            if text is None:
                break  # it failed: the next would fail as well
            view = edit.with_blocks(view, {at: edit.set_text(block, text, "replace")})
        return edit.settle_breakpoints(view)

    def _condensed(self, view: History, context: Context, at: Address, size: int) -> str | None:
        block = view.block(at)
        request = SummaryInput(
            [{"role": "tool", "content": block.text}], f"{self.text()}\n{LANGUAGE}", HEADINGS[1:3]
        )
        budget = min(self.observation, size) // 2
        text = context.services.summarise(request, budget, size, lambda new: CONDENSED + new)
        return None if text is None else CONDENSED + text

    def _condense(self, view: History, context: Context) -> History | None:
        acted = steps(view)
        kept = choose(Window(self.recent), [1] * len(acted))
        recent = {g for g, stays in zip(acted, kept, strict=True) if stays}
        tail = {i for g in recent for i in range(view.groups[g].start, view.groups[g].stop)}
        roots = whole(view, self.roots(view) | tail)
        gone = others(view, roots)
        prompt = f"{self.text()}\n{LANGUAGE}"
        text = ask_summary(view, context, gone, prompt, HEADINGS, self.summary_tokens, _wrap)
        if text is None:
            return None
        return compact(view, gone, [edit.inserted(_wrap(text))])


def _wrap(text: str) -> str:
    return PREFIX + text
