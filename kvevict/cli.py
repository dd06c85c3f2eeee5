"""The command line. Sub-commands are imported when they are called, so that help is instant."""

from __future__ import annotations

from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from kvevict import console
from kvevict.errors import KvevictError

# Commands that live in a room of their own, as module:object, with the line that help shows.
_ROOMS = {
    "agent": ("kvevict.agent.cli:app", "Evict from message histories: plan, apply, replay, ..."),
    "bench": ("kvevict.eval.bench:app", "Measure decode, prefill and streams on this machine."),
    "compare": ("kvevict.eval.compare_cli:app", "Token level against message level."),
    "demo": ("kvevict.eval.demo:app", "The main job on the embedded model: run every policy."),
    "eval": ("kvevict.eval.cli:app", "Perplexity, streams, StreamEval, needles, divergence."),
    "lm-eval": ("kvevict.eval.lm_eval_cli:app", "lm-evaluation-harness under a policy."),
    "report": ("kvevict.eval.report_cli:app", "One HTML page from a folder of results."),
    "serve": ("kvevict.models.serve:app", "transformers' server with a patched model."),
}


class _Rooms(TyperGroup):
    """A group whose rooms are imported on demand."""

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted({*super().list_commands(ctx), *(n for n in _ROOMS if _present(n))})

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in _ROOMS or not _present(cmd_name):
            return super().get_command(ctx, cmd_name)
        return TyperCommand(cmd_name, help=_ROOMS[cmd_name][1], rich_markup_mode=None)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if not args or args[0] not in _ROOMS or not _present(args[0]):
            return super().resolve_command(ctx, args)
        module, _, name = _ROOMS[args[0]][0].partition(":")
        command = typer.main.get_command(getattr(import_module(module), name))
        return args[0], command, args[1:]


app = typer.Typer(
    cls=_Rooms,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Makes language models and agents forget well.",
)

JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
SeedOption = Annotated[int, typer.Option(help="Seed of every random draw.")]
DtypeOption = Annotated[str, typer.Option(help="float32, bfloat16 or float16.")]
DeviceOption = Annotated[str, typer.Option(help="A torch device such as cpu or cuda.")]


@app.command()
def generate(
    model: Annotated[str, typer.Argument(help="Folder, hub id or smollm2-135m.")] = "smollm2-135m",
    policy: Annotated[str, typer.Option(help="Such as h2o:heavy=128,recent=128.")] = (
        "streaming_llm:sinks=4,window=1020"
    ),
    prompt: Annotated[str | None, typer.Option(help="The prompt itself.")] = None,
    file: Annotated[Path | None, typer.Option(help='File with the prompt; "-" is stdin.')] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 128,
    chunk: Annotated[int | None, typer.Option(min=1, help="Prefill chunk in tokens.")] = None,
    positions: Annotated[str, typer.Option(help="auto, in_cache or original.")] = "auto",
    evict_every: Annotated[int, typer.Option(min=1)] = 1,
    chat: Annotated[bool, typer.Option(help="Use the chat template where there is one.")] = True,
    sample: Annotated[bool, typer.Option("--sample", help="Sample instead of greedy.")] = False,
    stream: Annotated[bool, typer.Option(help="Print text as it comes.")] = True,
    dtype: DtypeOption = "float32",
    device: DeviceOption = "cpu",
    seed: SeedOption = 0,
    json: JsonFlag = False,
) -> None:
    """Continue a prompt with the cache held to a policy's budget."""
    from kvevict.policy import parse

    chosen = parse(policy)
    if prompt is not None and file is not None:
        raise KvevictError("give --prompt or --file, not both")
    text = prompt if prompt is not None else console.read_text(file, "prompt")
    if not text.strip():
        raise KvevictError("--prompt is empty: give a text")

    import torch
    from transformers import TextStreamer

    from kvevict.models.generation import generate_text
    from kvevict.models.small import load

    torch.manual_seed(seed)
    loaded, tokenizer = load(model, dtype=dtype, device=device)
    live = stream and not json
    out = generate_text(
        loaded,
        tokenizer,
        text,
        chosen,
        max_new_tokens=max_new_tokens,
        chunk=chunk,
        chat=chat,
        positions=positions,  # type: ignore[arg-type]
        evict_every=evict_every,
        sample=sample,
        streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
        if live
        else None,
    )
    row = {"policy": str(chosen), "budget": chosen.capacity if not chosen.has_shares else None}
    row |= {**asdict(out), "chunk": chunk, "evict_every": evict_every, "seed": seed}
    if json:
        console.emit("generate", {"model": model, "dtype": dtype, "device": device}, [row])
        return
    if not live:
        typer.echo(out.text)
    typer.echo(
        f"[{out.prompt_tokens} prompt + {out.new_tokens} new tokens, {out.kept_tokens} kept, "
        f"{out.cache_bytes:,} cache bytes, {out.tokens_per_second:.1f} tokens/s, {chosen}]",
        err=True,
    )


