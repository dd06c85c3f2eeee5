"""Replay: a recorded session walked call by call under a policy, with the bill.

For every call of the session the policy sees the messages that stood before it, and the request it
makes is compared with its last one: tokens of the longest common prefix are read from the prompt
cache, the rest is written. A policy that rewrites old messages pays for all that follows them
again, so that the ranking of policies depends on whether there is a cache; both costs are given.
Calls of a summariser are billed, too. Quality is not modelled.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from kvevict.agent.formats import to_normal
from kvevict.agent.history import History, Message
from kvevict.agent.manager import HistoryManager, Report
from kvevict.agent.message_policy import MessagePolicy
from kvevict.agent.prices import Prices, get_prices
from kvevict.agent.tokens import TokenCounter, make_counter, overhead, usage_of
from kvevict.errors import BudgetError, HistoryError

STATES = ("kept", "masked", "summarised", "hidden")


@dataclass(frozen=True)
class Call:
    """One model call of a recorded session.

    Attributes:
        start: messages of the request are those before this one.
        stop: messages of the answer are `start` to `stop - 1`.
        usage: the provider's own usage object, where the log has it.
    """

    start: int
    stop: int
    usage: Mapping[str, Any] | None = None


def calls_of(history: History) -> Iterator[Call]:
    """Return the model calls of a session, in order: each response, and calls logged beside it."""
    messages = history.messages
    i = 0
    while i < len(messages):
        stop = i + 1
        if messages[i].role == "assistant":
            while stop < len(messages) and _same_response(messages, i, stop):
                stop += 1
            if i:
                yield Call(i, stop, messages[i].usage or messages[stop - 1].usage)
        i = stop
    for event in history.events:
        if event.kind == "response" and event.before:
            yield Call(event.before, event.before, event.usage)


def _same_response(messages: Sequence[Message], start: int, at: int) -> bool:
    """Whether message `at` is a further part of the response that begins at `start`."""
    first, this = messages[start], messages[at]
    if this.role != "assistant":
        return False
    if first.batch is not None or this.batch is not None:
        return first.batch == this.batch
    # Formats that split a response into items (one block each, no message of its own).
    return (
        first.raw is not None
        and isinstance(first.raw, dict)
        and "type" in first.raw
        and ("message" not in first.raw)
    )


@dataclass(frozen=True)
class Step:
    """One call under the policy.

    Attributes:
        call: number of the call, from 0.
        messages: messages of the full history before it.
        context: tokens of the request.
        reused: tokens of it that were a prefix of the last request.
        output: tokens of the answer.
        stages: the policy's stages that acted.
        marks: what became of the full history's messages, as runs `(state, count)`; states are
            "kept", "masked" (cleared or shortened), "summarised" and "hidden" (gone).
        broke: whether the last request is no prefix of this one.
        over: whether the request does not fit the window.
        summary: tokens (in, out) of the summariser's calls.
    """

    call: int
    messages: int
    context: int
    reused: int
    output: int
    stages: tuple[str, ...]
    marks: tuple[tuple[str, int], ...]
    broke: bool
    over: bool
    summary: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class ReplayResult:
    """What a session would have cost under a policy.

    Attributes:
        calls: model calls.
        mean_context: mean tokens of a request.
        peak_context: most tokens of a request.
        prefix_breaks: calls whose request did not begin with the whole last one.
        overflows: calls whose request did not fit the window.
        cost_cached: US dollars with a prompt cache.
        cost_uncached: US dollars without one.
        policy: the policy's string.
        prices: the price table.
        window: tokens of the window.
        summary_calls: calls that made a summary.
        acted: how often each stage acted.
        violations: broken invariants in the last request, by code.
        recorded_cost: US dollars of the session as it was, from its recorded usage at these
            prices; None where it has none.
        steps: every call.
    """

    calls: int
    mean_context: float
    peak_context: int
    prefix_breaks: int
    overflows: int
    cost_cached: float
    cost_uncached: float
    policy: str = ""
    prices: str = ""
    window: int = 200_000
    summary_calls: int = 0
    acted: Mapping[str, int] = field(default_factory=dict)
    violations: Mapping[str, int] = field(default_factory=dict)
    recorded_cost: float | None = None
    steps: tuple[Step, ...] = field(default=(), repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Return the result as JSON, without its steps."""
        row = asdict(replace(self, steps=()))
        del row["steps"]
        return row


