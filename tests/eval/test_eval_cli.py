import json
from pathlib import Path
from typing import Any

import pytest

from kvevict import console
from kvevict.eval.cli import app

MEASURES = {
    "ppl": ("nll", "perplexity", "kept_tokens", "cache_bytes", "tokens_per_second", "budget"),
    "stream": ("nll", "perplexity", "kept_tokens", "cache_bytes", "tokens_per_second"),
    "streameval": ("exact_match", "answer_nll", "answer_rank", "kept_tokens"),
    "needle": ("exact_match", "answer_nll", "answer_rank", "depth", "length", "task"),
    "divergence": ("kl", "top1_agreement", "attention_mass", "nll_delta"),
}
EXTRA = {
    "ppl": "--max-tokens 200",
    "stream": "--max-tokens 300 --fresh 1 --fresh-lead 40 --fresh-span 64 --gap 1k --gap-span 100",
    "streameval": "--lines 8 --every 2 --back 3",
    "needle": "--length 300 --depth 0,1 --samples 1 --task passkey",
    "divergence": "--max-tokens 100 --mass-at 1",
}


def call(words: str, *more: str) -> int:
    """Run a command as the shell would and return its exit code."""
    with pytest.raises(SystemExit) as caught:
        console.run(lambda: app([*words.split(), *more]))
    return int(caught.value.code or 0)


@pytest.mark.parametrize("command", MEASURES)
def test_json_is_one_object_with_plain_measures(
    command: str, model_folder: Path, text_file: Path, capsys: Any
) -> None:
    words = f"{command} {model_folder} --policy streaming_llm --budget 32 --json --chunk 16"
    if command in ("ppl", "stream", "divergence"):
        words += f" --text {text_file}"
    assert call(f"{words} {EXTRA[command]}") == console.DONE
    whole = json.loads(capsys.readouterr().out)
    assert list(whole) == ["command", "config", "versions", "rows"]
    assert whole["command"] == f"eval {command}"
    row = whole["rows"][0]
    assert row["policy"] == "streaming_llm:sinks=4,window=28"
    for name in (*MEASURES[command], "chunk", "evict_every", "positions", "backend", "bos"):
        assert name in row, name
    assert row["kept_tokens"] == row["budget"] == 32
    assert row["chunk"] == 16
    assert row["positions"] == "in_cache"
    assert row["tokens_scored"] > 0


@pytest.fixture
def short_text(tmp_path: Path) -> Path:
    path = tmp_path / "short.txt"
    path.write_text("a cat")
    return path


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("ppl {m} --text {d}/none.txt", "No such file"),
        ("ppl {m} --text {d}/empty.txt", "is empty"),
        ("ppl {m} --text {d}/latin.txt", "is not UTF-8"),
        ("ppl {m} --text {d}/short.txt", "nothing would be evicted"),
        ("ppl {m} --text {t} --policy nope", "unknown policy 'nope'"),
        ("ppl {m} --text {t} --policy h2o:heavy=x", "heavy"),
        ("ppl {m} --text {t} --budget x", "budget 'x'"),
        ("ppl {m} --text {t} --max-tokens many", "no number of tokens"),
        ("ppl {m} --text {t} --resume", "--resume needs --out"),
        ("ppl {m} --text {t} --dtype float8", "float8"),
        ("ppl {d}/nomodel --text {t}", "nomodel"),
        ("ppl {m} --text {t} --positions sideways", "sideways"),
        ("ppl {m} --text {t} --policy window:window=9 --score-from 99999", "score_from"),
        ("ppl {m} --text {t} --out {d}", "holds no run"),
        ("ppl {m} --text {t} --out {d}/short.txt", "is a file"),
        ("ppl {m} --text {t} --out {d}/other", "another --out"),
        ("ppl {m} --text {t} --out {d}/newer --resume", "upgrade kvevict"),
        ("stream {m} --text {t} --max-tokens 1M", "--repeat"),
        ("needle {m} --task nope", "unknown task 'nope'"),
        ("needle {m} --rows {d}/short.txt", "no JSON"),
        ("needle {m} --depth deep", "no list of shares"),
        ("streameval {m} --lines 10", "more lines than back"),
        ("streameval {m} --chat {d}/short.txt", "no row"),
    ],
)
def test_bad_input_is_one_line_with_a_remedy_and_code_2(
    words: str, message: str, model_folder: Path, text_file: Path, short_text: Path, capsys: Any
) -> None:
    folder = short_text.parent
    (folder / "empty.txt").write_text(" \n")
    (folder / "latin.txt").write_bytes(b"caf\xe9 au lait")
    (folder / "other").mkdir()
    (folder / "other/config.json").write_text('{"schema": 1, "command": "stream", "config": {}}')
    (folder / "newer").mkdir()
    (folder / "newer/config.json").write_text('{"schema": 9, "command": "ppl", "config": {}}')
    before = {p: p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
    assert call(words.format(m=model_folder, d=folder, t=text_file)) == console.BAD_INPUT
    said = capsys.readouterr()
    assert said.out == ""
    lines = [x for x in said.err.splitlines() if x.startswith("error: ")]
    assert len(lines) == 1
    assert message in lines[0]
    assert "Traceback" not in said.err
    assert {p: p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()} == before


def test_a_run_that_exists_is_not_overwritten(
    model_folder: Path, text_file: Path, tmp_path: Path, capsys: Any
) -> None:
    words = f"ppl {model_folder} --text {text_file} --policy window:window=16 --max-tokens 99 --out"
    out = tmp_path / "run"
    assert call(words, str(out)) == console.DONE
    before = (out / "result.json").read_bytes()
    assert call(words, str(out)) == console.BAD_INPUT
    assert "--resume" in capsys.readouterr().err
    assert call(words, str(out), "--seed", "1", "--resume") == console.BAD_INPUT
    assert "seed" in capsys.readouterr().err
    assert (out / "result.json").read_bytes() == before
    assert call(words, str(out), "--resume") == console.DONE
    assert (out / "result.json").read_bytes() == before


def test_the_embedded_text_serves_when_none_is_named(model_folder: Path, capsys: Any) -> None:
    words = f"ppl {model_folder} --policy window:window=16 --max-tokens 64 --json"
    assert call(words) == console.DONE
    whole = json.loads(capsys.readouterr().out)
    assert whole["config"]["texts"][0]["name"] == "pydoc_data.topics"
