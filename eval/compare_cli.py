"""The compare command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kvevict import console
from kvevict.eval import options as o

app = typer.Typer(add_completion=False, rich_markup_mode=None)
_COLUMNS = (
    *("policy", "realisation", "budget", "nll", "nll_delta", "kl", "fact_nll"),
    *("kept_tokens", "recomputed_tokens", "turn", "context_tokens", "floor_tokens", "groups"),
    *("oracle_sum", "oracle_density"),
)


@app.command()
def compare(
    trajectory: Annotated[str, typer.Argument(help="JSON or JSON lines, in any known format.")],
    model: o.Model = "smollm2-135m",
    budgets: Annotated[str, typer.Option(help="Shares of what is no root.")] = ".75,.5,.25",
    turns: Annotated[int, typer.Option(min=1, help="Assistant turns that are scored.")] = 4,
    max_context: Annotated[str, typer.Option(help="Most tokens before a turn.")] = "8192",
    realisations: Annotated[
        str, typer.Option(help="Of message-level rows: text, kv, kv_reindex.")
    ] = "text,kv,kv_reindex",
    target: Annotated[int, typer.Option(min=8, help="Most tokens scored of a turn.")] = 160,
    chunk: Annotated[int, typer.Option(min=1, help="Tokens a forward.")] = 512,
    facts: Annotated[bool, typer.Option(help="Plant facts before the last turn.")] = True,
    prices: Annotated[str, typer.Option(help="Price table, such as sonnet, or a file.")] = "sonnet",
    format: Annotated[str, typer.Option(help="Of the trajectory, or auto.")] = "auto",
    out: o.Out = None,
    resume: o.Resume = False,
    seed: o.Seed = 0,
    dtype: o.Dtype = "float32",
    device: o.Device = "cpu",
    json: o.Json = False,
) -> None:
    """Token level against message level: one trajectory, the same budget in rendered tokens."""
    from kvevict.agent.prices import get_prices
    from kvevict.agent.replay import read_session
    from kvevict.errors import KvevictError
    from kvevict.eval.planted import DEPTHS
    from kvevict.models.realise import check_realisation

    shares = o.shares(budgets)
    if not shares or not all(0 < s < 1 for s in shares):
        raise KvevictError(f"--budgets {budgets!r}: give shares between 0 and 1, such as .75,.5")
    hows = tuple(dict.fromkeys(h.strip() for h in realisations.split(",") if h.strip()))
    for how in hows:
        check_realisation(how)
    if not hows:
        raise KvevictError("--realisations is empty: give text, kv or kv_reindex")
    table = get_prices(prices)
    source = Path(trajectory)
    history = read_session(source, format)
    limit = o.count(max_context) or 1
    if resume and out is None:
        raise KvevictError("--resume needs --out: the folder of the run to finish")
    config = {
        "trajectory": source.name,
        "messages": len(history),
        "model": model,
        "budgets": list(shares),
        "turns": turns,
        "max_context": limit,
        "realisations": list(hows),
        "target": target,
        "chunk": chunk,
        "facts": facts,
        "prices": table.name,
        "seed": seed,
        "dtype": dtype,
        "device": device,
    }

    def work(loaded: Any, tokenizer: Any, folder: Any) -> Any:
        from kvevict.eval.compare import run
        from kvevict.eval.compare_turn import Protocol

        return run(
            loaded,
            tokenizer,
            history,
            protocol=Protocol(shares, hows, target, chunk, seed=seed),
            turns=turns,
            max_context=limit,
            depths=DEPTHS if facts else (),
            prices=table,
            title=source.name,
            folder=folder,
        )

    o.Session("compare", config, out, resume, json, room="").run(work, _COLUMNS)


if __name__ == "__main__":
    console.run(app)
