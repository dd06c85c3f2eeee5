"""Call: one call of `prepare`: its context, what was asked for, and the policy's stages."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvevict.agent.choosing import anchors, real_users
from kvevict.agent.fallback import Fallback
from kvevict.agent.history import History
from kvevict.agent.message_policy import Context, Limits, Moment, Services
from kvevict.agent.stages import Action, run_stages
from kvevict.agent.summarizers import SummaryInput, attempt
from kvevict.agent.tokens import Anchored, overhead
from kvevict.agent.verbs import drop, isolate

if TYPE_CHECKING:
    from kvevict.agent.manager import HistoryManager


class Call:
    """One call of `prepare`: its context, and the stages in it."""

    def __init__(
        self, manager: HistoryManager, view: History, anchored: Anchored, memory: dict[str, Any]
    ) -> None:
        self.manager = manager
        self.state = manager._state
        self.summaries: list[tuple[int, int]] = []
        self.notes: list[Action] = []
        fixed = overhead(view, manager.counter)
        estimate = manager._together(view.messages) + fixed
        total = anchored.predict(view.messages, fixed) if anchored.anchor else estimate
        limits = Limits(manager.window, manager.max_output, fixed + total - estimate)
        services = Services(
            self.summarise,
            manager.store,
            lambda: manager.recall,
            manager._resources,
            manager._scores,
            bool(getattr(manager._summarizer, "opaque", False)),
        )
        wishes = [wish for wish in self.state.pending if "force" in wish]
        moment = Moment(len(manager._intake.full), **wishes[-1]) if wishes else Moment(len(view))
        self.context = Context(
            limits,
            services,
            moment,
            manager._size,
            memory,
            sums=manager._together,
            block=manager._part,
        )

    def summarise(
        self, request: SummaryInput, budget: int, limit: int, wrap: Callable[[str], str]
    ) -> str | None:
        """Ask the manager's summariser, unless it failed too often in a row."""
        counter = self.manager.counter
        stopped = self.state.failures >= self.manager.policy.strikes
        if stopped and self.context.moment.force != "manual":
            return None
        outcome = attempt(
            self.manager._summarizer, request, budget, lambda text: counter.text(wrap(text)), limit
        )
        asked = sum(counter.text(m["content"]) for m in request)
        self.summaries.append((asked, counter.text(outcome.text or "")))
        self.state.failures = 0 if outcome.text is not None else self.state.failures + 1
        if outcome.text is None:
            self.notes.append(Action("summariser", "summarise", False, outcome.reason))
        return outcome.text

    def run(self, view: History) -> tuple[History, list[Action]]:
        """Do what was asked for, then what the policy does, then what is left without a model."""
        policy, context, accept = self.manager.policy, self.context, self.manager.accept
        view, actions = self.asked(view)
        allowance = policy.allowance(context.limits)
        if context.total(view) > allowance and policy.floor(view, context) > allowance:
            return view, actions  # no summary could help: none is asked for (opencode 27924)
        view, done = run_stages(policy, view, context, accept)
        actions += done
        struck = self.state.failures >= policy.strikes and policy.due(view, context)
        unhelped = context.moment.force == "overflow" and not any(a.done for a in done)
        if struck or unhelped:
            view, done = run_stages(Fallback(policy), view, context, accept)
            actions += done
        return view, [*self.notes, *actions]

    def asked(self, view: History) -> tuple[History, list[Action]]:
        """Do what `clear` and `isolate` asked for."""
        actions: list[Action] = []
        for wish in self.state.pending:
            new = view
            if "clear" in wish:
                users = [i for i in real_users(view) if view.messages[i].index >= wish["clear"]]
                roots = anchors(view)
                end = users[0] if users else len(view)
                new = drop(view, [i for i in range(end) if i not in roots])
                verb = "drop"
            elif "isolate" in wish:
                start, stop, conclusion, note = wish["isolate"]
                inside = [i for i, m in enumerate(view.messages) if start <= m.index < stop]
                if inside:
                    new = isolate(view, inside[0], inside[-1] + 1, conclusion, note)
                verb = "isolate"
            if new is not view:
                self.manager.accept(view, new)
                freed = self.context.estimate(view) - self.context.estimate(new)
                actions.append(Action(next(iter(wish)), verb, True, "asked for", freed))
                view = new
        return view, actions
