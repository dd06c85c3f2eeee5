"""HistoryManager: the full history in, the request to send out; the same in, the same out."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from kvevict.agent.edit_log import decode, encode
from kvevict.agent.fallback import fallback_stages
from kvevict.agent.formats import from_normal
from kvevict.agent.history import History, Message
from kvevict.agent.intake import Intake, atom_before, check_from, tail_of
from kvevict.agent.message_policy import (
    Action,
    Context,
    Force,
    Limits,
    MessagePolicy,
    Moment,
    Services,
    parse_message_policy,
    run_stages,
)
from kvevict.agent.repairs import Repair
from kvevict.agent.resources import build_resources
from kvevict.agent.store import Recall, Recalled, Store
from kvevict.agent.summarizers import SummaryInput, attempt, build_summarizer
from kvevict.agent.tokens import Anchor, Anchored, TokenCounter, make_counter, overhead, usage_of
from kvevict.agent.validate import Violation, compare
from kvevict.agent.verbs import anchors, drop, isolate, real_users
from kvevict.errors import BudgetError, HistoryError

VERSION = 1


@dataclass(frozen=True)
class Report:
    """What one `prepare` did.

    Attributes:
        tokens: predicted tokens of the request.
        freed_tokens: tokens freed by this call, estimated.
        floor_tokens: tokens of the roots alone; no edit of this policy goes below.
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
    violations: tuple[Violation, ...]
    reused_prefix_tokens: int
    stages: tuple[str, ...]
    actions: tuple[Action, ...]
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
        self._sizes: dict[int, tuple[Message, int]] = {}
        self._base: tuple[Message, ...] | None = None
        self._previous: tuple[Message, ...] = ()
        self._violations: list[Violation] = []
        self._load(state or {})

    # -- state ------------------------------------------------------------------------------------

    def _load(self, state: Mapping[str, Any]) -> None:
        try:
            version = state.get("version", VERSION)
            if version != VERSION:
                raise HistoryError(f"state of version {version!r}: this one reads {VERSION}")
            self._log: list[Any] = copy.deepcopy(state.get("edits", []))
            self._at = int(state.get("at", 0))
            self._seen = int(state.get("seen", 0))
            self._sent = int(state.get("sent", 0))
            self._failures = int(state.get("failures", 0))
            self._memory: dict[str, Any] = dict(state.get("memory", {}))
            self._hidden: dict[str, int] = dict(state.get("hidden", {}))
            self._pending: list[dict[str, Any]] = [dict(p) for p in state.get("pending", ())]
            self._events: list[dict[str, Any]] = [dict(e) for e in state.get("events", ())]
            anchor = state.get("anchor")
            self._anchored = Anchored(self.counter, prior=None)
            self._anchored.anchor = None if anchor is None else Anchor(**anchor)
        except (AttributeError, TypeError, ValueError) as error:
            if isinstance(error, HistoryError):
                raise
            raise HistoryError(f"this is no manager's state: {error}") from None

    @property
    def state(self) -> dict[str, Any]:
        """The edit log and the counters as JSON; a copy, to be stored between calls.

        Keys: `edits` names every message of the edited history in order (see `edit_log`), `at` how
        many messages of the full history it covers, `events` when what was freed, `hidden` when a
        message was first masked (in messages seen), `failures`, `memory`, `anchor`, `pending`.
        """
        anchor = self._anchored.anchor
        return copy.deepcopy(
            {
                "version": VERSION,
                "policy": str(self.policy),
                "at": self._at,
                "seen": self._seen,
                "sent": self._sent,
                "edits": self._log,
                "events": self._events,
                "hidden": self._hidden,
                "failures": self._failures,
                "memory": self._memory,
                "anchor": None if anchor is None else asdict(anchor),
                "pending": self._pending,
            }
        )

    # -- what a user may ask for ------------------------------------------------------------------

    def compact(self, focus: str = "") -> None:
        """Ask for compaction at the next `prepare`, as `/compact FOCUS` does."""
        self._pending.append({"force": "manual", "focus": focus})

    def handoff(self, goal: str) -> None:
        """Ask for a handoff to a goal at the next `prepare` (Amp)."""
        self.compact(goal)

    def overflowed(self) -> None:
        """Tell that the provider refused the last request as too long: the next one is compacted."""
        self._anchored.reset()
        self._pending.append({"force": "overflow", "focus": ""})

    def clear(self) -> None:
        """Forget everything seen so far at the next `prepare`, as `/clear` does."""
        self._pending.append({"clear": self._seen})

    def isolate(self, start: int, stop: int, conclusion: str, note: str = "") -> None:
        """Replace a sub-task's messages by its conclusion at the next `prepare`.

        Args:
            start: first message of the sub-task, by its place in the full history.
            stop: one past its last message.
            conclusion: what returns from it.
            note: name of the sub-task.
        """
        self._pending.append({"isolate": [start, stop, conclusion, note]})

    def restore(self, *indices: int) -> list[int]:
        """Show masked, cut and stored parts again; all of them where none are named.

        Returns:
            The places of the messages that are whole again from the next `prepare` on. The policy
            may hide them again when it next acts.
        """
        shown = []
        for n, entry in enumerate(self._log):
            i = entry.get("edit")
            if i is not None and (not indices or i in indices):
                self._log[n] = {"keep": [i, i + 1]}
                self._hidden.pop(str(i), None)
                shown.append(i)
        self._base = None
        self._anchored.reset()
        return shown

    @property
    def recall(self) -> Recall:
        """Every message seen, searchable; filled by `prepare` once it has been asked for."""
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
        full, same = self._intake.take(messages)
        if len(full) < self._at or (self._base is None and not self._log):
            self._forget()
        if self._base is None or same < self._at:
            self._base = decode(self._log, full.messages, self._at) if self._log else ()
        view = replace(full, messages=(*self._base, *full.messages[self._at :]))
        self._observe(view, full, usage)
        first = view
        memory = copy.deepcopy(self._memory)
        view, actions, calls, context = self._edit(view, full, memory)
        floor = self.policy.floor(view, context)
        tokens = context.total(view)
        allowance = self.policy.allowance(context.limits)
        if tokens > allowance and floor > allowance:
            raise BudgetError(
                f"{self.policy.name}: the roots alone (system, tools, what must stay) take {floor} "
                f"tokens, {allowance} are available: use a larger window, or shorten them",
                floor,
            )
        self._memory = memory
        self._pending = []
        if view is not first:
            self._commit(first, view, full, actions)
        reused = self._reused(view, context)
        self._violations = check_from(view, atom_before(view, reused), self._violations)
        prefix = view.messages[:reused]
        report = Report(
            tokens=tokens,
            freed_tokens=context.estimate(first) - context.estimate(view),
            floor_tokens=floor,
            window=self.window,
            violations=tuple(self._violations),
            reused_prefix_tokens=(sum(map(self._size, prefix)) + context.limits.overhead)
            if prefix
            else 0,
            stages=tuple(dict.fromkeys(a.stage for a in actions if a.done)),
            actions=tuple(self._named(a) for a in actions),
            repairs=tuple(self._intake.repairs),
            failures=self._failures,
            summary_calls=tuple(calls),
        )
        self._file_messages(self._seen)
        self._seen, self._sent = len(full), len(view)
        self._previous = view.messages
        return Prepared(view if isinstance(messages, History) else from_normal(view), report)

    def _forget(self) -> None:
        """Drop all edits: nothing was edited yet, or the history was rewound behind them."""
        self._log, self._at, self._base = [], 0, ()
        self._hidden = {}
        self._anchored.reset()

    def _observe(self, view: History, full: History, usage: Mapping[str, Any] | None) -> None:
        """Anchor the count on the provider's, for the last request and the answer to it."""
        found = usage_of(usage)
        if found is None or (len(full) == self._seen and self._seen):
            return
        stop = min(self._sent, len(view))
        while stop < len(view) and view.messages[stop].role == "assistant":
            stop += 1
        if not self._sent:
            said = [i for i, m in enumerate(view.messages) if m.role == "assistant"]
            stop = said[-1] + 1 if said else 0
        if stop:
            self._anchored.observe_at(view.messages, stop, found, overhead(view, self.counter))

    def _edit(
        self, view: History, full: History, memory: dict[str, Any]
    ) -> tuple[History, list[Action], list[tuple[int, int]], Context]:
        """Do what was asked for, then what the policy does."""
        fixed = overhead(view, self.counter)
        limits = Limits(self.window, self.max_output, fixed)
        calls: list[tuple[int, int]] = []
        notes: list[Action] = []
        moment = self._moment(len(full))

        def summarise(
            request: SummaryInput, budget: int, limit: int, wrap: Callable[[str], str]
        ) -> str | None:
            if self._failures >= self.policy.strikes and moment.force != "manual":
                return None
            outcome = attempt(
                self._summarizer, request, budget, lambda text: self.counter.text(wrap(text)), limit
            )
            asked = sum(self.counter.text(m["content"]) for m in request)
            calls.append((asked, self.counter.text(outcome.text or "")))
            self._failures = 0 if outcome.text is not None else self._failures + 1
            if outcome.text is None:
                notes.append(Action("summariser", "summarise", False, outcome.reason))
            return outcome.text

        services = Services(
            summarise,
            self.store,
            lambda: self.recall,
            self._resources,
            self._scores,
            bool(getattr(self._summarizer, "opaque", False)),
        )
        context = Context(limits, services, moment, self._size, memory, 1.0, self._failures)
        estimate = context.estimate(view) + fixed
        total = self._anchored.predict(view.messages, fixed)
        context = replace(context, ratio=total / estimate if estimate else 1.0)
        view, actions = self._asked(view, context)
        floor = self.policy.floor(view, context)
        allowance = self.policy.allowance(limits)
        hopeless = floor > allowance and context.total(view) > allowance
        if not hopeless:  # no summary could help: none is asked for (opencode 27924)
            view, done = run_stages(self.policy, view, context, self._accept)
            actions += done
            struck = self._failures >= self.policy.strikes and self.policy.due(view, context)
            if struck or (moment.force == "overflow" and not any(a.done for a in done)):
                view, done = run_stages(_Fallback(self.policy), view, context, self._accept)
                actions += done
        return view, [*notes, *actions], calls, context

    def _moment(self, seen: int) -> Moment:
        force: Force = ""
        focus = ""
        for wish in self._pending:
            if "force" in wish:
                force, focus = wish["force"], wish["focus"]
        return Moment(seen, force, focus)

    def _asked(self, view: History, context: Context) -> tuple[History, list[Action]]:
        """Do what `clear` and `isolate` asked for."""
        actions: list[Action] = []
        for wish in self._pending:
            new = view
            if "clear" in wish:
                roots = anchors(view)
                users = [i for i in real_users(view) if view.messages[i].index >= wish["clear"]]
                start = users[0] if users else len(view)
                gone = [i for i in range(start) if i not in roots]
                new = drop(view, gone)
                actions.append(Action("clear", "drop", True, "asked for"))
            elif "isolate" in wish:
                start, stop, conclusion, note = wish["isolate"]
                inside = [i for i, m in enumerate(view.messages) if start <= m.index < stop]
                if not inside:
                    continue
                new = isolate(view, inside[0], inside[-1] + 1, conclusion, note)
                actions.append(Action("isolate", "isolate", True, "asked for"))
            if new is not view:
                self._accept(view, new)
                freed = context.estimate(view) - context.estimate(new)
                actions[-1] = replace(actions[-1], freed=freed)
                view = new
        return view, actions

    def _accept(self, old: History, new: History) -> None:
        """Refuse an edit that breaks an invariant.

        Raises:
            HistoryError: with the place and the invariant.
        """
        first = next(
            (i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a is not b),
            min(len(old), len(new)),
        )
        start = atom_before(old, first) if len(old) else 0
        before, lead = tail_of(old, start)
        after = new
        if before is not old:
            after = replace(new, messages=(*before.messages[:lead], *new.messages[start:]))
        broken = compare(before, after)
        if broken:
            v = broken[0]
            raise HistoryError(
                f"an edit of {self.policy.name} would break {v.code} at {v.path}: {v.message}",
                v.index,
                v.path,
            )

    def _commit(self, old: History, new: History, full: History, actions: list[Action]) -> None:
        self._anchored.edited(old.messages, new.messages)
        self._base, self._at = new.messages, len(full)
        self._log = encode(new.messages, full.messages)
        for entry in self._log:
            if "edit" in entry:
                self._hidden.setdefault(str(entry["edit"]), len(full))
        stages = [a.stage for a in actions if a.done]
        freed = sum(a.freed for a in actions if a.done)
        self._events.append({"at": len(full), "stages": stages, "freed": freed})

    def _reused(self, view: History, context: Context) -> int:
        """Return how many messages this request shares with the last one from the start."""
        previous = self._previous
        if not previous and self._sent:  # a manager that goes on from a state
            base = self._base or ()
            previous = view.messages[: self._sent] if self._events_before(view) else base
        count = 0
        for old, new in zip(previous, view.messages, strict=False):
            if old is not new and (old.blocks != new.blocks or old.role != new.role):
                break
            count += 1
        return count

    def _events_before(self, view: History) -> bool:
        """Whether this call made no edit, so that the last request is a prefix of this one."""
        return not self._events or self._events[-1]["at"] <= self._seen

    def _named(self, action: Action) -> Action:
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


@dataclass(frozen=True)
class _Called:
    """A counter made of a callable from a text to tokens."""

    count: Callable[[str], int]

    def text(self, text: str) -> int:
        return int(self.count(text))

    def message(self, message: Message) -> int:
        tokens = sum(b.tokens if b.tokens is not None else self.text(b.text) for b in message.blocks)
        return int(tokens)


class _Fallback(MessagePolicy):
    """The stages that stand in for a policy whose summariser is not asked any more."""

    name = "fallback"

    def __init__(self, policy: MessagePolicy) -> None:
        object.__setattr__(self, "policy", policy)

    def stages(self) -> Any:
        return fallback_stages(self.policy)  # type: ignore[attr-defined]


def state_text(state: Mapping[str, Any]) -> str:
    """Return a state as JSON text, keys sorted: the same state is the same bytes."""
    return json.dumps(state, sort_keys=True, ensure_ascii=False)