def replay(
    session: History | str | Path | Any,
    policy: str | MessagePolicy,
    window: int = 200_000,
    prices: str | Mapping[str, Any] | Prices = "sonnet",
    *,
    max_output: int = 32_000,
    counter: TokenCounter | str | float | None = None,
    summarizer: str | Callable[..., Any] = "extractive",
    format: str = "auto",
    progress: Callable[[int, int], None] | None = None,
) -> ReplayResult:
    """Walk a recorded session call by call under a policy.

    Args:
        session: a `History`, what `json.loads` gives, or a path to a JSON or JSON-lines file.
        policy: a message policy or its string.
        window: tokens of the window.
        prices: name of a price table, a mapping, a JSON file, or `Prices`.
        max_output: tokens reserved for the answer.
        counter: counts tokens; the recorded usage is not used, since it belongs to other requests.
        summarizer: as for `HistoryManager`.
        format: format of the session.
        progress: called with (calls done, calls in all).

    Raises:
        HistoryError: a session that cannot be read, or one without a single call.
        PolicyError: an unknown policy. PricesError: unknown prices.
    """
    history = read_session(session, format)
    table = get_prices(prices)
    counts = make_counter(counter)
    manager = HistoryManager(policy, history.format, window, max_output, counts, summarizer)
    calls = list(calls_of(history))
    if not calls:
        raise HistoryError("the session has no model call: there is nothing to replay")
    fixed = overhead(history, counts)
    walk = _Walk(history, manager, counts, fixed, window)
    steps = []
    for number, call in enumerate(calls):
        steps.append(walk.step(number, call))
        if progress is not None:
            progress(number + 1, len(calls))
    return _sum_up(steps, walk, table, [c.usage for c in calls])


def read_session(session: Any, format: str = "auto") -> History:
    """Return a session as a history; paths are read as JSON, or as JSON lines.

    Raises:
        HistoryError: a file that cannot be read.
    """
    if isinstance(session, History):
        return session
    if isinstance(session, str | Path):
        try:
            text = Path(session).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise HistoryError(f"{session} cannot be read: {error}") from error
        session = parse_text(text, str(session))
    return to_normal(session, format)


