"""streameval: a stream of facts with a question every few lines about a line some lines back.

Source: Xiao et al. 2023 (arXiv:2309.17453), section 4.3: a query every 10 lines, whose answer
stands 20 lines back. Their generator was described and never released; this is an own one. Differs:
the answer is five digits and is fed teacher-forced, so that one wrong answer spoils no later one.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvevict.errors import KvevictError
from kvevict.eval import statistics
from kvevict.eval.answers import score_answer
from kvevict.eval.caches import CacheSettings, feed, patched, policies_at
from kvevict.eval.grid import Cell, Outcome, cells, run_cells
from kvevict.eval.results import RunFolder
from kvevict.eval.texts import adds_bos, split_ids
from kvevict.policy import Policy

_NOUNS = [
    "river",
    "garden",
    "harbor",
    "castle",
    "market",
    "forest",
    "bridge",
    "meadow",
    "tower",
    "valley",
    "cabin",
    "orchard",
]
_ADJECTIVES = [
    "red",
    "quiet",
    "golden",
    "narrow",
    "ancient",
    "silver",
    "broken",
    "gentle",
    "hidden",
    "northern",
]


@dataclass(frozen=True)
class Piece:
    """A part of the stream.

    Attributes:
        text: fed as it is.
        answer: fed after it and scored, None for a line of facts.
        asked_line: line that the answer stands in.
    """

    text: str
    answer: str | None = None
    asked_line: int | None = None


@dataclass(frozen=True)
class Workload:
    """A deterministic StreamEval stream.

    Attributes:
        lines: lines of facts.
        every: lines between two questions.
        back: lines between a fact and its question.
        seed: of the facts.
    """

    lines: int = 200
    every: int = 10
    back: int = 20
    seed: int = 0

    def __post_init__(self) -> None:
        if self.every < 1 or self.back < 1 or self.lines <= self.back:
            raise KvevictError(
                f"lines={self.lines}, every={self.every}, back={self.back}: give every and back "
                "of at least 1 and more lines than back"
            )

    def pieces(self) -> Iterator[Piece]:
        """Yield lines and questions in order."""
        rng = random.Random(self.seed)
        facts: list[tuple[str, str]] = []
        for line in range(self.lines):
            name = f"the {rng.choice(_ADJECTIVES)} {rng.choice(_NOUNS)} {line + 1}"
            code = str(rng.randrange(10_000, 100_000))
            facts.append((name, code))
            yield Piece(f"Line {line + 1}: the code of {name} is {code}.\n")
            if (line + 1) % self.every == 0 and line >= self.back:
                asked = line - self.back
                name, code = facts[asked]
                yield Piece(f"Question: what is the code of {name}?\nAnswer: ", code, asked + 1)
                yield Piece("\n")


def run(
    model: Any,
    tokenizer: Any,
    policies: Sequence[str | Policy],
    *,
    workload: Workload | None = None,
    budgets: Sequence[str | int] = (),
    settings: CacheSettings | None = None,
    folder: RunFolder | None = None,
    seed: int = 0,
) -> list[Outcome]:
    """Read the stream once under every policy and score every question.

    Args:
        model: a decoder-only model; patched for the call if it is not.
        tokenizer: its tokenizer.
        policies: policies or their strings.
        workload: the stream.
        budgets: tokens or shares of the stream to bring the policies to.
        settings: chunk, positions, backend, evict_every.
        folder: an opened folder that keeps finished cells.
        seed: of the bootstrap.

    Returns:
        A row a policy: `exact_match` (share), `answer_nll`, `answer_rank`, each with its 95%
        interval, `questions`, `distance_tokens` (mean tokens from the fact's end to its question)
        and every question's own measures.

    Raises:
        PolicyError: a bad policy or budget.
    """
    settings = settings or CacheSettings()
    workload = workload or Workload()
    pieces = list(workload.pieces())
    cut = [split_ids(tokenizer, p.text, p.answer or "") for p in pieces]
    ids = [before for before, _ in cut]
    answers = [after if len(after) else None for _, after in cut]
    bos = adds_bos(tokenizer)
    if bos:
        ids[0] = torch.cat([torch.tensor([tokenizer.bos_token_id]), ids[0]])
    total = sum(map(len, ids)) + sum(len(a) for a in answers if a is not None)
    chosen = policies_at(policies, budgets, total)
    todo = cells([{"policy": p} for p in chosen], lambda k: str(k["policy"]))

    def work(cell: Cell) -> Outcome:
        return _read(model, pieces, ids, answers, cell.key["policy"], settings)

    with patched(model):
        done = run_cells(todo, work, folder, "streameval")
    for outcome in done:
        row = outcome.row
        row |= {"bos": bos, "lines": workload.lines, "every": workload.every}
        row |= {"back": workload.back, "tokens_fed": total, "questions": len(row["asked"])}
        row["tokens_scored"] = sum(q["answer_tokens"] for q in row["asked"])
        row["distance_tokens"] = _distance(pieces, ids, answers)
        for name in ("exact_match", "answer_nll", "answer_rank"):
            found = statistics.mean_interval([q[name] for q in row["asked"]], seed)
            row[name], row[f"{name}_low"], row[f"{name}_high"] = found
    return done


def _read(
    model: Any,
    pieces: list[Piece],
    ids: list[Tensor],
    answers: list[Tensor | None],
    policy: Policy,
    settings: CacheSettings,
) -> Outcome:
    cache = settings.cache(model, policy)
    last: Tensor | None = None
    asked: list[dict[str, Any]] = []
    began = time.perf_counter()
    for piece, part, answer in zip(pieces, ids, answers, strict=True):
        _, last = feed(model, part, cache, settings, last=last)
        if answer is not None:
            at = cache.seen
            found, last = score_answer(model, answer, cache, settings, last)
            asked.append({"line": piece.asked_line, "position": at, **found})
    row = settings.facts(cache) | {"asked": asked}
    return Outcome(row, {"tokens_per_second": cache.seen / (time.perf_counter() - began)})


def _distance(pieces: list[Piece], ids: list[Tensor], answers: list[Tensor | None]) -> float:
    """Return the mean number of tokens between the end of a fact and its question's answer."""
    ends: list[int] = []
    gaps: list[int] = []
    at = 0
    for piece, part, answer in zip(pieces, ids, answers, strict=True):
        at += len(part)
        if piece.text.startswith("Line "):
            ends.append(at)
        if answer is not None:
            assert piece.asked_line is not None
            gaps.append(at - ends[piece.asked_line - 1])
            at += len(answer)
    return sum(gaps) / len(gaps) if gaps else 0.0
