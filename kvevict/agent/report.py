"""Report: what one `prepare` did, and the request that came out of it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from kvevict.agent.repairs import Repair
from kvevict.agent.stages import Action
from kvevict.agent.validate import Violation


@dataclass(frozen=True)
class Report:
    """What one `prepare` did.

    Attributes:
        tokens: predicted tokens of the request.
        freed_tokens: tokens freed by this call, estimated.
        floor_tokens: tokens that are never evicted: system prompt, tools, first and last user
            message, what is pinned or open, and the summaries that stand for what went.
        window: tokens of the window.
        violations: invariants that the request breaks (as the input did; edits break none).
        reused_prefix_tokens: tokens of the longest common prefix with the last request.
        stages: names of the stages that acted.
        actions: what every stage did, or why it did nothing.
        repairs: what was repaired in the input.
        failures: failures of the summariser in a row.
        summary_calls: estimated tokens (in, out) of every call of the summariser.
    """

    tokens: int
    freed_tokens: int
    floor_tokens: int
    window: int
    violations: tuple[Violation, ...] = ()
    reused_prefix_tokens: int = 0
    stages: tuple[str, ...] = ()
    actions: tuple[Action, ...] = ()
    repairs: tuple[Repair, ...] = ()
    failures: int = 0
    summary_calls: tuple[tuple[int, int], ...] = ()

    @property
    def over_window(self) -> bool:
        """Whether the request does not fit the window: this policy cannot do more."""
        return self.tokens > self.window

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON."""
        return {**asdict(self), "over_window": self.over_window}


@dataclass(frozen=True)
class Prepared:
    """A request to send: messages in the form that came in, and the report."""

    messages: Any
    report: Report
