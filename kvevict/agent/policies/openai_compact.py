"""OpenAI's server-side compaction: `context_management` with `compact_threshold`."""

from dataclasses import dataclass
from typing import Any

from kvevict.agent.message_policy import Limits, MessagePolicy, Stage, check_count
from kvevict.agent.policies._compaction import before_compaction, has_compaction


@dataclass(frozen=True)
class OpenAICompact(MessagePolicy, name="openai_compact"):
    """Leave compaction to the server: pass its setting through and account for its items.

    Source: OpenAI's compaction documentation (READ): when the rendered tokens exceed
    `compact_threshold` the server emits an encrypted `compaction` item; the items before the
    latest one may be dropped from the input, and with `previous_response_id` nothing may be.
    Nothing is summarised here: the content is not for the client to read.

    Args:
        compact_threshold: tokens, passed through in `request_options`; 200,000 is OpenAI's example
            value, not a documented default.
        prune: drop the items before the latest compaction.
    """

    compact_threshold: int = 200_000
    prune: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count(self, "compact_threshold", 1)

    def threshold(self, limits: Limits) -> int:
        """Return the server's threshold."""
        return self.compact_threshold

    def request_options(self) -> dict[str, Any]:
        """Return what the request to the Responses API must carry."""
        setting = {"type": "compaction", "compact_threshold": self.compact_threshold}
        return {"context_management": [setting]}

    def stages(self) -> tuple[Stage, ...]:
        """One stage: drop what stands before the server's item."""
        if not self.prune:
            return ()
        return (
            Stage(
                "adopt_compaction",
                "drop",
                lambda view, context: before_compaction(view, self.roots(view)),
                lambda view, context: has_compaction(view),
                self.min_gain,
            ),
        )
