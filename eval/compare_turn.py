"""compare_turn: one assistant turn, scored after every policy evicted from what stood before it."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvevict.agent.formats import to_normal
from kvevict.agent.history import History
from kvevict.errors import HistoryError
from kvevict.eval import choices
from kvevict.eval.caches import cross_entropy
from kvevict.eval.divergence import divergence
from kvevict.eval.planted import Fact
from kvevict.eval.token_choices import TOKEN_POLICIES, Choose, Prefill
from kvevict.models.aligned import MessageAlignedCache
from kvevict.models.message_scores import message_scores, token_scores
from kvevict.models.realise import realise
from kvevict.models.spans import Rendered, Turn, render

_WINDOW = 32  # last queries that vote, for the window-scored policy
_REPLY = {"role": "assistant", "content": "I see."}


@dataclass(frozen=True)
class Protocol:
    """What is measured.

    Attributes:
        budgets: shares of what is no root.
        realisations: of the message-level rows.
        target: most tokens of the turn that are scored.
        chunk: tokens a forward.
        sinks: first tokens left out of message scores.
        seed: of random draws.
    """

    budgets: tuple[float, ...] = (0.75, 0.5, 0.25)
    realisations: tuple[str, ...] = ("text", "kv", "kv_reindex")
    target: int = 160
    chunk: int = 512
    sinks: int = 4
    seed: int = 0


@dataclass
class Found:
    """What one turn gave: rows, wall times beside them, and facts about its messages."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)


