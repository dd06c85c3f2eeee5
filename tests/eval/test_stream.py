import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvevict.errors import KvevictError
from kvevict.eval import gap, perplexity, stream
from kvevict.eval.caches import CacheSettings
from kvevict.eval.cli import app
from kvevict.eval.results import RunFolder, load_result
from kvevict.eval.texts import Text, Tokens, joined

Draw = Callable[[int], Tokens]
S = CacheSettings(chunk=8)
FRESH = stream.FreshStarts(count=2, lead=40, span=64)


def test_a_stream_gives_what_perplexity_gives(model: Any, tokens: Draw) -> None:
    text, policy = tokens(300), "h2o:heavy=8,recent=8"
    rows = [o.row for o in stream.run(model, text, [policy], settings=S, bucket=64, fresh=FRESH)]
    alone = perplexity.run(model, text, [policy], settings=S)[0].row
    assert rows[0]["kind"] == "stream"
    assert rows[0]["nll"] == pytest.approx(alone["nll"], abs=1e-12)
    assert [m["position"] for m in rows[0]["memory"]][:2] == [64, 128]
    assert len({m["cache_bytes"] for m in rows[0]["memory"]}) == 1  # bounded: never grows


def test_a_fresh_start_compares_the_same_tokens(model: Any, tokens: Draw) -> None:
    text, policy = tokens(300), "streaming_llm:sinks=2,window=14"
    rows = [o.row for o in stream.run(model, text, [policy], settings=S, fresh=FRESH)]
    nll = perplexity.nll_of(model, text.ids, policy)
    for row in rows[1:]:
        at = row["position"]
        own = perplexity.nll_of(model, text.ids[at - 40 : at + 64], policy)
        assert row["fresh_nll"] == pytest.approx(float(own[40:].double().mean()), abs=1e-5)
        assert row["stream_nll"] == pytest.approx(
            float(nll[at : at + 64].double().mean()), abs=1e-5
        )
        assert row["tokens_scored"] == 64
    assert len(rows) == 3


@pytest.mark.parametrize("policy", ["streaming_llm:sinks=2,window=14", "h2o:heavy=8,recent=8"])
def test_checkpoints_do_not_change_a_bit(
    model: Any, tokens: Draw, tmp_path: Path, policy: str
) -> None:
    text = tokens(200)
    arrays = []
    for every in (0, 64):
        folder = RunFolder(tmp_path / str(every), "stream", {})
        stream.run(
            model, text, [policy], settings=S, folder=folder, checkpoint_every=every, fresh=FRESH
        )
        cell = next(p for p in (folder.path / "cells").glob("0000*.nll.npy"))
        arrays.append(np.load(cell))
        assert not (folder.path / "checkpoints").exists()
    assert arrays[0].tobytes() == arrays[1].tobytes()


COMMAND = (
    "stream {model} --policy streaming_llm:sinks=2,window=30 --policy h2o:heavy=16,recent=16 "
    "--text {text} --max-tokens 2000 --repeat --chunk 16 --bucket 256 --fresh 2 --fresh-lead 64 "
    "--checkpoint-every 128 --out {out}"
)


def test_a_killed_stream_resumes_bit_by_bit(
    model_folder: Path, text_file: Path, tmp_path: Path
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    arguments = COMMAND.format(model=model_folder, text=text_file, out=killed).split()
    process = subprocess.Popen(
        [sys.executable, "-m", "kvevict.eval.cli", *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    second = "checkpoints/0001*/checkpoint.json"  # the first stream is done, H2O's is half-way
    while not list(killed.glob(second)) and process.poll() is None:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert process.returncode == -signal.SIGKILL
    assert list(killed.glob(second))
    assert not (killed / "result.json").exists()

    app([*arguments, "--resume"], standalone_mode=False)
    arguments[arguments.index(str(killed))] = str(whole)
    app(arguments, standalone_mode=False)
    found, expected = (load_result(f / "result.json") for f in (killed, whole))
    for row, other in zip(found["rows"], expected["rows"], strict=True):
        timings = {"seconds", "seconds_feeding", "tokens_per_second", "track"}
        assert {k: row[k] for k in row if k not in timings} == {
            k: other[k] for k in other if k not in timings
        }
    for path in sorted((whole / "cells").glob("*.npy")):
        assert (killed / "cells" / path.name).read_bytes() == path.read_bytes()


def test_a_gap_is_not_seen_by_positions_inside_the_cache(model: Any, tokens: Draw) -> None:
    policy = "streaming_llm:sinks=2,window=14"
    found = gap.run(model, tokens(200), [policy], [100, 1_000_000], settings=S, span=160)
    rows = [o.row for o in found]
    inside = [r for r in rows if r["positions"] == "in_cache"]
    outside = [r for r in rows if r["positions"] == "original"]
    assert len({r["nll"] for r in inside}) == 1
    assert len({r["nll"] for r in outside}) == 3
    assert outside[0]["gap"] == 0
    assert all(r["tokens_scored"] == 164 - 16 for r in rows)


def test_gap_zero_is_the_plain_stream(model: Any, tokens: Draw) -> None:
    text, policy = tokens(164), "window:window=16"
    row = gap.run(model, text, [policy], [], settings=S, span=160)[0].row
    nll = perplexity.nll_of(model, text.ids, policy, chunk=8)
    assert row["nll"] == pytest.approx(float(nll[16:].double().mean()), abs=1e-5)


def test_a_checkpoint_interval_must_fit_the_chunk(model: Any, tokens: Draw, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, "stream", {})
    with pytest.raises(KvevictError, match="multiple of the chunk"):
        stream.run(
            model, tokens(99), ["window:window=9"], settings=S, checkpoint_every=9, folder=folder
        )


def test_a_text_repeats_only_when_asked(tokenizer: Any) -> None:
    texts = [Text("a", "0123456789")]
    with pytest.raises(KvevictError, match="--repeat"):
        joined(tokenizer, texts, 25)
    found = joined(tokenizer, texts, 25, bos=True, repeat=True)
    assert tokenizer.decode(found.ids[1:]) == "012345678901234567890123"
    assert len(found.ids) == 25
