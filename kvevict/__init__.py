"""kvevict makes language models and agents forget well.

One policy vocabulary (head, recent, importance, budget) for KV caches and for message histories.

Letters used in every docstring: B batch, H KV heads, G query heads per KV head, Q query length,
S stored length, D head dim.
"""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvevict.errors import (
    BudgetError,
    CacheError,
    HistoryError,
    KvevictError,
    NotPatchedError,
    PolicyError,
    UnsupportedModelError,
)
from kvevict.policy import Policy, parse
from kvevict.slots import Slots

__version__ = "0.1.0"

# A wheel holds kernels/, models/ and eval/ inside this folder; a checkout keeps them beside it.
if not (Path(__file__).parent / "kernels").is_dir():
    __path__.append(str(Path(__file__).parent.parent))

if TYPE_CHECKING:
    from kvevict.cache import EvictionCache, EvictionLayer
    from kvevict.models.aligned import MessageAlignedCache
    from kvevict.models.patch import patch
    from kvevict.models.session import AgentSession
    from kvevict.models.small import load
    from kvevict.models.stream import stream

# Names that need torch are looked up on first use, so that `import kvevict` stays light.
_LAZY = {
    "AgentSession": "kvevict.models.session",
    "EvictionCache": "kvevict.cache",
    "EvictionLayer": "kvevict.cache",
    "MessageAlignedCache": "kvevict.models.aligned",
    "patch": "kvevict.models.patch",
    "load": "kvevict.models.small",
    "stream": "kvevict.models.stream",
}

__all__ = [
    "AgentSession",
    "BudgetError",
    "CacheError",
    "EvictionCache",
    "EvictionLayer",
    "HistoryError",
    "KvevictError",
    "MessageAlignedCache",
    "NotPatchedError",
    "Policy",
    "PolicyError",
    "Slots",
    "UnsupportedModelError",
    "__version__",
    "load",
    "parse",
    "patch",
    "stream",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'kvevict' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
