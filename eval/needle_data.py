"""needle_data: items of a wanted length from the generators, or rows of a data set on disk."""

from __future__ import annotations

import dataclasses
import json
import random
import re
from importlib import import_module
from pathlib import Path
from typing import Any

from kvevict.console import read_text
from kvevict.errors import KvevictError
from kvevict.eval.needle_tasks import TASKS, Filler, Item
from kvevict.eval.texts import plain_ids


def sentences(text: str) -> list[str]:
    """Cut prose into sentences of a usual length, for a haystack."""
    flat = re.sub(r"\s+", " ", text)
    found = [s.strip() for s in re.split(r"(?<=[.!?])\s+(?=[A-Z\"'])", flat)]
    kept = [s for s in found if 20 <= len(s) <= 300]
    if len(kept) < 20:
        raise KvevictError("the text for the haystack has fewer than 20 sentences: give prose")
    return kept


def make(tokenizer: Any, task: str, length: int, depth: float, filler: Filler, seed: int) -> Item:
    """Make an item whose context has at most `length` tokens, and nearly so many.

    Args:
        tokenizer: that counts.
        task: a name of `TASKS`.
        length: tokens of the context.
        depth: 0.0 (start) to 1.0 (end).
        filler: of the haystack.
        seed: of the item; the same at every length and depth, so that those alone differ.

    Raises:
        KvevictError: an unknown task, or a length too short for it.
    """
    if task not in TASKS:
        raise KvevictError(f"unknown task {task!r}; known: {', '.join(TASKS)}")

    def at(count: int) -> tuple[Item, int]:
        item = TASKS[task](random.Random(f"{task}-{seed}"), depth, filler(count))
        return item, len(plain_ids(tokenizer, item.context))

    least = at(0)[1]
    if least > length:
        raise KvevictError(
            f"task {task} needs at least {least} tokens of context: give a length above {length}"
        )
    low, high = 0, 16  # sentences of filler: the most that fit
    while at(high)[1] <= length:
        low, high = high, high * 2
    while low < high - 1:
        middle = (low + high) // 2
        if at(middle)[1] <= length:
            low = middle
        else:
            high = middle
    best = at(low)[0]
    return dataclasses.replace(best, task=task)


def read(path: Path) -> list[Item]:
    """Read rows in kvpress's schema from JSONL or parquet, so RULER and LongBench run unchanged.

    A row has context, question, answer_prefix, answer (or answers: a text or a list) and
    max_new_tokens; task is optional.

    Raises:
        KvevictError: a file or a row that is not of this form.
    """
    rows = _parquet(path) if path.suffix == ".parquet" else _jsonl(path)
    if not rows:
        raise KvevictError(f"{path.name} has no rows: give rows of context, question, answer")
    return [_item(row, f"{path.name} row {i + 1}") for i, row in enumerate(rows)]


def _jsonl(path: Path) -> list[Any]:
    rows = []
    for number, line in enumerate(read_text(path, "rows").splitlines(), 1):
        if line.strip():
            try:
                rows.append(json.loads(line))
            except ValueError as error:
                raise KvevictError(f"{path.name} line {number} is no JSON: {error}") from error
    return rows


def _parquet(path: Path) -> list[Any]:
    try:
        parquet = import_module("pyarrow.parquet")
    except ImportError as error:
        raise KvevictError(
            'reading parquet needs pyarrow: pip install pyarrow, or "kvevict[eval]"'
        ) from error
    try:
        return list(parquet.read_table(path).to_pylist())
    except (OSError, ValueError) as error:
        raise KvevictError(f"{path} cannot be read as parquet: {error}") from error


def _item(row: Any, where: str) -> Item:
    names = ("context", "question", "answer_prefix")
    if not isinstance(row, dict) or not all(isinstance(row.get(n), str) for n in names):
        raise KvevictError(f"{where}: needs the texts context, question and answer_prefix")
    found = row.get("answer", row.get("answers"))
    answers = [found] if isinstance(found, str) else found
    if not isinstance(answers, list) or not answers or not all(map(_is_text, answers)):
        raise KvevictError(f"{where}: needs answer (or answers), a text or a list of texts")
    return Item(
        row["context"],
        row["question"],
        row["answer_prefix"],
        ", ".join(answers) if row.get("task", "") in _ALL_OF else answers[0],
        tuple(answers),
        int(row.get("max_new_tokens") or 32),
        task=str(row.get("task", "rows")),
    )


# RULER tasks whose answer is the whole list; elsewhere a list holds alternatives.
_ALL_OF = {"niah_multivalue", "niah_multiquery", "vt", "cwe", "fwe"}


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)
