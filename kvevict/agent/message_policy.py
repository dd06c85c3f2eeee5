"""MessagePolicy: what leaves a history, when, and by which verb; and the run of its stages.

A message policy is a frozen dataclass without state. It answers `stages`, in the order of their
cost; a stage proposes an edited history and the run accepts it or leaves everything as it was.
Which slots stay is always chosen by a `kvevict.policy.Policy` (head, recent, importance, budget),
the very object that evicts KV positions: see `kvevict.agent.verbs.choose`.
"""

from __future__ import annotations

import importlib
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import cache, lru_cache
from typing import Any, ClassVar, Literal

from kvevict.agent.history import Block, History, Message
from kvevict.agent.store import Recall, Store
from kvevict.agent.summarizers import SummaryInput
from kvevict.errors import PolicyError
from kvevict.policy import build_policy, lookup, split_policy

REGISTRY: dict[str, type[MessagePolicy]] = {}

Verb = Literal["drop", "mask", "truncate", "summarise", "externalise", "isolate", "warn"]
Force = Literal["", "manual", "overflow"]


@dataclass(frozen=True)
class Limits:
    """Sizes that triggers are computed from, in tokens.

    Attributes:
        window: W, what the model can take in and put out together.
        max_output: O, reserved for the answer.
        overhead: a system prompt kept apart, the tool declarations, and what the provider counted
            beyond the estimate (or less, then it may be negative).
    """

    window: int = 200_000
    max_output: int = 32_000
    overhead: int = 0

    @property
    def usable(self) -> int:
        """Tokens for a request: W - O, or W where the output alone would fill the window."""
        return self.window - self.max_output if self.max_output < self.window else self.window


@dataclass(frozen=True)
class Moment:
    """What is special about this call.

    Attributes:
        seen: messages of the full history so far.
        force: "manual" when the user asked for compaction, "overflow" after the provider answered
            that the prompt is too long, else "".
        focus: what the user wants the summary to focus on, or a handoff's goal.
    """

    seen: int = 0
    force: Force = ""
    focus: str = ""


@dataclass(frozen=True)
class Services:
    """What a stage may call.

    Attributes:
        summarise: `(input, budget, limit, wrap) -> text or None`; keeps the failure rules.
        store: texts outside the window.
        recall: makes the searchable storage of all messages, on first use.
        resources: what is injected again from disk (see `policies.claude_code`), or None.
        scores: importance of each message of a history, or None.
        opaque: whether summaries are encrypted content of a compaction item.
    """

    summarise: Callable[[SummaryInput, int, int, Callable[[str], str]], str | None]
    store: Store = field(default_factory=Store)
    recall: Callable[[], Recall] = Recall
    resources: Any = None
    scores: Callable[[History], Sequence[float]] | None = None
    opaque: bool = False


@dataclass(frozen=True)
class Context:
    """Everything that a stage may look at besides the history.

    Attributes:
        limits: window, output, overhead.
        services: summariser, store, ...
        moment: what is special about this call.
        size: tokens of one message.
        memory: the policy's own JSON state, kept between calls; a stage may write to it.
        failures: failures of the summariser in a row.
        sums: tokens of many messages; None adds up `size`.
        block: tokens of one block; None asks `size`.
        min_gain: tokens that the stage that is being tried must free.
        refused: why that stage proposes nothing, in words; it writes here.
    """

    limits: Limits
    services: Services
    moment: Moment
    size: Callable[[Message], int]
    memory: dict[str, Any]
    failures: int = 0
    sums: Callable[[Sequence[Message]], int] | None = None
    block: Callable[[Block], int] | None = None
    min_gain: int = 0
    refused: list[str] = field(default_factory=list)
    _sums: dict[int, tuple[History, int]] = field(default_factory=dict)

    def sizes(self, view: History) -> list[int]:
        """Return the tokens of each message."""
        return [self.size(m) for m in view.messages]

    def estimate(self, view: History) -> int:
        """Return the estimated tokens of the messages alone."""
        known = self._sums.get(id(view))
        if known is None or known[0] is not view:
            known = self._sums[id(view)] = (view, self.together(view.messages))
        return known[1]

    def part(self, block: Block) -> int:
        """Return the tokens of one block alone."""
        return self.size(Message("user", (block,))) if self.block is None else self.block(block)

    def together(self, messages: Sequence[Message]) -> int:
        """Return the tokens of these messages."""
        return sum(map(self.size, messages)) if self.sums is None else self.sums(messages)

    def total(self, view: History) -> int:
        """Return the tokens of the whole request, corrected by the provider's last count."""
        return max(0, self.estimate(view) + self.limits.overhead)


