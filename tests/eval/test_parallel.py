import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvevict.eval.cli import app
from kvevict.eval.results import load_result

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
DYING = """
import os, sys
from kvevict.eval import perplexity
from kvevict.eval.cli import app

score = perplexity._score

def dies(model, ids, policy, *rest):
    if os.environ["RANK"] == "1" and policy.name == "h2o":
        raise RuntimeError("this rank dies")
    return score(model, ids, policy, *rest)

perplexity._score = dies
app()
"""


def arguments(model: Path, text: Path, out: Path) -> list[str]:
    words = (
        f"ppl {model} --policy full --policy window:window=16 --policy streaming_llm:sinks=4,"
        f"window=12 --policy h2o:heavy=8,recent=8 --policy random:budget=16 --text {text} "
        f"--max-tokens 400 --out {out}"
    )
    return words.split()


@pytest.fixture
def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}


def test_two_ranks_give_the_numbers_of_one_process(
    model_folder: Path, text_file: Path, tmp_path: Path, environment: dict[str, str], capsys: Any
) -> None:
    both, one = tmp_path / "both", tmp_path / "one"
    command = [*TORCHRUN, "-m", "kvevict.eval.cli", *arguments(model_folder, text_file, both)]
    done = subprocess.run([*command, "--json"], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    app([*arguments(model_folder, text_file, one), "--json"], standalone_mode=False)
    alone = json.loads(capsys.readouterr().out)
    shared = json.loads(done.stdout)  # exactly one object, from the first rank alone
    timings = {"seconds", "tokens_per_second"}
    for row, other in zip(shared["rows"], alone["rows"], strict=True):
        assert {k: row[k] for k in row if k not in timings} == {
            k: other[k] for k in other if k not in timings
        }
    assert load_result(both / "result.json")["rows"] is not None
    assert json.loads((both / "timings.json").read_text())["ranks"] == 2
    for path in sorted((one / "cells").glob("*.npy")):
        assert (both / "cells" / path.name).read_bytes() == path.read_bytes()


def test_a_dying_rank_fails_loudly_and_finished_cells_stay(
    model_folder: Path, text_file: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    script, out = tmp_path / "dies.py", tmp_path / "out"
    script.write_text(DYING)
    words = arguments(model_folder, text_file, out)
    done = subprocess.run(
        [*TORCHRUN, str(script), *words], env=environment, capture_output=True, text=True
    )
    assert done.returncode != 0
    assert "this rank dies" in done.stderr
    assert not (out / "result.json").exists()
    finished = sorted(p.name for p in (out / "cells").glob("*.json"))
    assert any(name.startswith("0001-window") for name in finished)  # rank 1's first cell
    assert not any("h2o" in name for name in finished)
    app([*words, "--resume"], standalone_mode=False)
    assert len(load_result(out / "result.json")["rows"]) == 5