@app.command()
def plan(
    model: Annotated[str, typer.Argument(help="Folder, hub id or smollm2-135m.")],
    policy: Annotated[list[str], typer.Option(help="Once or more.")] = ["full"],  # noqa: B006
    context: Annotated[str, typer.Option(help="Tokens, such as 8192 or 128k.")] = "8k",
    batch: Annotated[int, typer.Option(min=1)] = 1,
    dtype: DtypeOption = "bfloat16",
    evict_every: Annotated[int, typer.Option(min=1)] = 1,
    seed: SeedOption = 0,
    json: JsonFlag = False,
) -> None:
    """Count the exact cache bytes of a model under policies, without its weights."""
    from kvevict.models.planner import plan as count
    from kvevict.models.small import load_config

    tokens = read_tokens(context)
    config = load_config(model)
    rows = [count(config, p, tokens, batch, dtype, evict_every) for p in policy]
    if json:
        console.emit("plan", {"model": model, "context": tokens, "batch": batch}, rows)
    else:
        console.show(rows, title=f"{model}: {tokens:,} tokens x {batch}, {dtype}")


@app.command()
def policies(json: JsonFlag = False) -> None:
    """List the policies with their settings."""
    rows = policy_rows()
    if json:
        console.emit("policies", {}, rows)
    else:
        console.show(rows)


@app.command()
def doctor(json: JsonFlag = False) -> None:
    """Say what runs here: versions, devices, score backends, transformers' contract."""
    from kvevict.models.doctor import examine

    rows = examine()
    if json:
        console.emit("doctor", {}, rows)
    else:
        console.show(rows)
    if not all(row["ok"] for row in rows):
        raise typer.Exit(console.FAILED)


def policy_rows() -> list[dict[str, Any]]:
    """Return name, settings, what is kept and the source of every token policy."""
    import dataclasses
    import inspect

    import kvevict.policies  # noqa: F401
    from kvevict.policy import REGISTRY

    rows = []
    for name in sorted(REGISTRY):
        kind = REGISTRY[name]
        doc = inspect.getdoc(kind) or ""
        source = next((x for x in doc.splitlines() if x.startswith("Source:")), "")
        settings = ",".join(f"{f.name}={f.default}" for f in dataclasses.fields(kind))
        rows.append(
            {
                "policy": f"{name}:{settings}" if settings else name,
                "keeps": doc.splitlines()[0].rstrip("."),
                "source": source.removeprefix("Source:").split("(arXiv")[0].strip() or "control",
            }
        )
    return rows


def read_tokens(text: str) -> int:
    """Read a number of tokens such as 8192, 128k or 1M (k is 1,024).

    Raises:
        KvevictError: something else.
    """
    scale = {"k": 1024, "m": 1024 * 1024}.get(text[-1:].lower(), 1)
    digits = (text[:-1] if scale > 1 else text).replace("_", "").replace(",", "")
    if not digits.isdigit() or int(digits) < 1:
        raise KvevictError(f"{text!r} is no number of tokens: write 8192, 128k or 1M")
    return int(digits) * scale


def _present(name: str) -> bool:
    from importlib.util import find_spec

    try:
        return find_spec(_ROOMS[name][0].partition(":")[0]) is not None
    except ModuleNotFoundError:
        return False


def main() -> None:
    """Run the command line."""
    console.run(app)


if __name__ == "__main__":
    main()
