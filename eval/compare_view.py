"""compare_view: the data of the two panes: what every policy holds of a context, step by step.

A step is a place in the context where the policies are asked as if it ended there: the budget in
tokens is the same at all steps, so that early ones evict nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from kvevict.agent.history import History
from kvevict.eval import choices
from kvevict.eval.compare_page import SCHEMA, pack
from kvevict.eval.compare_turn import Found, TurnBench
from kvevict.eval.token_choices import TOKEN_POLICIES, Prefill
from kvevict.models.message_scores import message_scores, token_scores

_TEXT = 600  # characters of a message that a card shows


def view(bench: TurnBench, found: Found, title: str) -> dict[str, Any]:
    """Return the panes' data for a turn's context; see `compare_page` for its form."""
    history, context = bench.history, bench.context
    steps = [_Step(bench, p) for p in bench.prefills]
    oracle = np.array(found.facts["oracle"])
    token_rows, message_rows = [], []
    for share in bench.protocol.budgets:
        budget = bench.what.budget(share)
        token_rows += [_token_row(n, share, budget, bench) for n in TOKEN_POLICIES]
        message_rows += list(_message_rows(bench, steps, share, budget, oracle))
    sums = bench.prefills[-1].sums
    return {
        "schema": SCHEMA,
        "title": title,
        "tokens": _pieces(bench),
        "spans": [[s.start, s.stop, s.message] for s in context.spans if s.size],
        "messages": [
            {"role": m.role, "kind": _kind(m), "text": _text(m)[:_TEXT], "tokens": int(size)}
            for m, size in zip(history.messages, bench.what.sizes, strict=True)
        ],
        "layers": len(sums),
        "heads": sums[0].shape[0],
        "steps": [{"tokens": s.tokens, "messages": len(s.history)} for s in steps],
        "token_rows": token_rows,
        "message_rows": message_rows,
    }


class _Step:
    """A context cut off after one of its messages."""

    def __init__(self, bench: TurnBench, prefill: Prefill) -> None:
        self.tokens = prefill.tokens
        spans = bench.context.spans
        count = sum(1 for s in spans if s.stop <= prefill.tokens)
        self.history: History = replace(bench.history, messages=bench.history.messages[:count])
        sizes = bench.what.sizes[:count]
        self.what = choices.Measured(self.history, sizes, choices.roots(self.history))
        mass = sum(s.double().sum(0) for s in prefill.sums)
        assert isinstance(mass, torch.Tensor)
        exposure = prefill.tokens - np.arange(prefill.tokens, dtype=np.float64)
        scores = token_scores(mass.cpu().numpy(), exposure, bench.protocol.sinks)
        self.scores = message_scores(scores, [(s.start, s.stop) for s in spans[:count]], "sum")


def _token_row(name: str, share: float, budget: int, bench: TurnBench) -> dict[str, Any]:
    maps, recent, setting = [], [], ""
    head = 4 if name == "streaming_llm" else 0
    for prefill in bench.prefills:
        size = min(budget, prefill.tokens)
        keeps, setting = TOKEN_POLICIES[name](prefill, size, bench.protocol.seed)
        maps.append(torch.stack([k.cpu() for k in keeps]).numpy())
        recent.append(_recent(name, size))
    row = {"policy": name, "budget": share, "setting": setting, "budget_tokens": budget}
    return {**row, "head": min(head, budget), "recent": recent, "maps": pack(maps)}


def _recent(name: str, size: int) -> int:
    """Return the last tokens that a policy keeps because they are recent."""
    if name == "streaming_llm":
        return size - min(4, size - 1)
    if name.startswith("h2o"):
        return size - size // 2
    return min(32, size) if name == "snapkv" else 0


def _message_rows(
    bench: TurnBench, steps: list[_Step], share: float, budget: int, oracle: np.ndarray
) -> Iterator[dict[str, Any]]:
    rows: dict[str, dict[str, Any]] = {}
    for step in steps:
        scores = {"message_sum": step.scores, "message_density": step.scores}
        scores["oracle"] = oracle[: len(step.history)]
        for name, choice in choices.all_choices(
            step.what, budget, scores, bench.protocol.seed, bench.tokenizer, bench.render
        ):
            row = rows.setdefault(name, {"policy": name, "budget": share, "states": []})
            row["setting"] = choice.setting
            row["states"].append(choices.states(step.history, choice.history))
    yield from rows.values()


def _pieces(bench: TurnBench) -> list[str]:
    """Return every token's piece of the text; together they are the text."""
    text = bench.context.text
    whole = bench.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ends = [b for _, b in whole["offset_mapping"]]
    starts = [0, *ends[:-1]]
    return [text[min(a, b) : b] for a, b in zip(starts, ends, strict=True)]


def _kind(message: Any) -> str:
    kinds = dict.fromkeys(b.kind for b in message.blocks)
    return ", ".join(kinds) or "empty"


def _text(message: Any) -> str:
    return "\n".join(b.text for b in message.blocks if b.text)
