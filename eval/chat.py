"""chat: a conversation that never ends, on one cache that is kept across turns.

Source: the streaming demo of Xiao et al. 2023 (arXiv:2309.17453), which feeds MT-bench's two-turn
prompts one after another. Answers differ between policies and have no reference, so the row states
what can be measured: the loss of the users' words, how repetitive the answers are, whether they
end, and that the cache stays within its budget.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvevict.cache import EvictionCache
from kvevict.console import read_text
from kvevict.errors import KvevictError
from kvevict.eval import statistics
from kvevict.eval.caches import CacheSettings, feed, patched, policies_at
from kvevict.eval.grid import Cell, Outcome, cells, run_cells
from kvevict.eval.results import RunFolder
from kvevict.eval.texts import plain_ids
from kvevict.policy import Policy

_GRAM = 4


def read_prompts(path: Path, limit: int | None = None) -> list[list[str]]:
    """Read conversations from JSONL rows with `turns`, as MT-bench has them.

    Raises:
        KvevictError: a file without such rows.
    """
    found: list[list[str]] = []
    for number, line in enumerate(read_text(path, "prompts").splitlines(), 1):
        if not line.strip():
            continue
        try:
            turns = json.loads(line)["turns"]
        except (ValueError, KeyError, TypeError) as error:
            raise KvevictError(
                f'{path.name} line {number} is no row like {{"turns": ["...", "..."]}}: fix it'
            ) from error
        if not isinstance(turns, list) or not all(isinstance(t, str) and t for t in turns):
            raise KvevictError(f"{path.name} line {number}: turns must be a list of texts")
        found.append(turns)
    return found[:limit]


def run(
    model: Any,
    tokenizer: Any,
    conversations: list[list[str]],
    policies: Sequence[str | Policy],
    *,
    budgets: Sequence[str | int] = (),
    settings: CacheSettings | None = None,
    max_new_tokens: int = 64,
    folder: RunFolder | None = None,
    seed: int = 0,
) -> list[Outcome]:
    """Hold all conversations one after another on one cache, greedily.

    Args:
        model: a decoder-only model; patched for the call if it is not.
        tokenizer: its tokenizer; its chat template where there is one.
        conversations: user turns of each.
        policies: policies or their strings.
        budgets: tokens, to bring the policies to.
        settings: chunk, positions, backend, evict_every.
        max_new_tokens: at most so many an answer.
        folder: an opened folder that keeps finished cells.
        seed: of the bootstrap.

    Returns:
        A row a policy: `prompt_nll` (nats a token of the users' words) with its 95% interval,
        `distinct_4grams` (share of an answer's 4-grams that are new, mean), `ended` (share of
        answers that ended by themselves), `max_kept_tokens`, `max_cache_bytes`, `answers`.

    Raises:
        PolicyError: a bad policy or budget.
        KvevictError: no conversations.
    """
    settings = settings or CacheSettings()
    if not conversations:
        raise KvevictError("no conversations: give a JSONL file with turns")
    turns = [text for talk in conversations for text in talk]
    prompts = [torch.tensor(plain_ids(tokenizer, _wrap(tokenizer, text))) for text in turns]
    chosen = policies_at(policies, budgets, sum(map(len, prompts)))
    todo = cells([{"policy": p} for p in chosen], lambda k: f"chat-{k['policy']}")

    def work(cell: Cell) -> Outcome:
        cache = settings.cache(model, cell.key["policy"])
        return _talk(model, tokenizer, prompts, cache, settings, max_new_tokens)

    with patched(model):
        done = run_cells(todo, work, folder, "chat")
    for outcome in done:
        row = outcome.row
        row |= {"bos": False, "turns": len(turns), "max_new_tokens": max_new_tokens}
        row["prompt_nll"] = statistics.mean(row["buckets"])
        row["prompt_nll_low"], row["prompt_nll_high"] = statistics.interval(row["buckets"], seed)
    return done


def _wrap(tokenizer: Any, text: str) -> str:
    """Return one user turn and the opening of the answer; no system prompt is repeated."""
    if not getattr(tokenizer, "chat_template", None):
        return f"\n\nUSER: {text}\n\nASSISTANT:"
    talk = [{"role": "system", "content": ""}, {"role": "user", "content": text}]
    whole: str = tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
    system: str = tokenizer.apply_chat_template(talk[:1], tokenize=False)
    return whole.removeprefix(system)


def _talk(
    model: Any,
    tokenizer: Any,
    prompts: list[Tensor],
    cache: EvictionCache,
    settings: CacheSettings,
    max_new_tokens: int,
) -> Outcome:
    last: Tensor | None = None
    parts, answers, distinct, ended = [], [], [], 0
    kept = size = 0
    began = time.perf_counter()
    for prompt in prompts:
        at = cache.seen
        nll, last = feed(model, prompt, cache, settings, last=last)
        scored = nll[~nll.isnan()].double()
        parts.append({"start": at, "count": len(scored), "nll_sum": float(scored.sum())})
        answer: list[int] = []
        while len(answer) < max_new_tokens:
            token = int(last.argmax())
            answer.append(token)
            _, last = feed(model, torch.tensor([token]), cache, settings, last=last)
            if token == tokenizer.eos_token_id:
                ended += 1
                break
        else:  # cut off: close the answer, so that the next turn does not read as its end
            if tokenizer.eos_token_id is not None:
                close = torch.tensor([tokenizer.eos_token_id])
                _, last = feed(model, close, cache, settings, last=last)
        answers.append(tokenizer.decode(answer, skip_special_tokens=True))
        distinct.append(distinct_grams(answer))
        facts = settings.facts(cache)
        kept, size = max(kept, facts["kept_tokens"]), max(size, facts["cache_bytes"])
    row = settings.facts(cache) | {
        "kind": "chat",
        "tokens_fed": cache.seen,
        "tokens_scored": sum(p["count"] for p in parts),
        "buckets": parts,
        "distinct_4grams": sum(distinct) / len(distinct),
        "ended": ended / len(prompts),
        "max_kept_tokens": kept,
        "max_cache_bytes": size,
        "answers": answers,
    }
    return Outcome(row, {"tokens_per_second": cache.seen / (time.perf_counter() - began)})


def distinct_grams(tokens: list[int]) -> float:
    """Return the share of 4-grams that occur for the first time; 1.0 for shorter answers."""
    grams = [tuple(tokens[i : i + _GRAM]) for i in range(len(tokens) - _GRAM + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0
