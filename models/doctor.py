"""doctor: what runs on this machine, each finding with what to do where it does not."""

import inspect
from importlib.util import find_spec
from typing import Any

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

from kvevict import console
from kvevict.cache import EvictionCache
from kvevict.models.patch import patch
from kvevict.models.releases import cache_argument
from kvevict.models.small import SMALL, cache_folder


def examine() -> list[dict[str, Any]]:
    """Return one row a check: what, found, ok, remedy."""
    rows: list[dict[str, Any]] = []

    def row(what: str, found: Any, ok: bool = True, remedy: str = "") -> None:
        rows.append({"check": what, "found": str(found), "ok": ok, "remedy": "" if ok else remedy})

    for name, number in console.versions().items():
        optional = name in ("triton", "commit")
        row(name, number or "not installed", number is not None or optional)
    row("machine", console.machine())
    cuda = torch.cuda.is_available()
    row("CUDA device", torch.cuda.get_device_name() if cuda else "none: the torch backend serves")
    triton = find_spec("triton") is not None
    usable = (
        "usable" if cuda and triton else "installed, needs a GPU" if triton else "not installed"
    )
    row("Triton", usable)
    row(
        "log-sum-exp of fused attention on CPU",
        "aten flash attention",
        hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu"),
        "install torch>=2.6",
    )
    model = _tiny_model()
    row("cache argument of forward", cache_argument(model))
    for hook in ("_prepare_cache_for_generation", "_get_candidate_generator"):
        there = hasattr(model, hook)
        row(
            f"generate() hook {hook}",
            "present" if there else "missing",
            there,
            f"transformers {transformers.__version__} is not supported; see docs/models.md",
        )
    row("update() gets keywords", _update_keywords(model))
    row("scores under h2o", *_scores(model))
    small = (cache_folder() / f"{SMALL}-f32" / "config.json").is_file()
    gguf = find_spec("gguf") is not None
    row(
        f"embedded model {SMALL}",
        "converted" if small else "fetched on first use" if gguf else "needs gguf",
        small or gguf,
        'pip install "kvevict[demo]"',
    )
    return rows


def _tiny_model() -> Any:
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    return LlamaForCausalLM(config).eval()


def _update_keywords(model: Any) -> str:
    source = inspect.getsource(type(model.base_model.layers[0].self_attn).forward)
    return "yes" if "kwargs=kwargs" in source else "no: the layer is found through a context"


def _scores(model: Any) -> tuple[str, bool, str]:
    """Run H2O on a tiny model against eager attention's column sums."""
    ids = torch.arange(12)[None] % 32
    with torch.no_grad():
        with patch(model):
            cache = EvictionCache(model, "h2o:heavy=8,recent=8")
            model(ids, **{cache_argument(model): cache})
            scores = cache.scores(0)[0, 0]
        model.set_attn_implementation("eager")
        weights = model(ids, output_attentions=True).attentions[0]
    error = float((weights.sum((1, 2))[0] - scores).abs().max())
    return f"equal eager's sums to {error:.0e}", error < 1e-4, "report this with `doctor --json`"
