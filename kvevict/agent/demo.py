"""The demo: the login-bug session under three systems, with the outcome each is known for.

Windows are scaled to the session of 15.4 thousand tokens, so that each system acts; OpenCode's
prune is scaled down alike, since its own constants (40,000 and 20,000 tokens) never bite here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvevict.agent.examples import login_bug
from kvevict.agent.formats import to_normal
from kvevict.agent.history import History
from kvevict.agent.manager import HistoryManager
from kvevict.agent.replay import ReplayResult, replay

MAX_OUTPUT = 4_000


@dataclass(frozen=True)
class System:
    """One system of the demo.

    Attributes:
        name: what it is called.
        policy: its policy.
        window: tokens of the window.
    """

    name: str
    policy: str
    window: int


SYSTEMS = (
    System("Claude Code", "claude_code", 48_000),
    System("Codex", "codex_local", 16_000),
    System("OpenCode prune", "opencode_prune:protect=2000,minimum=1000,turns=1", 48_000),
    System("OpenCode compact", "opencode_compact", 16_000),
)


def run_demo() -> tuple[list[dict[str, Any]], History, list[ReplayResult]]:
    """Run the session under every system.

    Returns:
        One row a system, the session, and its replays for a timeline.
    """
    messages = login_bug()
    history = to_normal(messages, "openai-chat")
    rows, results = [], []
    for system in SYSTEMS:
        manager = HistoryManager(system.policy, "openai-chat", system.window, MAX_OUTPUT)
        prepared = manager.prepare(messages)
        report = prepared.report
        view = to_normal(prepared.messages, "openai-chat")
        restored = HistoryManager(
            system.policy, "openai-chat", system.window, MAX_OUTPUT, state=manager.state
        )
        rows.append(
            {
                "system": system.name,
                "policy": system.policy,
                "window": system.window,
                "tokens_before": report.tokens + report.freed_tokens,
                "tokens": report.tokens,
                "messages": len(view),
                "results_cleared": _cleared(history, view),
                "restorable": len(restored.restore()),
                "last_user_message_kept": _last_user(history) in [m.text for m in view],
                "outcome": _outcome(history, view),
                "left": [_line(m.role, m.text, len(m.calls)) for m in view],
            }
        )
        results.append(replay(history, system.policy, system.window, max_output=MAX_OUTPUT))
    return rows, history, results


def _cleared(history: History, view: History) -> int:
    full = {b.text for m in history for b in m.answers}
    return sum(1 for m in view for b in m.answers if b.text not in full)


def _last_user(history: History) -> str:
    assert history.last_user is not None
    return history.messages[history.last_user].text


def _outcome(history: History, view: History) -> str:
    gone = len(history) - len(view)
    cleared = _cleared(history, view)
    if cleared:
        calls = sum(len(m.calls) for m in view)
        return f"{calls} tool calls kept, {cleared} results cleared, nothing else touched"
    if gone > 0:
        users = len(
            [m for m in view if m.text in {history.messages[i].text for i in history.users}]
        )
        return f"{len(view)} messages left: {users} of the user's own, and a summary"
    return "nothing to do"


def _line(role: str, text: str, calls: int) -> str:
    words = " ".join(text.split())
    shown = words[:88] + "…" if len(words) > 89 else words
    return f"{role:9} {f'({calls} call) ' if calls else ''}{shown}"
