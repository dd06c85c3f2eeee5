import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from kvevict.errors import KvevictError
from kvevict.eval import needle, needle_data
from kvevict.eval.answers import score_answer
from kvevict.eval.caches import CacheSettings, feed, patched
from kvevict.eval.needle_tasks import TASKS, Item, noise, prose
from kvevict.models.releases import cache_argument
from kvevict.policy import parse

ROW = {
    "context": "Some words. The code is 77. More words.",
    "question": " What is the code?",
    "answer_prefix": " It is ",
    "answer": ["77"],
    "max_new_tokens": 4,
    "task": "niah_single_1",
}


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("depth", [0.0, 0.5, 1.0])
def test_items_are_deterministic_fit_and_hold_their_answer(
    tokenizer: Any, task: str, depth: float
) -> None:
    item = needle_data.make(tokenizer, task, 1500, depth, noise, 3)
    assert item == needle_data.make(tokenizer, task, 1500, depth, noise, 3)
    assert item != needle_data.make(tokenizer, task, 1500, depth, noise, 4)
    assert 1300 < len(tokenizer(item.context).input_ids) <= 1500
    assert all(a in item.context for a in item.answers)
    assert all(a in item.answer for a in item.answers)
    assert item.answer not in item.question
    if item.relevant:
        assert all(a in item.relevant for a in item.answers)
        assert len(item.relevant) < len(item.context) / 2


def test_depth_moves_the_needle_and_nothing_else(tokenizer: Any) -> None:
    places = []
    for depth in (0.0, 0.25, 0.5, 0.75, 1.0):
        item = needle_data.make(tokenizer, "single", 2000, depth, noise, 0)
        places.append(item.context.index(item.answer) / len(item.context))
        assert item.answer == needle_data.make(tokenizer, "single", 900, 0.5, noise, 0).answer
    assert places == sorted(places)
    assert places[0] < 0.1
    assert places[-1] > 0.9
    assert places[2] == pytest.approx(0.5, abs=0.06)


def test_a_prose_haystack_and_too_short_a_length(tokenizer: Any) -> None:
    filler = prose(needle_data.sentences("It was a quiet day in town. We met them there. " * 20))
    item = needle_data.make(tokenizer, "passkey", 800, 0.5, filler, 0)
    assert "quiet day" in item.context
    with pytest.raises(KvevictError, match="needs at least"):
        needle_data.make(tokenizer, "passkey", 20, 0.5, noise, 0)
    with pytest.raises(KvevictError, match="known: passkey"):
        needle_data.make(tokenizer, "nope", 800, 0.5, noise, 0)


def oracle(model: Any, ids: torch.Tensor, first: int) -> tuple[float, list[int], int]:
    """Return answer NLL, ranks and exactness from one forward with a cache of transformers."""
    with torch.no_grad():
        logits = model(ids[None], cache=DynamicCache(config=model.config)).logits[0]
    before, target = logits[first - 1 : -1], ids[first:]
    nll = torch.nn.functional.cross_entropy(before, target)
    ranks = [int((row > row[t]).sum()) + 1 for row, t in zip(before, target, strict=True)]
    return float(nll), ranks, int(max(ranks) == 1)


@pytest.mark.parametrize("question", ["after", "before"])
@pytest.mark.parametrize("chunk", [0, 16])
def test_scores_of_the_full_cache_are_those_of_one_forward(
    model: Any, tokenizer: Any, question: str, chunk: int
) -> None:
    item = needle_data.make(tokenizer, "single", 300, 0.5, noise, 0)
    grid = needle.Grid(("single",), (300,), (0.5,), 1, question)
    row = needle.run(model, tokenizer, ["full"], grid=grid, settings=CacheSettings(chunk=chunk))[
        0
    ].row
    context, ask, answer = needle.parts(tokenizer, item, question)
    nll, ranks, exact = oracle(model, torch.cat([context, ask, answer]), len(context) + len(ask))
    assert row["answer_nll"] == pytest.approx(nll, abs=1e-4)
    assert row["answer_rank"] == pytest.approx(sum(ranks) / len(ranks), abs=0.5)
    assert row["first_rank"] == ranks[0]
    assert row["exact_match"] == exact
    assert row["question"] == question


