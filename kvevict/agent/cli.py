"""Commands of `kvevict agent`: plan, apply, validate, replay, advise, demo."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer
from tqdm import tqdm  # type: ignore[import-untyped]

from kvevict.agent.advise import advise as advise_history
from kvevict.agent.advise import totals
from kvevict.agent.cli_output import (
    FAILED,
    format_of,
    guarded,
    make_console,
    print_json,
    print_table,
    read_input,
    read_usage,
    tokens,
    write_file,
    write_output,
)
from kvevict.agent.demo import SYSTEMS, run_demo
from kvevict.agent.formats import to_normal
from kvevict.agent.manager import HistoryManager
from kvevict.agent.message_policy import message_policies
from kvevict.agent.repairs import Repair
from kvevict.agent.replay import replay as replay_session
from kvevict.agent.timeline import timeline
from kvevict.agent.validate import repair as repair_history
from kvevict.agent.validate import validate as validate_history
from kvevict.errors import HistoryError

app = typer.Typer(
    help="Message histories: what a policy would evict, what it costs, and what is wrong.",
    no_args_is_help=True,
    add_completion=False,
)

FileArgument = Annotated[str, typer.Argument(help="JSON or JSON lines; - reads standard input.")]
FormatOption = Annotated[str, typer.Option("--format", help="Format of the file, or auto.")]
PolicyOption = Annotated[
    str, typer.Option("--policy", help="Message policy, such as codex_local:share=0.8.")
]
PoliciesOption = Annotated[
    list[str] | None, typer.Option("--policy", help="Message policy; repeat to compare.")
]
WindowOption = Annotated[str, typer.Option("--window", help="Window in tokens, such as 200k.")]
OutputOption = Annotated[str, typer.Option("--max-output", help="Tokens reserved for the answer.")]
CounterOption = Annotated[
    str, typer.Option("--counter", help="chars, chars:3.0 (characters a token) or hf:PATH.")
]
SummarizerOption = Annotated[
    str, typer.Option("--summarizer", help="extractive, hf:MODEL or openai:BASE_URL.")
]
PricesOption = Annotated[
    str, typer.Option("--prices", help="Price table (sonnet, opus, gpt-5, ...) or a .json file.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
SeedOption = Annotated[
    int, typer.Option("--seed", help="Seed; without effect here: all results are determined.")
]


@app.command()
def plan(
    file: FileArgument,
    policy: PoliciesOption = None,
    format: FormatOption = "auto",
    window: WindowOption = "200k",
    max_output: OutputOption = "32k",
    counter: CounterOption = "chars",
    summarizer: SummarizerOption = "extractive",
    usage: Annotated[
        str | None, typer.Option("--usage", help="JSON file: usage object of the last call.")
    ] = None,
    json_out: JsonOption = False,
    seed: SeedOption = 0,
) -> None:
    """Show what policies would do to a history now, without writing anything."""
    with guarded():
        obj, _ = read_input(file)
        name = format_of(obj, format)
        rows: list[dict[str, Any]] = []
        for text in policy or ["claude_code", "codex_local", "opencode_compact", "shape"]:
            manager = HistoryManager(
                text, name, tokens(window), tokens(max_output), counter, summarizer
            )
            report = manager.prepare(obj, read_usage(usage)).report
            rows.append(
                {
                    "policy": str(manager.policy),
                    "tokens_before": report.tokens + report.freed_tokens,
                    "tokens": report.tokens,
                    "freed_tokens": report.freed_tokens,
                    "floor_tokens": report.floor_tokens,
                    "reused_prefix_tokens": report.reused_prefix_tokens,
                    "stages": list(report.stages),
                    "over_window": report.over_window,
                    "violations": dict(Counter(v.code for v in report.violations)),
                    "actions": [
                        {"stage": a.stage, "verb": a.verb, "done": a.done, "why": a.why}
                        | {"freed_tokens": a.freed, "messages": list(a.messages)}
                        for a in report.actions
                    ],
                }
            )
        if json_out:
            config = {"file": file, "format": name, "window": tokens(window), "counter": counter}
            print_json(
                "agent plan", {**config, "max_output": tokens(max_output), "seed": seed}, rows
            )
            return
        columns = {
            "policy": "policy",
            "tokens_before": "before",
            "tokens": "after",
            "freed_tokens": "freed",
            "floor_tokens": "floor",
            "stages": "acted",
            "over_window": "beyond window",
        }
        print_table(f"{file} ({name})", rows, columns, {"stages": lambda v: ", ".join(v) or "-"})
        for row in rows:
            for action in row["actions"]:
                mark = "did" if action["done"] else "left"
                typer.echo(
                    f"{row['policy']}: {mark} {action['stage']} ({action['verb']}): "
                    f"{action['why']}, {len(action['messages'])} messages"
                )


@app.command()
def apply(
    file: FileArgument,
    policy: PolicyOption,
    format: FormatOption = "auto",
    window: WindowOption = "200k",
    max_output: OutputOption = "32k",
    counter: CounterOption = "chars",
    summarizer: SummarizerOption = "extractive",
    usage: Annotated[
        str | None, typer.Option("--usage", help="JSON file: usage object of the last call.")
    ] = None,
    out: Annotated[
        str | None, typer.Option("--out", help="Where the request goes; standard output.")
    ] = None,
    state: Annotated[
        str | None, typer.Option("--state", help="JSON file that keeps the edit log between calls.")
    ] = None,
    store: Annotated[
        str | None, typer.Option("--store", help="Folder for externalised texts.")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Compact now, whatever the trigger.")
    ] = False,
    focus: Annotated[str, typer.Option("--focus", help="What a summary should focus on.")] = "",
    json_out: JsonOption = False,
    seed: SeedOption = 0,
) -> None:
    """Write the request that a policy makes of a history."""
    with guarded():
        if json_out and out is None:
            raise HistoryError("--json prints the report: name a file for the request with --out")
        obj, lines = read_input(file)
        name = format_of(obj, format)
        known = read_input(state)[0] if state and Path(state).exists() else None
        manager = HistoryManager(
            policy, name, tokens(window), tokens(max_output), counter, summarizer, store, known
        )
        if force or focus:
            manager.compact(focus)
        prepared = manager.prepare(obj, read_usage(usage))
        write_output(prepared.messages, lines, out)
        if state:
            write_file(state, json.dumps(manager.state) + "\n")
        report = prepared.report
        row = {"policy": str(manager.policy), **report.to_dict()}
        if json_out:
            config = {"file": file, "format": name, "window": tokens(window), "out": out}
            print_json("agent apply", {**config, "seed": seed}, [row])
        else:
            typer.echo(
                f"{row['policy']}: {report.tokens:,} tokens, {report.freed_tokens:,} freed"
                + (f" by {', '.join(report.stages)}" if report.stages else ""),
                err=True,
            )
        if report.over_window:
            typer.echo(f"error: the request does not fit a window of {window}", err=True)
            raise typer.Exit(FAILED)


@app.command()
def validate(
    file: FileArgument,
    format: FormatOption = "auto",
    strict: Annotated[
        bool, typer.Option("--strict", help="Also demand that user and assistant alternate.")
    ] = False,
    repair: Annotated[bool, typer.Option("--repair", help="Repair what can be repaired.")] = False,
    out: Annotated[
        str | None, typer.Option("--out", help="Where the repaired history goes.")
    ] = None,
    json_out: JsonOption = False,
    seed: SeedOption = 0,
) -> None:
    """Check a history against the invariants; exit code 1 when one is broken."""
    with guarded():
        obj, lines = read_input(file)
        name = format_of(obj, format)
        repairs: list[Repair] = []
        if repair:
            obj, repairs = repair_history(obj, name)
            if out is not None:
                write_output(obj, lines, out)
        found = validate_history(obj, name, strict)
        rows: list[dict[str, Any]] = [
            {"code": v.code, "index": v.index, "path": v.path, "message": v.message, "done": kind}
            for kind, group in (("repaired", repairs), ("broken", found))
            for v in group
        ]
        if json_out:
            config = {"file": file, "format": name, "strict": strict, "repair": repair}
            print_json("agent validate", {**config, "seed": seed}, rows)
        elif rows:
            columns = {"code": "code", "path": "where", "message": "what", "done": ""}
            print_table(f"{file} ({name})", rows, columns)
        else:
            typer.echo(f"{file} ({name}): sound, {len(to_normal(obj, name))} messages")
        if found:
            raise typer.Exit(FAILED)


@app.command()
def replay(
    file: FileArgument,
    policy: PoliciesOption = None,
    format: FormatOption = "auto",
    window: WindowOption = "200k",
    max_output: OutputOption = "32k",
    prices: PricesOption = "sonnet",
    counter: CounterOption = "chars",
    summarizer: SummarizerOption = "extractive",
    html: Annotated[
        str | None, typer.Option("--html", help="Write a timeline as a web page.")
    ] = None,
    json_out: JsonOption = False,
    seed: SeedOption = 0,
) -> None:
    """Walk a recorded session call by call under policies, with the bill."""
    with guarded():
        obj, _ = read_input(file)
        history = to_normal(obj, format_of(obj, format))
        results = []
        for text in policy or ["full", "complexity_trap_mask:polling=10", "claude_code", "shape"]:
            with tqdm(desc=text, unit="call", leave=False, disable=None, file=sys.stderr) as bar:

                def step(n: int, total: int, bar: Any = bar) -> None:
                    bar.total = total
                    bar.update(n - bar.n)

                results.append(
                    replay_session(
                        history,
                        text,
                        tokens(window),
                        prices,
                        max_output=tokens(max_output),
                        counter=counter,
                        summarizer=summarizer,
                        progress=step,
                    )
                )
        if html is not None:
            write_file(html, timeline(history, results, f"Replay of {Path(file).name}"))
        rows = [r.to_dict() for r in results]
        if json_out:
            config = {"file": file, "format": history.format, "window": tokens(window)}
            print_json("agent replay", {**config, "prices": prices, "seed": seed}, rows)
            return
        print_replay(f"{file} ({history.format}), {prices}", rows)


def print_replay(title: str, rows: list[dict[str, Any]]) -> None:
    """Print the table of a replay."""
    columns = {
        "policy": "policy",
        "calls": "calls",
        "mean_context": "mean",
        "peak_context": "peak",
        "prefix_breaks": "breaks",
        "overflows": "overflows",
        "summary_calls": "summaries",
        "cost_cached": "$ cached",
        "cost_uncached": "$ uncached",
    }
    money = dict.fromkeys(("cost_cached", "cost_uncached"), "${:,.2f}".format)
    print_table(title, rows, columns, {"mean_context": "{:,.0f}".format, **money})


@app.command()
def advise(
    file: FileArgument,
    format: FormatOption = "auto",
    prices: PricesOption = "sonnet",
    counter: CounterOption = "chars",
    top: Annotated[int, typer.Option("--top", help="Show only the largest blocks; 0 all.")] = 20,
    json_out: JsonOption = False,
    seed: SeedOption = 0,
) -> None:
    """Answer the four design questions for every block, with reasons."""
    with guarded():
        obj, _ = read_input(file)
        history = to_normal(obj, format_of(obj, format))
        found = advise_history(history, prices, counter)
        if top > 0:
            found_shown = sorted(found, key=lambda a: -a.tokens)[:top]
            found_shown.sort(key=lambda a: (a.message, a.block))
        else:
            found_shown = found
        rows = [a.to_dict() for a in found_shown]
        if json_out:
            config = {"file": file, "format": history.format, "prices": prices, "top": top}
            config = {**config, "totals": totals(found), "seed": seed}
            print_json("agent advise", config, rows)
            return
        for row in rows:
            row["where"] = f"{row['message']}.{row['block']}"
            row["what"] = f"{row['kind']} {row['tool'] or ''}".strip()
            row["why"] = row["reasons"][4]
            row["answers"] = (
                f"{row['reasons'][0]}; {row['reasons'][1]}; "
                f"{'shown' if row['visible'] else 'silent'}: {row['reasons'][3]}"
            )
        columns = {"where": "block", "what": "what", "tokens": "tokens", "verb": "do"}
        columns |= {"break_even": "pays after", "why": "because", "answers": "answers"}
        print_table(f"{file} ({history.format})", rows, columns)
        print_table("In all", totals(found), {"verb": "do", "tokens": "tokens", "blocks": "blocks"})


@app.command()
def demo(
    html: Annotated[
        str | None, typer.Option("--html", help="Write a timeline as a web page.")
    ] = None,
    json_out: JsonOption = False,
    seed: SeedOption = 0,
) -> None:
    """Run the login-bug session under Claude Code, Codex and OpenCode side by side."""
    with guarded():
        rows, history, results = run_demo()
        if html is not None:
            write_file(html, timeline(history, results, "One login bug, three agents"))
        if json_out:
            config = {"policies": [system.policy for system in SYSTEMS], "seed": seed}
            print_json("agent demo", config, rows)
            return
        columns = {"system": "system", "policy": "policy", "tokens_before": "before"}
        columns |= {"tokens": "after", "messages": "messages", "outcome": "outcome"}
        print_table("A login bug: 26 messages", rows, columns)
        console = make_console()
        for row in rows:
            console.print(f"\n{row['system']}:", style="bold")
            for line in row["left"]:
                console.print(
                    f"  {line}", markup=False, highlight=False, no_wrap=True, overflow="ellipsis"
                )


@app.command()
def policies(json_out: JsonOption = False, seed: SeedOption = 0) -> None:
    """List the message policies and what each does."""
    rows = []
    for name, cls in message_policies().items():
        first = (cls.__doc__ or "").strip().splitlines()[0]
        rows.append({"policy": name, "what": first})
    if json_out:
        print_json("agent policies", {"seed": seed}, rows)
    else:
        print_table("Message policies", rows, {"policy": "policy", "what": "what"})


if __name__ == "__main__":
    app()