class TurnBench:
    """The full context of one turn, and the ways to score what is left of it.

    Args:
        model: a patched model.
        tokenizer: with a chat template that only ever appends.
        messages: chat-template messages of the whole trajectory, facts planted.
        turn: (start, stop) of the assistant's messages.
        facts: asked for after this context; none for turns before the last.
        protocol: what is measured.
        steps: tokens of context after which the attention received is kept too.

    Raises:
        HistoryError: a template whose rendering of the context changes with what follows, or a turn
            without contents.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        messages: Sequence[Turn],
        turn: tuple[int, int],
        facts: Sequence[Fact],
        protocol: Protocol,
        steps: Sequence[int] = (),
    ) -> None:
        self.model, self.tokenizer, self.protocol = model, tokenizer, protocol
        self.history: History = to_normal(list(messages[: turn[0]]), "hf")
        whole = render(messages[: turn[1]], tokenizer)
        self.style = whole.style
        self.context = self.render(self.history)
        self.parts = self.context.parts()
        count = len(self.context.ids)
        if whole.ids[:count] != self.context.ids:
            raise HistoryError("the chat template renders the context anew when a turn follows it")
        block = next((b for b in whole.blocks if b.message == turn[0]), None)
        if block is None:
            raise HistoryError(f"message {turn[0]} is empty: give a turn with something to score")
        end = min(whole.spans[turn[1] - 1].stop, block.start + protocol.target)
        self.target = whole.ids[count:end]
        self.scored = block.start - count
        self.questions = [(fact, *self._question(messages[: turn[0]], fact)) for fact in facts]
        self.what = choices.measured(self.history, self.context)
        began = time.perf_counter()
        self.prefills: list[Prefill] = []
        self.full = self._prefill(steps)
        self.prefill_seconds = time.perf_counter() - began
        self.mass = self.full.mass().numpy()
        scores = token_scores(self.mass, self.full.exposure().numpy(), protocol.sinks)
        spans = [(s.start, s.stop) for s in self.context.spans]
        self.message_scores = {
            a: message_scores(scores, spans, a) for a in ("sum", "density", "topk")
        }
        self.reference: Tensor | None = None
        self._known: dict[Any, tuple[dict[str, Any], dict[str, Any]]] = {}

    def render(self, history: History) -> Rendered:
        """Render an edited history as the context was, or as it can be (roles that alternate)."""
        try:
            return render(history, self.tokenizer, style=self.style)
        except HistoryError:
            return render(history, self.tokenizer)

    def _question(self, messages: Sequence[Turn], fact: Fact) -> tuple[tuple[int, ...], int]:
        """Return the tokens of question and answer, and how many of them are the code."""
        asked = [
            {"role": "user", "content": fact.question},
            {"role": "assistant", "content": fact.opening + fact.code},
        ]
        count = len(self.context.ids)
        for before in ([], [_REPLY]):  # where roles alternate, a reply stands between two users
            shown = [*messages, *before, *asked]
            try:
                found = render(shown, self.tokenizer, style=self.style)
            except HistoryError:
                continue
            if found.ids[:count] == self.context.ids:
                break
        else:
            raise HistoryError(
                "the chat template renders the context anew when a question follows it: leave out "
                "the facts (--no-facts)"
            )
        block = next(b for b in found.blocks if b.message == len(shown) - 1)
        start = block.stop - 1
        while self.tokenizer.decode(found.ids[start : block.stop]).strip() != fact.code:
            start -= 1
            if start <= block.start:
                raise HistoryError(f"no tokens of their own for {fact.code}: leave out the facts")
        return found.ids[count : block.stop], block.stop - start

    def _prefill(self, steps: Sequence[int]) -> MessageAlignedCache:
        """Read the context, and note the attention received at every step and at the end."""
        ids, chunk = self.context.ids, self.protocol.chunk
        longest = max([len(self.target), *(len(q[1]) for q in self.questions)])
        cache = MessageAlignedCache(self.model, len(ids) + longest + 256)
        ends = sorted({*(s for s in steps if s < len(ids)), len(ids)})
        known: dict[int, list[Tensor]] = {}  # sums by tokens read
        for stop in sorted({*ends, *(max(0, e - _WINDOW) for e in ends)}):
            cache.append(ids[cache.stored : stop], chunk=chunk, extend=True)
            known[stop] = [x.score[0, :, :stop].clone() for x in cache.ranked_layers() if stop]
        for end in ends:
            cut = max(0, end - _WINDOW)
            window = [s.clone() for s in known[end]]
            for now, old in zip(window, known[cut], strict=False):
                now[:, :cut] -= old
            self.prefills.append(Prefill(known[end], window, end))
        cache.regroup(self.parts)
        return cache

    # -- scoring ----------------------------------------------------------------------------------

    def score(self, cache: MessageAlignedCache, asking: bool = True) -> dict[str, Any]:
        """Return the loss of the turn and of the facts after a cache, which is as before then."""
        point = cache.checkpoint()
        with cache.unscored():
            goal = torch.tensor(self.target[self.scored :])
            logits = cache.append(self.target, chunk=self.protocol.chunk, logits=len(goal) + 1)
        assert logits is not None
        cache.restore(point)
        logits = logits[:-1]
        nll = cross_entropy(logits, goal)
        if self.reference is None:
            self.reference = logits
        row: dict[str, Any] = {
            "nll_sum": float(nll.double().sum()),
            "tokens_scored": len(goal),
            "kl_sum": float(divergence(self.reference, logits).double().sum()),
            "top1_sum": int((logits.argmax(-1) == self.reference.argmax(-1)).sum()),
        }
        if asking and self.questions:
            row["facts"] = [self._ask(cache, *q) for q in self.questions]
        return row

    def _ask(
        self, cache: MessageAlignedCache, fact: Fact, ids: tuple[int, ...], code: int
    ) -> dict[str, Any]:
        point = cache.checkpoint()
        with cache.unscored():
            logits = cache.append(ids, chunk=self.protocol.chunk, logits=code + 1)
        assert logits is not None
        cache.restore(point)
        logits, goal = logits[:-1], torch.tensor(ids[-code:])
        right = bool((logits.argmax(-1).cpu() == goal).all())
        nll = float(cross_entropy(logits, goal).mean())
        return {"carrier": fact.carrier, "depth": fact.depth, "nll": nll, "exact": right}

    # -- rows -------------------------------------------------------------------------------------

    def run(self) -> Found:
        """Score every row of the protocol."""
        found = Found()
        self._add(found, {"policy": "full", "level": "none", "realisation": "none"}, self.full, 1.0)
        oracle = self._leave_one_out()
        found.facts = self._facts(oracle)
        for share in self.protocol.budgets:
            budget = self.what.budget(share)
            self._token_rows(found, share, budget)
            self._message_rows(found, share, budget, oracle)
        return found

    def _add(
        self,
        found: Found,
        row: dict[str, Any],
        cache: MessageAlignedCache,
        mass: float,
        began: float | None = None,
        scored: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        began = time.perf_counter() if began is None else began
        scored = self.score(cache) if scored is None else scored
        whole = self.what.total
        kept = row.setdefault("kept_tokens", cache.stored)
        base = {"budget": None, "recomputed_tokens": 0, "fits": True, "context_tokens": whole}
        row = {**base, **row, **scored, "mass_kept": mass, "kept_share": kept / whole}
        found.rows.append(row)
        found.seconds.append(time.perf_counter() - began)
        return scored

    def _token_rows(self, found: Found, share: float, budget: int) -> None:
        full = self.prefills[-1]
        for name, choose in TOKEN_POLICIES.items():
            keeps, setting = _chosen(choose, full, budget, self.protocol.seed)
            mass = sum(float((s * k).sum()) for s, k in zip(full.sums, keeps, strict=True))
            for how in ("kv", "kv_reindex"):
                began = time.perf_counter()
                cache = copy.deepcopy(self.full)
                cache.keep_tokens(keeps, close_gaps=how == "kv_reindex")
                row = {"policy": name, "level": "token", "realisation": how, "budget": share}
                row |= {"budget_tokens": budget, "setting": setting}
                self._add(found, row, cache, mass / self.mass.sum(), began)

    def _message_rows(self, found: Found, share: float, budget: int, oracle: np.ndarray) -> None:
        scores = {
            "message_sum": self.message_scores["sum"],
            "message_density": self.message_scores["sum"],
            "oracle": oracle,
        }
        given = (scores, self.protocol.seed, self.tokenizer, self.render)
        for name, choice in choices.all_choices(self.what, budget, *given):
            rendered = self.render(choice.history)
            parts = rendered.parts()
            became = choices.states(self.history, choice.history)
            kept = self._stay(became)
            for how in self.protocol.realisations:
                began = time.perf_counter()
                row = {"policy": name, "level": "message", "realisation": how, "budget": share}
                row |= {"budget_tokens": budget, "setting": choice.setting}
                row["fits"] = len(rendered.ids) <= budget
                row["states"] = became
                mass = float(self.mass[kept].sum() / self.mass.sum())
                key = (how, tuple(parts))
                if key in self._known:  # the same request by another name or budget
                    cost, scored = self._known[key]
                    self._add(found, row | cost, self.full, mass, began, scored)
                    continue
                cache = copy.deepcopy(self.full)
                with cache.unscored():
                    done = realise(cache, parts, how, chunk=self.protocol.chunk)
                cost = {"kept_tokens": cache.stored, "recomputed_tokens": done.recomputed}
                cost["mass_bound"] = self.mass_bound(int(kept.sum()))
                scored = self._add(found, row | cost, cache, mass, began)
                self._known[key] = (cost, scored)

    def mass_bound(self, tokens: int) -> float:
        """Return the most attention mass that so many tokens could hold, roots among them (P3)."""
        root = np.zeros(len(self.mass), dtype=bool)
        for message in self.what.roots:
            span = self.context.spans[message]
            root[span.start : span.stop] = True
        rest = np.sort(self.mass[~root])[::-1]
        most = self.mass[root].sum() + rest[: max(0, tokens - int(root.sum()))].sum()
        return float(most / self.mass.sum())

    def _stay(self, states: Sequence[str]) -> np.ndarray:
        """Return bool `[tokens]`: whether a token's message is still there as it was."""
        stay = np.zeros(len(self.context.ids), dtype=bool)
        for span, state in zip(self.context.spans, states, strict=True):
            stay[span.start : span.stop] = state == "kept"
        return stay

    # -- oracle -----------------------------------------------------------------------------------

    def _leave_one_out(self) -> np.ndarray:
        """Return the loss that leaving out each group adds, on its first message, by `kv`."""
        base = self.score(self.full, asking=False)["nll_sum"]
        found = np.zeros(len(self.history))
        for group in self.history.groups:
            inside = set(range(group.start, group.stop))
            if inside & self.what.roots:
                continue
            cache = copy.deepcopy(self.full)
            places = np.cumsum([bool(p) for p in self.parts]) - 1
            cache.drop([int(places[i]) for i in inside if self.parts[i]])
            found[group.start] = self.score(cache, asking=False)["nll_sum"] - base
        return found

    def _facts(self, oracle: np.ndarray) -> dict[str, Any]:
        group = self.history.group_index
        free = [
            g
            for g, x in enumerate(self.history.groups)
            if not set(range(x.start, x.stop)) & self.what.roots
        ]
        delta = np.bincount(group, oracle)[free]
        size = np.bincount(group, self.what.sizes)
        total = np.bincount(group, self.message_scores["sum"])
        topk = np.zeros(len(size))
        np.maximum.at(topk, group, self.message_scores["topk"])
        tried = {"sum": total, "density": total / np.maximum(size, 1), "topk": topk}
        tried |= {"size": size.astype(float), "recency": np.arange(len(size), dtype=float)}
        return {
            "groups": len(free),
            "correlation": {k: rank_correlation(v[free], delta) for k, v in tried.items()},
            "floor_tokens": self.what.floor,
            "context_tokens": self.what.total,
            "straddling": self.context.straddling,
            "style": self.style,
            "oracle": oracle.tolist(),
            "attention": self.message_scores["sum"].tolist(),
        }


def rank_correlation(a: np.ndarray, b: np.ndarray) -> float | None:
    """Return Spearman's rank correlation, None where it is not defined."""
    if len(a) < 3 or len(set(a.tolist())) < 2 or len(set(b.tolist())) < 2:
        return None
    ranks = [np.unique(x, return_inverse=True, return_counts=True) for x in (a, b)]
    mean = [(np.cumsum(c) - (c - 1) / 2)[i] for _, i, c in ranks]  # ties share their mean rank
    return float(np.corrcoef(mean[0], mean[1])[0, 1])


def _chosen(choose: Choose, full: Prefill, budget: int, seed: int) -> tuple[list[Tensor], str]:
    return choose(full, min(budget, full.tokens), seed)
