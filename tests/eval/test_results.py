import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvevict.errors import KvevictError
from kvevict.eval import perplexity
from kvevict.eval.results import SCHEMA, RunFolder, load_result, write_json
from kvevict.eval.texts import Tokens

Draw = Callable[[int], Tokens]
POLICIES = ["full", "window:window=16"]


def run(model: Any, text: Tokens, path: Path, resume: bool = False) -> RunFolder:
    folder = RunFolder(path, "ppl", {"seed": 0})
    folder.check(resume)
    done = perplexity.run(model, text, POLICIES, folder=folder)
    folder.finish([o.row for o in done], [o.timing for o in done], 1)
    return folder


def test_the_same_run_gives_the_same_bytes(model: Any, tokens: Draw, tmp_path: Path) -> None:
    for name in ("a", "b"):
        run(model, tokens(80), tmp_path / name)
    assert (tmp_path / "a/result.json").read_bytes() == (tmp_path / "b/result.json").read_bytes()
    whole = load_result(tmp_path / "a/result.json")
    assert whole["schema"] == SCHEMA
    assert whole["rows"][0]["tokens_per_second"] > 0  # from timings.json


def test_per_token_losses_are_kept(model: Any, tokens: Draw, tmp_path: Path) -> None:
    folder = run(model, tokens(80), tmp_path / "a")
    nll = folder.read_array("0000-full-0", "nll")
    assert nll.shape == (80,)
    assert nll.dtype == np.float32
    assert np.isnan(nll[0])
    row = load_result(tmp_path / "a/result.json")["rows"][0]
    assert row["nll"] == pytest.approx(float(nll[1:].astype(np.float64).mean()), abs=1e-12)


def test_finished_cells_are_not_redone(
    model: Any, tokens: Draw, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(model, tokens(80), tmp_path / "a")
    before = (tmp_path / "a/result.json").read_bytes()
    (tmp_path / "a/result.json").unlink()

    def never(*args: Any) -> None:
        raise AssertionError("a finished cell ran again")

    monkeypatch.setattr(perplexity, "_score", never)
    run(model, tokens(80), tmp_path / "a", resume=True)
    assert (tmp_path / "a/result.json").read_bytes() == before


def test_a_folder_serves_one_run_only(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "a", "ppl", {"seed": 0})
    folder.check()
    folder.claim()
    with pytest.raises(KvevictError, match="--resume"):
        folder.check()
    folder.check(resume=True)
    with pytest.raises(KvevictError, match=r"other config: seed"):
        RunFolder(tmp_path / "a", "ppl", {"seed": 1}).check(resume=True)
    with pytest.raises(KvevictError, match="holds results of 'ppl'"):
        RunFolder(tmp_path / "a", "stream", {"seed": 0}).check(resume=True)


def test_foreign_files_are_never_touched(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(KvevictError, match="another --out"):
        RunFolder(tmp_path, "ppl", {}).check(resume=True)
    with pytest.raises(KvevictError, match="is a file"):
        RunFolder(tmp_path / "notes.txt", "ppl", {}).check()
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]


def test_a_newer_schema_is_refused(tmp_path: Path) -> None:
    whole = {"schema": SCHEMA + 1, "command": "ppl", "config": {}, "rows": []}
    for name in ("config.json", "result.json"):
        write_json(tmp_path / name, whole)
    with pytest.raises(KvevictError, match="upgrade kvevict"):
        RunFolder(tmp_path, "ppl", {}).check(resume=True)
    with pytest.raises(KvevictError, match="upgrade kvevict"):
        load_result(tmp_path / "result.json")


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    write_json(path, {"a": 1})

    class Unwritable:
        def __str__(self) -> str:
            raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        write_json(path, {"a": Unwritable()})
    assert json.loads(path.read_text()) == {"a": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]


def test_a_full_disk_is_an_error_and_the_old_result_stays(tmp_path: Path, monkeypatch: Any) -> None:
    path = tmp_path / "x.json"
    write_json(path, {"a": 1})

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as broken:
        broken.setattr(os, "fsync", full)
        with pytest.raises(KvevictError, match="No space left"):
            write_json(path, {"a": 2})
    assert json.loads(path.read_text()) == {"a": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]


def test_a_folder_that_cannot_be_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(KvevictError, match="cannot write"):
        write_json(tmp_path / "file" / "x.json", {"a": 1})


def test_a_reader_of_the_old_file_never_sees_half_of_the_new(tmp_path: Path) -> None:
    path, old = tmp_path / "x.json", tmp_path / "old.json"
    write_json(path, {"a": 1})
    old.hardlink_to(path)  # what a reader that opened the file holds
    write_json(path, {"a": 2})
    assert json.loads(old.read_text()) == {"a": 1}
    assert json.loads(path.read_text()) == {"a": 2}


def test_not_a_number_becomes_null(tmp_path: Path) -> None:
    write_json(tmp_path / "x.json", {"a": float("nan"), "b": [float("inf"), 1.5, np.float32(2)]})
    assert json.loads((tmp_path / "x.json").read_text()) == {"a": None, "b": [None, 1.5, 2.0]}
