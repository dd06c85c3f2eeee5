"""needle: can an answer still be told after the cache has let go of most of the context?

A grid of depth, length and budget. The question comes after the context was compressed (the cache
cannot know what will be asked) or also before it.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvevict.errors import KvevictError
from kvevict.eval import needle_data, statistics
from kvevict.eval.answers import score_answer
from kvevict.eval.caches import CacheSettings, feed, patched, policies_at
from kvevict.eval.grid import Cell, Outcome, cells, run_cells
from kvevict.eval.needle_tasks import Filler, Item, noise
from kvevict.eval.results import RunFolder
from kvevict.eval.texts import adds_bos, plain_ids, split_ids
from kvevict.policy import Policy, parse

_MEASURES = ("answer_nll", "exact_match", "answer_rank", "first_rank")


@dataclass(frozen=True)
class Grid:
    """What is asked.

    Attributes:
        tasks: names of `needle_tasks.TASKS`.
        lengths: tokens of context.
        depths: 0.0 (start) to 1.0 (end).
        samples: items a cell.
        question: "after" the context, or "before" it as well.
        relevant_control: also read the needed part of each context alone, with a full cache: what
            evicting only the irrelevant would give.
        generate: also answer greedily and look for the answer in what was written.
        seed: of the items.
    """

    tasks: tuple[str, ...] = ("single",)
    lengths: tuple[int, ...] = (1024,)
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    samples: int = 4
    question: str = "after"
    relevant_control: bool = False
    generate: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if self.question not in ("after", "before"):
            raise KvevictError(f'question={self.question!r}: give "after" or "before"')
        if not all(0 <= d <= 1 for d in self.depths) or not self.depths:
            raise KvevictError(f"depths={self.depths}: give shares between 0 and 1")
        if self.samples < 1 or not self.lengths or min(self.lengths) < 1:
            raise KvevictError("give at least one sample and lengths of at least 1 token")


def run(
    model: Any,
    tokenizer: Any,
    policies: Sequence[str | Policy],
    *,
    grid: Grid | None = None,
    rows: list[Item] | None = None,
    filler: Filler = noise,
    budgets: Sequence[str | int] = (),
    settings: CacheSettings | None = None,
    folder: RunFolder | None = None,
) -> list[Outcome]:
    """Ask every question of the grid, or of a data set's rows, under every policy.

    Args:
        model: a decoder-only model; patched for the call if it is not.
        tokenizer: its tokenizer.
        policies: policies or their strings.
        grid: tasks, lengths, depths, samples; its `question`, `generate` serve rows too.
        rows: items read from disk, asked in place of the grid's own.
        filler: of the haystack: noise, or `needle_tasks.prose(...)`.
        budgets: tokens, or shares of the context such as "20%".
        settings: chunk (0 reads the context in one forward), positions, backend, evict_every.
        folder: an opened folder that keeps finished cells.

    Returns:
        A row for every policy, task, length and depth: `answer_nll`, `exact_match`,
        `answer_rank`, `first_rank` (means over samples, the first two with 95% intervals),
        `string_match` where generated, and what was kept.

    Raises:
        PolicyError: a bad policy or budget.
        KvevictError: an unknown task or a length too short for it.
    """
    settings, grid = settings or CacheSettings(), grid or Grid()
    items = _Items(tokenizer, grid, filler, rows)
    keys = [
        {**place, "policy": policy, "context": context}
        for place in items.places()
        for policy, context in _arms(policies, budgets, place["length"], grid)
    ]

    def label(key: dict[str, Any]) -> str:
        names = ("context", "task", "length", "depth", "policy")
        return "-".join(str(key[n]) for n in names)

    def work(cell: Cell) -> Outcome:
        return _ask(model, tokenizer, items.of(cell.key), cell.key, settings, grid)

    with patched(model):
        return run_cells(cells(keys, label), work, folder, "needle")


def _arms(
    policies: Sequence[str | Policy], budgets: Sequence[str | int], length: int, grid: Grid
) -> list[tuple[Policy, str]]:
    arms = [(p, "whole") for p in policies_at(policies, budgets, length)]
    if grid.relevant_control:
        arms.append((parse("full"), "relevant"))
    return arms


class _Items:
    """The questions of a run, by place in the grid."""

    def __init__(self, tokenizer: Any, grid: Grid, filler: Filler, rows: list[Item] | None) -> None:
        self._tokenizer = tokenizer
        self._grid = grid
        self._filler = filler
        self._rows = rows
        self._made: dict[Any, list[Item]] = {}

    def places(self) -> list[dict[str, Any]]:
        if self._rows is None:
            grid = self._grid
            return [
                {"task": t, "length": n, "depth": d}
                for t in grid.tasks
                for n in grid.lengths
                for d in grid.depths
            ]
        found = []
        for task in dict.fromkeys(item.task for item in self._rows):
            sizes = [
                len(plain_ids(self._tokenizer, i.context)) for i in self._rows if i.task == task
            ]
            found.append({"task": task, "length": min(sizes), "depth": None})
        return found

    def of(self, key: dict[str, Any]) -> list[Item]:
        if self._rows is not None:
            return [item for item in self._rows if item.task == key["task"]]
        place = (key["task"], key["length"], key["depth"])
        if place not in self._made:
            seeds = [self._grid.seed * 1_000 + i for i in range(self._grid.samples)]
            self._made[place] = [
                needle_data.make(self._tokenizer, *place, self._filler, seed) for seed in seeds
            ]
        return self._made[place]


def _ask(
    model: Any,
    tokenizer: Any,
    items: list[Item],
    key: dict[str, Any],
    settings: CacheSettings,
    grid: Grid,
) -> Outcome:
    began = time.perf_counter()
    asked, fed = [], 0
    for item in items:
        cache = settings.cache(model, key["policy"])
        context, question, answer = parts(tokenizer, item, grid.question, key["context"])
        _, last = feed(model, context, cache, settings)
        _, last = feed(model, question, cache, settings, last=last)
        fed += len(context) + len(question) + len(answer)
        found: dict[str, Any] = {"context_tokens": len(context)}
        if grid.generate:
            text = _write(model, tokenizer, copy.deepcopy(cache), last, item, settings)
            found["written"] = text
            found["string_match"] = sum(a in text for a in item.answers) / len(item.answers)
        scores, _ = score_answer(model, answer, cache, settings, last)
        asked.append(found | scores)
    row = settings.facts(cache) | {k: key[k] for k in ("task", "length", "depth", "context")}
    row |= {"question": grid.question, "samples": len(items), "bos": adds_bos(tokenizer)}
    row["tokens_fed"] = fed
    row["tokens_scored"] = sum(a["answer_tokens"] for a in asked)
    for name in _MEASURES:
        mean, low, high = statistics.mean_interval([a[name] for a in asked], grid.seed)
        row[name] = mean
        if name in ("answer_nll", "exact_match"):
            row[f"{name}_low"], row[f"{name}_high"] = low, high
    if grid.generate:
        row["string_match"] = sum(a["string_match"] for a in asked) / len(asked)
    row["asked"] = asked
    return Outcome(row, {"tokens_per_second": fed / (time.perf_counter() - began)})


def parts(
    tokenizer: Any, item: Item, question: str = "after", which: str = "whole"
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the tokens of context, question with the answer's opening, and answer.

    Args:
        tokenizer: of the model; its BOS, where it adds one, stands first.
        item: what is asked.
        question: "before" puts it in front of the context too.
        which: "whole" or "relevant" context.
    """
    context = item.relevant if which == "relevant" and item.relevant else item.context
    if question == "before":
        context = item.question.strip() + "\n" + context
    first = [tokenizer.bos_token_id] if adds_bos(tokenizer) else []
    head = torch.tensor(first + plain_ids(tokenizer, context))
    ask, answer = split_ids(tokenizer, item.question + item.answer_prefix, item.answer)
    return head, ask, answer


def _write(
    model: Any, tokenizer: Any, cache: Any, last: Tensor, item: Item, settings: CacheSettings
) -> str:
    """Answer greedily."""
    written: list[int] = []
    while len(written) < item.max_new_tokens:
        token = int(last.argmax())
        if token == tokenizer.eos_token_id:
            break
        written.append(token)
        _, last = feed(model, torch.tensor([token]), cache, settings, last=last)
    return str(tokenizer.decode(written, skip_special_tokens=True))
