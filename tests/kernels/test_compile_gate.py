"""The compile gate refuses what it should, and the counts behind the floors."""

import csv
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import compile_gate, counting
from benchmarks.gate_cases import cases
from kvevict.kernels.tuning import ARCHES, TABLE, Config

ROOT = Path(__file__).parents[2]


def test_every_config_is_compiled_for_every_architecture():
    for arch in ARCHES:
        tiles = {case.tile for case in cases(arch, full=False)}
        own = {key[::2] + key[3:] for key in TABLE if key[1] == arch}
        for (kernel, where, D, rows), tile in TABLE.items():
            if where == arch or (where == "any" and (kernel, D, rows) not in own):
                assert tile in tiles, (kernel, arch, D, rows)


def test_published_table_is_of_these_configs_and_clean():
    with (ROOT / "benchmarks/results/compile_gate.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["verdict"] for row in rows} == {"ok"}
    for case in (case for arch in ARCHES for case in cases(arch, full=False)):
        tile = [str(size) for size in case.tile]
        name = case.kernel.split(".")[1]
        assert any(
            row["kernel"] == name and [row[key] for key in Config._fields] == tile for row in rows
        ), (name, tile)


def test_decode_floor_counts_keys_values_and_the_score_traffic():
    alone = counting.decode(1, 8, 4, 1, 4096, 128)
    scored = counting.decode(1, 8, 4, 1, 4096, 128, scored=True, victim=True)
    per_key = (alone.nbytes - 2 * 32 * 128 * 2) / (8 * 4096)
    assert per_key == 2 * 128 * 2 + 8
    assert (scored.nbytes - alone.nbytes) / (8 * 4096) == 16 + 16 + 8 + 8
    assert alone.flops == 4 * 32 * 4096 * 128


def test_column_sum_needs_half_of_the_products_of_its_forward():
    forward = counting.attention(1, 8, 4, 1000, 1000, 128)
    sums = counting.column_sum(1, 8, 4, 1000, 1000, 128)
    assert forward.flops == 2 * sums.flops
    last = counting.column_sum(1, 8, 4, 1000, 1000, 128, q_lo=999)
    assert last.flops == 2 * 32 * 1000 * 128


def test_document_has_the_floors_and_the_table_of_the_last_gate():
    document = (ROOT / "docs/kernels.md").read_text()
    assert counting.table() in document
    assert compile_gate.markdown() in document


def test_benchmark_without_a_gpu_exits_two(monkeypatch, capsys):
    from benchmarks import gpu

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main([]) == 2
    assert re.fullmatch(r".*needs a CUDA device.*\n", capsys.readouterr().err)


@pytest.mark.slow
def test_gate_passes_on_a_subset(tmp_path, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # must not matter: the gate clears it
    out = tmp_path / "gate.csv"
    for kernel in ("column_sum", "write_slot"):
        arguments = ["--arch", "gfx942", "--arch", "sm_90", "--quick", "--kernel", kernel]
        assert compile_gate.main([*arguments, "--out", str(out)]) == 0
    with out.open() as file:
        assert {row["arch"] for row in csv.DictReader(file)} == {"gfx942", "sm_90"}


@pytest.mark.slow
def test_gate_refuses_a_tile_that_spills():
    pytest.importorskip("triton")
    code = (
        "import torch\n"
        "from benchmarks import compile_gate, gate_cases\n"
        "from kvevict.kernels.tuning import Config\n"
        "gate_cases.config = lambda *arguments: Config(128, 128, 4, 3)\n"
        "case = gate_cases._attention('sm_80', 128, torch.bfloat16, True)\n"
        "print(compile_gate.compile_case(case, 'sm_80').verdict)\n"
    )
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "bytes of registers spilled" in done.stdout
    assert "bytes shared" in done.stdout