@dataclass(frozen=True)
class Stage:
    """One step of a policy.

    Attributes:
        name: what reports call it.
        verb: what it does.
        edit: proposes an edited history; None or the same history means nothing to do.
        due: whether the step is to be tried.
        min_gain: tokens that must be freed, else nothing happens ("at least or nothing").
        grows: whether the step only adds (a warning) and so may free nothing.
    """

    name: str
    verb: Verb
    edit: Callable[[History, Context], History | None]
    due: Callable[[History, Context], bool] = lambda view, context: True
    min_gain: int = 0
    grows: bool = False


@dataclass(frozen=True, kw_only=True)
class MessagePolicy(ABC):
    """What is evicted from a history: trigger, stages and their verbs.

    A subclass registers itself by name (`class Roo(MessagePolicy, name="roo")`), declares its
    fields with its system's defaults, and answers `stages`.

    Args:
        trigger: tokens of the request from which the policy acts, or a share of the window such as
            "80%"; None means the system's own rule.
        min_gain: tokens that an edit must free, else nothing happens (prompt caches).
        polling: results beyond the kept ones are cleared in batches of this many (hysteresis).
        edit_from: which of the old results go first when not all need to: "head" the oldest,
            "tail" the newest of them, so that the first changed byte lies further right.
        summary_tokens: budget of a summary.
        strikes: failures of the summariser in a row after which it is not called again.
    """

    name: ClassVar[str]
    markers: ClassVar[tuple[str, ...]] = ()  # how texts that the policy inserts begin
    passes: ClassVar[int] = 1  # rounds over the stages until nothing more happens
    keeps_first: ClassVar[bool] = False  # the first user message is a root
    keeps_last: ClassVar[bool] = False  # the newest group is a root in any case

    trigger: int | str | None = None
    min_gain: int = 0
    polling: int = 1
    edit_from: Literal["head", "tail"] = "head"
    summary_tokens: int = 1_500
    strikes: int = 3

    def __init_subclass__(cls, *, name: str | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if name is None:
            return
        taken = REGISTRY.get(name)
        if taken is not None and taken.__qualname__ != cls.__qualname__:
            raise PolicyError(f"message policy name {name!r} is taken by {taken.__qualname__}")
        cls.name = name
        REGISTRY[name] = cls

    def __post_init__(self) -> None:
        for name in ("min_gain", "summary_tokens"):
            check_count(self, name)
        for name in ("polling", "strikes"):
            check_count(self, name, 1)
        if self.edit_from not in ("head", "tail"):
            raise PolicyError(f'{self.name}.edit_from={self.edit_from!r}: give "head" or "tail"')
        if isinstance(self.trigger, str) and not 0 < _percent(self.trigger) <= 100:
            raise PolicyError(f"{self.name}.trigger={self.trigger!r}: give tokens or such as 80%")
        if isinstance(self.trigger, int) and self.trigger < 0:
            raise PolicyError(f"{self.name}.trigger={self.trigger}: give at least 0")

    @abstractmethod
    def stages(self) -> tuple[Stage, ...]:
        """Return the steps in the order in which they are tried, the cheapest first."""

    def threshold(self, limits: Limits) -> int:
        """Return the system's own trigger in tokens of the request; 0 means every call."""
        return 0

    def trigger_tokens(self, limits: Limits) -> int:
        """Return the trigger in tokens of the request, the user's where there is one."""
        if self.trigger is None:
            return self.threshold(limits)
        if isinstance(self.trigger, str):
            return int(limits.window * _percent(self.trigger) / 100)
        return self.trigger

    def due(self, view: History, context: Context) -> bool:
        """Whether the request has reached the trigger, or compaction was asked for."""
        if context.moment.force:
            return True
        return context.total(view) >= self.trigger_tokens(context.limits)

    def allowance(self, limits: Limits) -> int:
        """Return the tokens that a request of this policy must fit into (I12)."""
        return limits.usable

    def roots(self, view: History) -> set[int]:
        """Return the messages that this policy never drops."""
        from kvevict.agent.choosing import anchors

        return anchors(view, self.keeps_first, self.keeps_last)

    def floor(self, view: History, context: Context) -> int:
        """Return the tokens of a request of the roots alone: what no edit goes below (I12)."""
        roots = sum(context.size(view.messages[i]) for i in self.roots(view))
        return max(0, roots + context.limits.overhead)

    def standing(self, view: History, context: Context) -> int:
        """Return the tokens of a request of all that is a root in the shared vocabulary.

        System prompt, tools, the first and the last user message, what is pinned or still open,
        and what this policy put in the place of evicted messages: a summary leaves only for
        another one. Where a first user message was summarised its summary stands for it.
        """
        from kvevict.agent.choosing import all_inserted

        fixed = self.roots(view) | view.roots | all_inserted(view)
        return max(0, context.together([view.messages[i] for i in fixed]) + context.limits.overhead)

    def departures(self) -> dict[str, Any]:
        """Return the fields that differ from the system's defaults, for reports."""
        return {
            f.name: getattr(self, f.name)
            for f in fields(self)
            if getattr(self, f.name) != f.default
        }

    def __str__(self) -> str:
        parts = [
            f"{key}={'|'.join(value) if isinstance(value, tuple) else value}"
            for key, value in self.departures().items()
        ]
        return self.name + (":" + ",".join(parts) if parts else "")


def _percent(text: str) -> float:
    try:
        return float(text.strip().removesuffix("%")) if text.strip().endswith("%") else -1.0
    except ValueError:
        return -1.0


def check_count(policy: MessagePolicy, name: str, minimum: int = 0) -> None:
    """Check that a setting is a whole number, or None where it may be.

    Raises:
        PolicyError: with the value and the remedy.
    """
    value = getattr(policy, name)
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise PolicyError(
            f"{policy.name}.{name}={value!r}: give a whole number of at least {minimum}"
        )


def check_share(policy: MessagePolicy, name: str) -> None:
    """Check that a setting lies above 0 and up to 1.

    Raises:
        PolicyError: with the value and the remedy.
    """
    value = getattr(policy, name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise PolicyError(f"{policy.name}.{name}={value!r}: give a share above 0 and up to 1")


@cache
def _load() -> None:
    package = importlib.import_module("kvevict.agent.policies")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")


def message_policies() -> dict[str, type[MessagePolicy]]:
    """Return every message policy by name."""
    _load()
    return dict(sorted(REGISTRY.items()))


def parse_message_policy(text: str | MessagePolicy) -> MessagePolicy:
    """Build a message policy from a string such as ``"anthropic_clear_tool_uses:keep=3"``.

    Args:
        text: `name` or `name:key=value,key=value` (lists as `a|b`); a policy is returned as it is.

    Raises:
        PolicyError: unknown name or key (the known ones are listed), or a value of the wrong kind.
    """
    if isinstance(text, MessagePolicy):
        return text
    if not isinstance(text, str):
        raise PolicyError(f"{text!r} is no message policy: give its string, such as codex_local")
    return _parse(text)


@lru_cache(maxsize=256)
def _parse(text: str) -> MessagePolicy:
    name, settings = split_policy(text)
    _load()
    return build_policy(lookup(REGISTRY, name, "message policy"), settings)
