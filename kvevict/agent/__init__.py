"""kvevict for message histories: formats, validation, policies, the manager and replay.

Loads no torch. `to_normal` and `from_normal` read and write histories of any known format,
`validate` and `repair` check and mend them, `HistoryManager` edits a growing history under a
policy, and `replay` walks a recorded session under one and presents the bill.
"""

from kvevict.agent.formats import from_normal, to_normal
from kvevict.agent.history import History
from kvevict.agent.manager import HistoryManager
from kvevict.agent.replay import replay
from kvevict.agent.validate import repair, validate

__all__ = [
    "History",
    "HistoryManager",
    "from_normal",
    "repair",
    "replay",
    "to_normal",
    "validate",
]