def test_exact_match_is_what_greedy_decoding_writes(model: Any, tokenizer: Any) -> None:
    ids = torch.tensor(tokenizer("Some words of a context").input_ids)
    given = {cache_argument(model): DynamicCache(config=model.config)}
    out = model.generate(ids[None], max_new_tokens=5, do_sample=False, **given)
    written = out[0, len(ids) :]
    other = written.clone()
    other[2] = (other[2] + 1) % 256
    settings = CacheSettings(chunk=3)
    found = []
    with patched(model):
        for answer in (written, other):
            cache = settings.cache(model, parse("full"))
            _, last = feed(model, ids, cache, settings)
            found.append(score_answer(model, answer, cache, settings, last)[0])
    assert [f["exact_match"] for f in found] == [1, 0]
    assert [f["answer_rank"] == 1.0 for f in found] == [True, False]


def test_a_written_answer_is_looked_for(model: Any, tokenizer: Any) -> None:
    rows = [
        Item("Some words", " q", " a ", text, (text,), max_new_tokens=4, task="t")
        for text in ("", "zzzzz")
    ]
    rows[0] = dataclasses.replace(rows[0], answer="x", answers=("",))  # in every text
    grid = needle.Grid(generate=True)
    row = needle.run(model, tokenizer, ["full"], rows=rows, grid=grid)[0].row
    assert [a["string_match"] for a in row["asked"]] == [1.0, 0.0]
    assert row["string_match"] == 0.5


def test_the_relevant_part_alone_is_a_control(model: Any, tokenizer: Any) -> None:
    grid = needle.Grid(("distractor",), (900,), (0.5,), 2, relevant_control=True)
    found = [
        o.row for o in needle.run(model, tokenizer, ["full", "window"], grid=grid, budgets=["10%"])
    ]
    assert [r["context"] for r in found] == ["whole", "whole", "relevant"]
    assert found[1]["budget"] == 90
    assert found[2]["asked"][0]["context_tokens"] < 200


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_rows_of_kvpress_run_unchanged(
    model: Any, tokenizer: Any, tmp_path: Path, suffix: str
) -> None:
    rows = [ROW, {**ROW, "task": "qa_1", "answer": ["no", "yes"]}, {**ROW, "task": "vt"}]
    rows[2]["answer"] = ["AB", "CD"]
    path = tmp_path / f"rows.{suffix}"
    if suffix == "parquet":
        arrow = pytest.importorskip("pyarrow", reason="parquet needs pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet", reason="parquet needs pyarrow")
        parquet.write_table(arrow.Table.from_pylist(rows), path)
    else:
        path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    items = needle_data.read(path)
    assert [i.answer for i in items] == ["77", "no", "AB, CD"]
    assert items[0].max_new_tokens == 4
    found = [o.row for o in needle.run(model, tokenizer, ["window:window=16"], rows=items)]
    assert [r["task"] for r in found] == ["niah_single_1", "qa_1", "vt"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty"),
        ("nonsense\n", "line 1 is no JSON"),
        ('{"context": "a"}\n', "row 1: needs the texts"),
        (json.dumps({**ROW, "answer": []}) + "\n", "row 1: needs answer"),
    ],
)
def test_bad_rows_name_their_place(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    with pytest.raises(KvevictError, match=message):
        needle_data.read(path)


def test_a_grid_that_makes_no_sense_is_refused() -> None:
    for bad in ({"question": "never"}, {"depths": (1.5,)}, {"samples": 0}, {"lengths": ()}):
        with pytest.raises(KvevictError):
            needle.Grid(**bad)
