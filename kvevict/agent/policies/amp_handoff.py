"""Amp's handoff: a new thread for a goal, made by hand, reviewed by the user."""

from dataclasses import dataclass

from kvevict.agent import edit
from kvevict.agent.choosing import others
from kvevict.agent.history import History
from kvevict.agent.message_policy import Context, MessagePolicy, Stage
from kvevict.agent.policies._roots import edited_files
from kvevict.agent.verbs import LANGUAGE, ask_summary, compact

PREFIX = "[Handoff from an earlier thread]"
HEADINGS = ("What matters for the goal", "Decisions", "State", "Open questions")
PROMPT = (
    "Extract from this thread what the next thread needs for its goal, nothing else; do not "
    "summarise the rest. " + LANGUAGE
)


@dataclass(frozen=True)
class AmpHandoff(MessagePolicy, name="amp_handoff"):
    """Start a new thread with a prompt for a goal and the files in use; never by itself.

    Source: ampcode.com/news/handoff (READ): manual, "extract for the next task", the generated
    prompt and file list are reviewed by the user before they are sent. `manager.handoff(goal)`
    asks for it at the next `prepare`; the review is the caller's, who sees the prepared messages.
    A fork is `HistoryManager(..., state=manager.state)`.

    Args:
        files: most files listed.
    """

    files: int = 20

    markers = (PREFIX,)

    def stages(self) -> tuple[Stage, ...]:
        """One stage, only when asked for."""
        return (
            Stage(
                "handoff",
                "summarise",
                self._handoff,
                lambda view, context: bool(context.moment.force),
            ),
        )

    def _handoff(self, view: History, context: Context) -> History | None:
        roots = self.roots(view)
        gone = others(view, roots)
        goal = context.moment.focus
        files = edited_files(view)[-self.files :] if self.files else []

        def wrap(text: str) -> str:
            parts = [PREFIX]
            parts += [f"Goal: {goal}"] if goal else []
            parts += [text]
            parts += ["Files: " + ", ".join(files)] if files else []
            return "\n".join(parts)

        text = ask_summary(view, context, gone, PROMPT, HEADINGS, self.summary_tokens, wrap)
        if text is None:
            return None
        return compact(view, gone, [edit.inserted(wrap(text))], at=view.prefix)
