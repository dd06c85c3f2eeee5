"""The lm-eval command: lm-evaluation-harness with every request under a policy."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from kvevict import console
from kvevict.errors import KvevictError
from kvevict.policy import parse

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
def lm_eval(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="Folder, hub id or smollm2-135m.")],
    policy: Annotated[str, typer.Option(help="Such as h2o:heavy=128,recent=128.")] = "full",
    chunk: Annotated[int, typer.Option(min=1, help="Tokens a forward, likelihood tasks.")] = 64,
    positions: Annotated[str, typer.Option(help="auto, in_cache or original.")] = "auto",
    evict_every: Annotated[int, typer.Option(min=1, help="Tokens evicted at a time.")] = 1,
    max_length: Annotated[
        int | None, typer.Option(min=2, help="Longest request; the model's own if none.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    device: Annotated[str, typer.Option(help="A torch device such as cpu or cuda.")] = "cpu",
    seed: Annotated[int, typer.Option(help="Seed of every random draw.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Run lm-evaluation-harness under a policy; what is not listed here is passed on to it.

    For example: kvevict lm-eval smollm2-135m --policy h2o --tasks my_task --include_path tasks
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise KvevictError('lm-eval is not installed: pip install "kvevict[eval]"')
    chosen = str(parse(policy))
    if not any(a == "--tasks" or a.startswith("--tasks=") for a in context.args):
        raise KvevictError("name the tasks: --tasks NAME, with --include_path FOLDER for your own")
    clash = [a for a in context.args if a.split("=")[0] in ("--model", "--model_args")]
    if clash:
        raise KvevictError(f"{clash[0]}: the model is the first argument here; leave it out")
    from kvevict.models.small import resolve

    arguments: dict[str, Any] = {"pretrained": resolve(model), "policy": chosen, "chunk": chunk}
    arguments |= {"positions": positions, "evict_every": evict_every, "dtype": dtype}
    if max_length is not None:
        arguments["max_length"] = max_length
    passed = ["--model", "kvevict", "--model_args", json.dumps(arguments)]
    passed += ["--device", device, "--seed", str(seed), *context.args]
    if not as_json:
        _run(passed)
        return
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        _run([*passed, "--output_path", folder])
        results = [json.loads(p.read_text()) for p in sorted(Path(folder).rglob("results_*.json"))]
    if not results:
        raise KvevictError("lm-eval wrote no results: see its messages above")
    settings = {"policy": chosen, "chunk": chunk, "positions": positions}
    settings |= {"evict_every": evict_every}
    rows = [
        settings
        | {"task": task}
        | {_snake(k): v for k, v in measures.items() if v != "N/A" and k != "alias"}
        for task, measures in results[-1]["results"].items()
    ]
    config = {"model": model, "dtype": dtype, "device": device, "seed": seed}
    console.emit("lm-eval", config | {"passed_on": context.args}, rows)


def _run(arguments: list[str]) -> None:
    """Call lm-eval's own command line with our model registered."""
    from lm_eval.__main__ import cli_evaluate

    import kvevict.eval.lm_eval_model  # noqa: F401  registers the model

    before = sys.argv
    sys.argv = ["lm-eval", "run", *arguments]
    try:
        cli_evaluate()
    finally:
        sys.argv = before


def _snake(name: str) -> str:
    """Return lm-eval's "acc,none" as acc, "acc,filter" as acc_filter."""
    measure, _, kind = name.partition(",")
    return measure if kind in ("", "none") else f"{measure}_{kind.replace('-', '_')}"


if __name__ == "__main__":
    console.run(app)
