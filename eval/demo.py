"""demo: the main job on the embedded model, in one table and one JSON file.

The same text runs through the same model under a full cache, a window without sinks, StreamingLLM
and H2O, all but the first at one budget; then each cache continues the text.
"""

import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from tqdm import tqdm

from kvevict import console
from kvevict.cache import EvictionCache
from kvevict.errors import KvevictError
from kvevict.eval.pages import table_page
from kvevict.eval.results import write_json
from kvevict.eval.texts import builtin_text
from kvevict.models.generation import kept_tokens
from kvevict.models.patch import patch
from kvevict.models.releases import cache_argument
from kvevict.models.small import SMALL, load
from kvevict.models.stream import stream

app = typer.Typer(add_completion=False, rich_markup_mode=None)
_COLUMNS = ("policy", "nll", "perplexity", "kept_tokens", "cache_bytes", "tokens_per_second")


def policies(budget: int) -> list[str]:
    """Return the four policies of the demo at one budget."""
    half = budget // 2
    return [
        "full",
        f"window:window={budget}",
        f"streaming_llm:sinks=4,window={budget - 4}",
        f"h2o:heavy={budget - half},recent={half}",
    ]


def run(
    model: Any,
    tokenizer: Any,
    text: str,
    *,
    tokens: int = 4096,
    budget: int = 256,
    chunk: int = 64,
    continue_by: int = 40,
) -> list[dict[str, Any]]:
    """Run the text under every policy.

    Args:
        model: a decoder-only model.
        tokenizer: its tokenizer.
        text: of at least `tokens` tokens.
        tokens: fed under each policy.
        budget: tokens kept by all policies but the full one.
        chunk: tokens a forward.
        continue_by: tokens generated afterwards, greedily.

    Returns:
        One row a policy; `nll` (nats) is the mean over the tokens after the budget is full.

    Raises:
        KvevictError: a text that is too short.
    """
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids[:, :tokens]
    if ids.shape[1] <= budget + 1:
        raise KvevictError(
            f"the text has {ids.shape[1]} tokens and the budget is {budget}: give a longer text"
        )
    if budget < 8:
        raise KvevictError(f"budget={budget}: give at least 8 tokens")
    rows = []
    with patch(model) as handle:
        for policy in policies(budget):
            cache = EvictionCache(model, policy)
            nll, seconds = _read(model, ids, cache, chunk, policy)
            scored = nll[budget:]
            mean = float(scored.mean())
            row = {
                "policy": str(cache.policy),
                "nll": mean,
                "perplexity": float(torch.tensor(mean).exp()),
                "kept_tokens": kept_tokens(cache),
                "cache_bytes": cache.nbytes(),
                "tokens_per_second": (ids.shape[1] - 1) / seconds,
                "tokens_fed": ids.shape[1] - 1,
                "tokens_scored": len(scored),
                "scored_from": budget,
                "budget": cache.capacity,
                "chunk": chunk,
                "evict_every": 1,
                "positions": cache.positions,
                "backend": cache.backend,
                "bos": False,
            }
            row["continuation"] = _continue(handle.model, tokenizer, ids, cache, continue_by)
            rows.append(row)
    return rows


def _read(
    model: Any, ids: torch.Tensor, cache: EvictionCache, chunk: int, policy: str
) -> tuple[torch.Tensor, float]:
    """Stream all but the last token; return the NLL of each and the seconds taken."""
    parts = []
    began = time.perf_counter()
    with tqdm(total=ids.shape[1] - 1, desc=policy, unit="tok", leave=False) as bar:
        for step in stream(model, ids[:, :-1], cache, chunk=chunk):
            parts.append(step.nll)
            bar.update(len(step.nll))
    return torch.cat(parts), time.perf_counter() - began


def _continue(
    model: Any, tokenizer: Any, ids: torch.Tensor, cache: EvictionCache, count: int
) -> str:
    """Continue the text greedily from the cache as it stands, in the same stream."""
    with torch.no_grad():
        out = model.generate(
            ids.to(model.device),
            attention_mask=torch.ones_like(ids).to(model.device),
            max_new_tokens=count,
            do_sample=False,
            **{cache_argument(model): cache},
        )
    return str(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))


@app.command()
def demo(
    file: Annotated[Path | None, typer.Option(help="Text; Python's own help topics if none.")] = (
        None
    ),
    tokens: Annotated[int, typer.Option(min=16, help="Tokens read under each policy.")] = 4096,
    budget: Annotated[int, typer.Option(min=8, help="Tokens kept.")] = 256,
    chunk: Annotated[int, typer.Option(min=1, help="Tokens a forward.")] = 64,
    out: Annotated[Path, typer.Option(help="Folder for the JSON and the HTML page.")] = Path(
        "kvevict-demo"
    ),
    model: Annotated[str, typer.Option(help="Folder, hub id or smollm2-135m.")] = SMALL,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    device: Annotated[str, typer.Option(help="A torch device such as cpu or cuda.")] = "cpu",
    seed: Annotated[int, typer.Option(help="Seed of every random draw.")] = 0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object on stdout.")
    ] = False,
) -> None:
    """Run a text under full, window, StreamingLLM and H2O; print a table, write JSON and HTML."""
    torch.manual_seed(seed)
    text = console.read_text(file, "text") if file else builtin_text()
    loaded, tokenizer = load(model, dtype=dtype, device=device)
    rows = run(loaded, tokenizer, text, tokens=tokens, budget=budget, chunk=chunk)
    config = {"model": model, "dtype": dtype, "device": device, "seed": seed, "budget": budget}
    config |= {"text": str(file) if file else "pydoc_data.topics", "machine": console.machine()}
    whole = {"command": "demo", "config": config, "versions": console.versions(), "rows": rows}
    write_json(out / "demo.json", whole)
    table_page(out / "demo.html", "kvevict demo", whole, _COLUMNS)
    if as_json:
        console.emit("demo", config, rows)
        return
    console.show(rows, _COLUMNS, title=f"{model}, {rows[0]['tokens_fed']:,} tokens, chunk {chunk}")
    for row in rows:
        typer.echo(f"\n{row['policy']} goes on:\n  {' '.join(row['continuation'].split())}")
    typer.echo(f"\nNumbers: {out / 'demo.json'}   Page: {out / 'demo.html'}")
