import json
from pathlib import Path
from typing import Any

import pytest

from kvevict.errors import KvevictError
from kvevict.eval import chat, streameval
from kvevict.eval.caches import CacheSettings
from kvevict.eval.streameval import Workload

S = CacheSettings(chunk=16)


def test_a_question_every_ten_lines_about_the_line_twenty_back() -> None:
    pieces = list(Workload(lines=100, every=10, back=20).pieces())
    lines = {}
    asked = []
    for piece in pieces:
        if piece.text.startswith("Line "):
            number = int(piece.text.split()[1].rstrip(":"))
            lines[number] = piece.text
        elif piece.answer:
            asked.append((len(lines), piece))
    assert [at for at, _ in asked] == [30, 40, 50, 60, 70, 80, 90, 100]
    for at, piece in asked:
        assert piece.asked_line == at - 20
        assert piece.answer in lines[piece.asked_line]
        name = piece.text.split("code of ")[1].split("?")[0]
        assert name in lines[piece.asked_line]
    assert pieces == list(Workload(lines=100, every=10, back=20).pieces())
    assert pieces != list(Workload(lines=100, every=10, back=20, seed=1).pieces())


def test_distances_and_counts_are_reported(model: Any, tokenizer: Any) -> None:
    workload = Workload(lines=12, every=4, back=3)
    row = streameval.run(model, tokenizer, ["window:window=32"], workload=workload, settings=S)
    row = row[0].row
    assert row["questions"] == len(row["asked"]) == 3
    assert row["tokens_scored"] == 15  # five digits each
    per_line = len("Line 10: the code of the quiet harbor 10 is 12345.\n")
    assert 2.5 * per_line < row["distance_tokens"] < 5 * per_line
    assert row["exact_match_low"] <= row["exact_match"] <= row["exact_match_high"]
    positions = [a["position"] for a in row["asked"]]
    assert positions == sorted(positions)
    assert positions[-1] < row["tokens_fed"]


def test_a_workload_without_questions_is_refused() -> None:
    with pytest.raises(KvevictError, match="more lines than back"):
        Workload(lines=20, every=10, back=20)


def test_a_chat_keeps_one_cache_within_its_budget(model: Any, tokenizer: Any) -> None:
    talks = [["hello there", "and now?"], ["something else entirely, please"]]
    policies = ["full", "streaming_llm:sinks=4,window=12", "h2o:heavy=8,recent=8"]
    found = [
        o.row for o in chat.run(model, tokenizer, talks, policies, settings=S, max_new_tokens=6)
    ]
    assert found[0]["max_kept_tokens"] > 60
    for row in found[1:]:
        assert row["max_kept_tokens"] == 16
        assert row["max_cache_bytes"] == row["cache_bytes"]
    for row in found:
        assert row["turns"] == len(row["answers"]) == 3
        assert row["tokens_fed"] > row["tokens_scored"]
    assert found[0]["buckets"][0] == found[1]["buckets"][0] | {
        "nll_sum": found[0]["buckets"][0]["nll_sum"]
    }


def test_distinct_grams_see_a_loop() -> None:
    assert chat.distinct_grams(list(range(20))) == 1.0
    assert chat.distinct_grams([1, 2] * 20) < 0.1


def test_prompts_are_read_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps({"turns": ["a", "b"]}) + "\n" + json.dumps({"turns": ["c"]}) + "\n")
    assert chat.read_prompts(path) == [["a", "b"], ["c"]]
    assert chat.read_prompts(path, 1) == [["a", "b"]]
    path.write_text('{"text": "a"}\n')
    with pytest.raises(KvevictError, match="line 1"):
        chat.read_prompts(path)
