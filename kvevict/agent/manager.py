"""HistoryManager: the full history in, the request to send out; the same in, the same out."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvevict.agent.call import Call
from kvevict.agent.choosing import choose
from kvevict.agent.formats import from_normal
from kvevict.agent.history import Block, History, Message
from kvevict.agent.intake import Intake, atom_before, changed_part, check_from, grown
from kvevict.agent.manager_state import ManagerState
from kvevict.agent.message_policy import (
    MessagePolicy,
    parse_message_policy,
)
from kvevict.agent.report import Prepared, Report
from kvevict.agent.resources import build_resources
from kvevict.agent.stages import Action
from kvevict.agent.store import Recall, Recalled, Store
from kvevict.agent.summarizers import build_summarizer
from kvevict.agent.tokens import Anchored, TokenCounter, make_counter, overhead, usage_of
from kvevict.agent.validate import Violation, compare
from kvevict.errors import BudgetError, HistoryError
from kvevict.policies import Window

__all__ = ["HistoryManager", "Prepared", "Report"]


class HistoryManager:
    """Edits a growing history under a policy, append-only between two evictions.

    The caller keeps its full, uncut history and hands it over each time; nothing of it is ever
    changed. What was edited is remembered in `state`, so every request begins with the whole last
    one until the policy acts again.

    Args:
        policy: a message policy or its string.
        format: format of what is handed over, "auto" to detect it.
        window: W in tokens.
        max_output: O in tokens.
        counter: a `TokenCounter`, "chars:3.0", "hf:PATH", a number of characters a token, a
            callable from a text to tokens, or None for 3.0 characters a token.
        summarizer: "extractive", "hf:MODEL", "openai:BASE_URL", or a callable.
        store: a `Store` or a folder for externalised texts; None keeps them in memory.
        state: `state` of an earlier manager, to go on where it was.
        resources: a folder, a callable `(kind, name)`, or an object: what is read again from disk.
        scores: importance of each message of a history, for `h2o`.

    Raises:
        PolicyError: an unknown policy or summariser, or settings out of range.
        HistoryError: a state of another form.
    """

    def __init__(
        self,
        policy: str | MessagePolicy,
        format: str = "anthropic",
        window: int = 200_000,
        max_output: int = 32_000,
        counter: TokenCounter | str | float | Callable[[str], int] | None = None,
        summarizer: str | Callable[..., Any] = "extractive",
        store: Store | str | Path | None = None,
        state: Mapping[str, Any] | None = None,
        *,
        resources: Any = None,
        scores: Callable[[History], Sequence[float]] | None = None,
    ) -> None:
        for name, value in (("window", window), ("max_output", max_output)):
            if isinstance(value, bool) or not isinstance(value, int) or value < (name == "window"):
                raise ValueError(f"{name}={value!r}: give a positive number of tokens")
        self.policy = parse_message_policy(policy)
        self.window = window
        self.max_output = max_output
        self.counter = make_counter(_Called(counter) if callable(counter) else counter)
        self.store = store if isinstance(store, Store) else Store(store)
        self._summarizer = build_summarizer(summarizer)
        self._resources = build_resources(resources)
        self._scores = scores
        self._recall: Recall | None = None
        self._intake = Intake(format)
        self._state = ManagerState.from_json(state or {})
        choose(Window(1), [1])  # loads the array API, 0.2 s once, outside of any call
        self._sizes: dict[int, tuple[Message, int]] = {}
        self._parts: dict[int, tuple[Block, int]] = {}
        self._base: tuple[Message, ...] | None = None  # the edited part of the last request
        self._view = History()  # the last request
        self._violations: list[Violation] = []

    # -- what is remembered, and what a user may ask for -------------------------------------------

    @property
    def state(self) -> dict[str, Any]:
        """The edit log and the counters as JSON; a copy, to be stored between calls.

        Keys: `edits` names every message of the edited history in order (see `edit_log`), `at` how
        many messages of the full history it covers, `events` when what was freed, `hidden` when a
        message was first masked (in messages seen), `failures`, `memory`, `anchor`, `pending`.
        """
        return self._state.to_json(str(self.policy))

    def compact(self, focus: str = "") -> None:
        """Ask for compaction at the next `prepare`, as `/compact FOCUS` does."""
        self._state.pending.append({"force": "manual", "focus": focus})

    def handoff(self, goal: str) -> None:
        """Ask for a handoff to a goal at the next `prepare` (Amp)."""
        self.compact(goal)

    def overflowed(self) -> None:
        """Tell that the provider refused the last request as too long: compact the next one."""
        self._state.pending.append({"force": "overflow", "focus": ""})

    def clear(self) -> None:
        """Forget everything seen so far at the next `prepare`, as `/clear` does."""
        self._state.pending.append({"clear": self._state.seen})

    def isolate(self, start: int, stop: int, conclusion: str, note: str = "") -> None:
        """Replace a sub-task's messages by its conclusion at the next `prepare`.

        Args:
            start: first message of the sub-task, by its place in the full history.
            stop: one past its last message.
            conclusion: what returns from it.
            note: name of the sub-task.
        """
        self._state.pending.append({"isolate": [start, stop, conclusion, note]})

    def restore(self, *indices: int) -> list[int]:
        """Show masked, cut and stored parts again; all of them where none are named.

        Returns:
            The places of the messages that are whole again from the next `prepare` on. The policy
            may hide them again when it next acts.
        """
        shown = self._state.restore(indices)
        self._state.anchor = None
        self._base = None
        return shown

    @property
    def recall(self) -> Recall:
        """Every message seen, searchable (MemGPT); filled by `prepare`."""
        if self._recall is None:
            folder = self.store.folder
            if folder is not None:
                folder.mkdir(parents=True, exist_ok=True)
            self._recall = Recall(":memory:" if folder is None else folder / "recall.sqlite")
            self._file_messages(0)
        return self._recall

    def _file_messages(self, start: int) -> None:
        if self._recall is not None:
            messages = self._intake.full.messages[start:]
            self._recall.add(Recalled(str(m.index), m.role, m.text) for m in messages if m.text)

    # -- the work ---------------------------------------------------------------------------------

    def prepare(self, messages: Any, usage: Mapping[str, Any] | None = None) -> Prepared:
        """Return the request to send.

        Args:
            messages: the full, uncut history: a message list, a whole request (system, tools,
                messages) or a log in the manager's format, or a `History`; never changed.
            usage: the provider's own usage object of the last call, where there is one.

        Returns:
            The messages in the form that came in, and the report.

        Raises:
            HistoryError: a part that cannot be read (with its place), an edit that would break an
                invariant, a state of another history; the manager's state is then as before.
            BudgetError: the roots alone do not fit; names the floor.
        """
        found = usage_of(usage)
        full, same = self._intake.take(messages)
        state = self._state
        if len(full) < state.at:  # rewound behind the edits: they speak of what is gone
            state.forget()
            self._base = ()
        if self._base is None or same < state.at:
            self._base = state.view(full.messages)
        first = replace(full, messages=(*self._base, *full.messages[state.at :]))
        first = grown(self._view, first)
        again = len(full) == state.seen and bool(state.seen) and same == len(full)
        anchored = Anchored(_Sized(self), prior=None)
        anchored.anchor = state.anchor
        if found is not None and not again:
            self._observe(anchored, first)(found)
        call = Call(self, first, anchored, copy.deepcopy(state.memory))
        view, actions = (first, []) if again and not state.pending else call.run(first)
        context = call.context
        tokens = context.total(view)
        policy = self.policy
        allowance = policy.allowance(context.limits)
        floor = policy.floor(view, context) if tokens > allowance else 0
        if floor > allowance:
            raise BudgetError(
                f"{policy.name}: the roots alone (system, tools, what must stay) take {floor} "
                f"tokens, {allowance} are available: use a larger window, or shorten them",
                floor,
            )
        if view is not first:
            anchored.edited(first.messages, view.messages)
            self._commit(view, full, actions)
        state.memory, state.pending, state.anchor = call.context.memory, [], anchored.anchor
        reused = self._reused(first, view)
        self._violations = check_from(view, atom_before(view, reused), self._violations)
        prefix = self._together(view.messages[:reused])
        report = Report(
            tokens=tokens,
            freed_tokens=context.estimate(first) - context.estimate(view),
            floor_tokens=min(tokens, policy.standing(view, context)),
            window=self.window,
            violations=tuple(self._violations),
            reused_prefix_tokens=prefix + context.limits.overhead if reused else 0,
            stages=tuple(dict.fromkeys(a.stage for a in actions if a.done)),
            actions=tuple(self._named(a) for a in actions),
            repairs=tuple(self._intake.repairs),
            failures=state.failures,
            summary_calls=tuple(call.summaries),
        )
        self._file_messages(state.seen)
        state.seen, state.sent = len(full), len(view)
        self._view = view
        return Prepared(view if isinstance(messages, History) else from_normal(view), report)

    def _observe(self, anchored: Anchored, view: History) -> Callable[[Any], None]:
        """Anchor the count on the provider's, for the last request and the answer to it."""

        def observe(usage: Any) -> None:
            stop = min(self._state.sent, len(view))
            while stop < len(view) and view.messages[stop].role == "assistant":
                stop += 1
            if not self._state.sent:
                said = [i for i, m in enumerate(view.messages) if m.role == "assistant"]
                stop = said[-1] + 1 if said else 0
            if stop:
                anchored.observe_at(view.messages, stop, usage, overhead(view, self.counter))

        return observe

    def accept(self, old: History, new: History) -> None:
        """Refuse an edit that breaks an invariant.

        Raises:
            HistoryError: with the place and the invariant.
        """
        broken = compare(*changed_part(old, new))
        if broken:
            v = broken[0]
            raise HistoryError(
                f"an edit of {self.policy.name} would break {v.code} at {v.path}: {v.message}",
                v.index,
                v.path,
            )

    def _commit(self, view: History, full: History, actions: list[Action]) -> None:
        self._base = view.messages
        self._state.commit(view.messages, full.messages)
        self._state.note_hidden(view.messages, full.messages)
        stages = [a.stage for a in actions if a.done]
        freed = sum(a.freed for a in actions if a.done)
        self._state.events.append({"at": len(full), "stages": stages, "freed": freed})

    def _reused(self, first: History, view: History) -> int:
        """Return how many messages this request shares with the last one from the start."""
        last = self._view.messages or first.messages[: self._state.sent]
        count = 0
        for old, new in zip(last, view.messages, strict=False):
            if old is not new and (old.blocks != new.blocks or old.role != new.role):
                break
            count += 1
        return count

    def _named(self, action: Action) -> Action:
        """Return an action with its messages by their place in what was handed over."""
        origin = self._intake.origin
        places = tuple(origin[i] if 0 <= i < len(origin) else i for i in action.messages)
        return replace(action, messages=places)

    def _size(self, message: Message) -> int:
        found = self._sizes.get(id(message))
        if found is not None and found[0] is message:
            return found[1]
        if len(self._sizes) > 4 * (len(self._intake.full) + 1_000):
            self._sizes.clear()
        size = self.counter.message(message)
        self._sizes[id(message)] = (message, size)
        return size

    def _together(self, messages: Sequence[Message]) -> int:
        """Return the tokens of many messages: `_size` of each, without a call for known ones."""
        known = self._sizes.get
        total = 0
        for message in messages:
            found = known(id(message))
            if found is not None and found[0] is message:
                total += found[1]
            else:
                total += self._size(message)
        return total

    def _part(self, block: Block) -> int:
        """Return the tokens of one block alone."""
        found = self._parts.get(id(block))
        if found is not None and found[0] is block:
            return found[1]
        if len(self._parts) > 8 * (len(self._intake.full) + 1_000):
            self._parts.clear()
        size = self.counter.message(Message("user", (block,)))
        self._parts[id(block)] = (block, size)
        return size


@dataclass(frozen=True)
class _Sized:
    """A manager's counter, with the sizes that it has worked out already."""

    manager: HistoryManager

    def text(self, text: str) -> int:
        return self.manager.counter.text(text)

    def message(self, message: Message) -> int:
        return self.manager._size(message)

    def messages(self, messages: Sequence[Message]) -> int:
        return self.manager._together(messages)


@dataclass(frozen=True)
class _Called:
    """A counter made of a callable from a text to tokens."""

    count: Callable[[str], int]

    def text(self, text: str) -> int:
        return int(self.count(text))

    def message(self, message: Message) -> int:
        return sum(b.tokens if b.tokens is not None else self.text(b.text) for b in message.blocks)
