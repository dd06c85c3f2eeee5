import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvevict.errors import KvevictError
from kvevict.eval import divergence, needle, perplexity, report, stream
from kvevict.eval.caches import CacheSettings
from kvevict.eval.pages import cell, table, table_page
from kvevict.eval.results import RunFolder, write_json
from kvevict.eval.svg import png_bytes, ticks
from kvevict.eval.texts import Tokens

EVIL = '<script>alert("x")</script>'
S = CacheSettings(chunk=16)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, model_folder: Path, tokenizer: Any) -> Path:
    """Return a folder with one result of each kind, made once."""
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    ids = torch.randint(0, 256, (160,), generator=torch.Generator().manual_seed(3))
    text, folder = Tokens(ids, False, {"name": "drawn"}), tmp_path_factory.mktemp("results")
    policies = ["full", "streaming_llm:sinks=2,window=14", "h2o:heavy=8,recent=8"]
    fresh = stream.FreshStarts(count=1, lead=20, span=64)
    grid = needle.Grid(("passkey",), (400,), (0.0, 0.5, 1.0), 2)
    done = {
        "ppl": perplexity.run(model, text, policies, budgets=[16, 32], settings=S, bucket=32),
        "stream": stream.run(model, text, policies, settings=S, bucket=32, fresh=fresh),
        "needle": needle.run(model, tokenizer, policies, grid=grid),
        "divergence": divergence.run(model, text, policies[1:], settings=S, bucket=32),
    }
    for name, outcomes in done.items():
        run = RunFolder(folder / name, name, {"model": EVIL, "seed": 0})
        run.claim()
        run.finish([o.row for o in outcomes], [o.timing for o in outcomes], 1)
    return folder


@pytest.fixture
def results(made: Path, tmp_path: Path) -> Path:
    """Return a copy that a test may write to."""
    return shutil.copytree(made, tmp_path / "results")


def test_one_page_shows_every_result(results: Path) -> None:
    (page,) = report.run(results)
    html = page.read_text()
    for title in (
        "NLL against position",
        "Quality against budget",
        "Cache bytes against position",
        "Answer NLL by depth and policy",
        "Lost in the middle?",
        "What is kept: layer by position over time",
        "KL to the full cache against position",
        "Attention mass",
        "fresh start",
    ):
        assert title in html, title
    assert html.count("<svg") > 10
    assert html.count("<svg") == html.count("</svg>")
    assert "nan" not in re.sub(r"base64,[^\"]+", "", html).lower()


def test_the_page_fetches_nothing_and_escapes_everything(results: Path) -> None:
    html = report.run(results)[0].read_text()
    assert EVIL not in html
    assert "&lt;script&gt;" in html
    assert "<script" not in html
    assert not re.findall(r"(?:src|href)=[\"'](?!data:)", html)
    assert "http" not in html.replace("http-equiv", "")


def test_the_same_results_give_the_same_page(results: Path) -> None:
    first = report.run(results)[0].read_bytes()
    assert report.run(results)[0].read_bytes() == first


def test_figures_are_written_as_png(results: Path) -> None:
    pytest.importorskip("matplotlib", reason="PNG needs the extra plots")
    written = report.run(results / "needle", with_png=True)
    assert len(written) == 3
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in written[1:])


def test_a_folder_without_results_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(KvevictError, match="holds no result"):
        report.run(tmp_path)
    with pytest.raises(KvevictError, match="is no folder"):
        report.run(tmp_path / "none")


@pytest.mark.parametrize("text", ['{"schema": 99, "rows": []}', "[1]", "{", '{"schema": 1}'])
def test_newer_foreign_and_damaged_results_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "result.json").write_text(text)
    with pytest.raises(KvevictError):
        report.run(tmp_path)
    assert not (tmp_path / "report.html").exists()


def test_an_unknown_policy_is_still_shown(tmp_path: Path) -> None:
    row = {"policy": "from_a_plugin:x=1", "nll": 1.0, "budget": 8}
    whole = {"schema": 1, "command": "ppl", "config": {}, "versions": {}, "rows": [row]}
    write_json(tmp_path / "result.json", whole)
    assert "from_a_plugin:x=1" in report.run(tmp_path)[0].read_text()


def test_text_inside_a_picture_is_escaped(tmp_path: Path) -> None:
    row = {"policy": EVIL, "nll": 1.0, "budget": 8, "depth": 0.5, "task": EVIL, "length": 9}
    row |= {
        "buckets": [{"start": i, "count": 4, "nll_sum": 2.0} for i in (0, 4)],
        "answer_nll": 1.0,
    }
    rows = [row, {**row, "depth": 1.0}]
    whole = {"schema": 1, "command": "ppl", "config": {}, "versions": {}, "rows": rows}
    write_json(tmp_path / "result.json", whole)
    html = report.run(tmp_path)[0].read_text()
    assert html.count("<svg") == 3
    assert "<script" not in html


def test_a_table_page_of_any_rows(tmp_path: Path) -> None:
    whole = {"command": "demo", "config": {}, "rows": [{"policy": "full", "nll": 2.0}]}
    table_page(tmp_path / "t.html", "kvevict demo", whole, ("policy", "nll", "perplexity"))
    html = (tmp_path / "t.html").read_text()
    assert "kvevict demo" in html
    assert "perplexity" not in html  # no row has it


def test_intervals_stand_beside_their_value() -> None:
    found = table([{"policy": "full", "nll": 1.0, "nll_low": 0.5, "nll_high": 1.5}])
    assert found.rows == [["full", "1.000 [0.500, 1.500]"]]
    assert cell(None) == "-"
    assert cell(12345) == "12,345"


def test_ticks_are_round_and_inside() -> None:
    assert ticks(0, 10) == [0, 2.5, 5, 7.5, 10]
    assert ticks(3, 3) == [3]
    for low, high in ((0.013, 0.017), (-5, 900), (1e6, 4e6)):
        assert all(low <= t <= high for t in ticks(low, high))
        assert 2 <= len(ticks(low, high)) <= 6


def test_png_bytes_are_a_png(tmp_path: Path) -> None:
    image = pytest.importorskip("matplotlib.image", reason="needs a PNG reader")
    path = tmp_path / "x.png"
    path.write_bytes(png_bytes([[0, 255, 128], [10, 20, 30]]))
    found = (image.imread(path) * 255).round().astype(int)
    assert found.tolist() == [[0, 255, 128], [10, 20, 30]]