def parse_text(text: str, name: str = "input") -> Any:
    """Parse JSON, or JSON lines.

    Raises:
        HistoryError: text that is neither; names the line at fault.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise HistoryError(f"{name} is nested too deeply") from error
    except ValueError as whole:
        entries = []
        lines = [(n, line) for n, line in enumerate(text.split("\n"), 1) if line.strip()]
        for n, line in lines:
            try:
                entries.append(json.loads(line))
            except (ValueError, RecursionError) as error:
                if not entries:
                    raise HistoryError(f"{name} is no JSON: {whole}") from error
                raise HistoryError(
                    f"{name}, line {n} is no JSON: {error}", len(entries), f"line {n}"
                ) from error
        if not entries:
            raise HistoryError(f"{name} is empty") from whole
        return entries


class _Walk:
    """The state of a replay: the last request, and the sizes of messages."""

    def __init__(
        self,
        history: History,
        manager: HistoryManager,
        counter: TokenCounter,
        fixed: int,
        window: int,
    ) -> None:
        self.history, self.manager, self.counter = history, manager, counter
        self.fixed, self.window = fixed, window
        self.report: Report | None = None
        self.summaries = 0
        self._last: tuple[Message, ...] = ()
        self._seen = 0
        self._sizes: dict[int, tuple[Message, int]] = {}

    def size(self, message: Message) -> int:
        """Return the tokens of a message, counted once."""
        known = self._sizes.get(id(message))
        if known is None or known[0] is not message:
            known = self._sizes[id(message)] = (message, self.counter.message(message))
        return known[1]

    def step(self, number: int, call: Call) -> Step:
        """Make the request of one call and compare it with the last."""
        full = replace(self.history, messages=self.history.messages[: call.start], events=())
        stages: tuple[str, ...] = ()
        summary = (0, 0)
        try:
            prepared = self.manager.prepare(full)
            view: tuple[Message, ...] = prepared.messages.messages
            self.report = report = prepared.report
            stages = report.stages
            self.summaries += len(report.summary_calls)
            summary = (
                sum(a for a, _ in report.summary_calls),
                sum(b for _, b in report.summary_calls),
            )
        except BudgetError:
            view = (*self._last, *full.messages[self._seen :])
        sizes = [self.size(m) for m in view]
        shared = _common(self._last, view)
        context = self.fixed + sum(sizes)
        broke = shared < len(self._last)
        step = Step(
            call=number,
            messages=call.start,
            context=context,
            reused=(self.fixed if number else 0) + sum(sizes[:shared]),
            output=sum(self.size(m) for m in self.history.messages[call.start : call.stop]),
            stages=stages,
            marks=marks_of(view, call.start),
            broke=broke,
            over=context > self.window,
            summary=summary,
        )
        self._last, self._seen = view, call.start
        return step


def _common(first: Sequence[Message], second: Sequence[Message]) -> int:
    for i, (a, b) in enumerate(zip(first, second, strict=False)):
        if a is not b and (a.role != b.role or a.blocks != b.blocks):
            return i
    return min(len(first), len(second))


def marks_of(view: Sequence[Message], total: int) -> tuple[tuple[str, int], ...]:
    """Return what became of the full history's first `total` messages, as runs.

    A message that is gone counts as summarised where the view holds a summary, else as hidden.
    """
    states = ["hidden"] * total
    for message in view:
        if 0 <= message.index < total:
            edited = any(
                {"mask", "empty", "truncate", "replace"} & set(b.edits) for b in message.blocks
            )
            states[message.index] = "masked" if edited else "kept"
    if any(m.note for m in view if m.index < 0):
        states = ["summarised" if s == "hidden" else s for s in states]
    runs: list[tuple[str, int]] = []
    for state in states:
        if runs and runs[-1][0] == state:
            runs[-1] = (state, runs[-1][1] + 1)
        else:
            runs.append((state, 1))
    return tuple(runs)


def _sum_up(
    steps: Sequence[Step], walk: _Walk, table: Prices, usages: Sequence[Mapping[str, Any] | None]
) -> ReplayResult:
    cached = uncached = 0.0
    for step in steps:
        asked, made = step.summary
        side = table.cost(asked, 0, 0, made)
        cached += side + table.cost(0, step.context - step.reused, step.reused, step.output)
        uncached += side + table.cost(step.context, 0, 0, step.output)
    found = [u for u in map(usage_of, usages) if u is not None]
    recorded = sum(table.cost(u.fresh, u.cache_write, u.cache_read, u.output) for u in found)
    violations = walk.report.violations if walk.report is not None else ()
    return ReplayResult(
        calls=len(steps),
        mean_context=sum(s.context for s in steps) / len(steps),
        peak_context=max(s.context for s in steps),
        prefix_breaks=sum(s.broke for s in steps),
        overflows=sum(s.over for s in steps),
        cost_cached=cached,
        cost_uncached=uncached,
        policy=str(walk.manager.policy),
        prices=table.name,
        window=walk.window,
        summary_calls=walk.summaries,
        acted=dict(Counter(stage for s in steps for stage in s.stages)),
        violations=dict(Counter(v.code for v in violations)),
        recorded_cost=recorded if found else None,
        steps=tuple(steps),
    )
