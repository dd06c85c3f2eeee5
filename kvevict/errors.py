"""The errors that kvevict raises on purpose; each message names the value and the remedy."""


class KvevictError(Exception):
    """Base of every error that kvevict raises on purpose."""


class PolicyError(KvevictError, ValueError):
    """A policy, or a policy string, with settings that make no sense."""


class UnsupportedModelError(KvevictError):
    """A model, or an option of it, that cannot be served exactly; names the missing part."""


class NotPatchedError(KvevictError):
    """An eviction cache met a model whose attention was not patched."""


class CacheError(KvevictError):
    """A cache that cannot do what was asked in its present state."""


class BudgetError(KvevictError):
    """A budget below what must be kept; names the floor.

    Attributes:
        floor_tokens: the smallest budget that could be met, in tokens, where it is known.
    """

    def __init__(self, message: str, floor_tokens: int | None = None) -> None:
        super().__init__(message)
        self.floor_tokens = floor_tokens


class HistoryError(KvevictError, ValueError):
    """A message history that cannot be read or edited safely.

    Attributes:
        index: index of the message at fault, where there is one.
        path: path of the part at fault, such as ``messages[3].content[0].id``.
    """

    def __init__(self, message: str, index: int | None = None, path: str = "") -> None:
        super().__init__(message)
        self.index = index
        self.path = path
