"""Which backend runs where, the config table, and kernels without triton."""

import subprocess
import sys

import pytest
import torch

from kvevict.kernels import dispatch
from kvevict.kernels.dispatch import resolve_backend
from kvevict.kernels.tuning import ARCHES, TABLE, config, row_block
from kvevict.kernels.write_slot import write_slot


@pytest.fixture
def no_interpreter(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


@pytest.mark.usefixtures("no_interpreter")
def test_auto_takes_torch_where_there_is_no_gpu():
    assert resolve_backend("auto", "cpu") == "torch"
    assert resolve_backend("torch", "cuda") == "torch"


@pytest.mark.usefixtures("no_interpreter")
def test_explicit_triton_without_a_gpu_says_what_to_do():
    with pytest.raises(RuntimeError, match=r'cannot run on device .cpu.*use backend="torch"'):
        resolve_backend("triton", "cpu")


@pytest.mark.usefixtures("no_interpreter")
def test_launchers_refuse_a_device_that_cannot_run_them():
    buffer, place = torch.zeros(1, 1, 4, 64), torch.zeros(1, 1, 4).long()
    one = torch.zeros(1, 1, 1, 64)
    with pytest.raises(RuntimeError, match="cannot run on device 'cpu'"):
        write_slot(buffer, buffer.clone(), place, place[:, :, :1], one, one, place[0, :, :1])


def test_interpreter_serves_an_explicit_triton_but_never_auto(device):
    if device != "cpu":
        pytest.skip("the interpreter is for machines without CUDA")
    assert resolve_backend("triton", "cpu") == "triton"
    assert resolve_backend("auto", "cpu") == "torch"


def test_unknown_backend_lists_the_known():
    with pytest.raises(ValueError, match=r"'cuda'.*'auto', 'torch', 'triton'"):
        resolve_backend("cuda", "cpu")


@pytest.mark.usefixtures("no_interpreter")
@pytest.mark.parametrize(
    ("capability", "backend"), [((7, 5), "torch"), ((8, 0), "triton"), ((9, 0), "triton")]
)
def test_auto_takes_triton_on_a_gpu_that_it_supports(monkeypatch, capability, backend):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    assert resolve_backend("auto", "cuda") == backend
    monkeypatch.setattr(dispatch, "find_spec", lambda name: None)
    assert resolve_backend("auto", "cuda") == "torch"
    with pytest.raises(RuntimeError, match="triton is not installed"):
        resolve_backend("triton", "cuda")


def test_every_head_dim_dtype_and_row_count_has_a_config():
    for arch in ARCHES:
        for head_dim in (8, 64, 80, 96, 128, 192, 256):
            for dtype in (torch.float32, torch.float16, torch.bfloat16):
                assert config("column_sum", arch, head_dim, dtype).block_n >= 16
                assert config("attention_lse", arch, head_dim, dtype).block_m >= 16
                for rows in (1, 16, 17, 128):
                    tile = config("decode", arch, head_dim, dtype, rows)
                    assert tile.block_m == row_block(rows, dtype)
    assert {arch for _, arch, _, _ in TABLE} <= {*ARCHES, "any"}


def test_every_module_with_a_launcher_imports_without_triton():
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "from kvevict.kernels import attention_lse, column_sum, decode, dispatch, fill_holes\n"
        "from kvevict.kernels import reference, tuning, write_slot\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
