"""The eval commands: what they ask the user for; the work is in the modules they call."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kvevict import console
from kvevict.errors import KvevictError
from kvevict.eval import options as o
from kvevict.eval.caches import CacheSettings

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    help="Perplexity, streams, StreamEval, needles, divergence.",
)
_DEFAULT = ["full", "window:window=256", "streaming_llm:sinks=4,window=252"]
_DEFAULT += ["h2o:heavy=128,recent=128"]
_SPEED = ("kept_tokens", "cache_bytes", "tokens_per_second")


def _settings(chunk: int, positions: str, backend: str, evict_every: int) -> CacheSettings:
    return CacheSettings(chunk, positions, backend, evict_every)  # type: ignore[arg-type]


@app.command()
def ppl(
    model: o.Model = "smollm2-135m",
    policy: o.Policies = _DEFAULT,
    budget: o.Budgets = None,
    text: o.Texts = None,
    max_tokens: o.MaxTokens = "4096",
    chunk: o.Chunk = 64,
    bucket: o.Bucket = 256,
    score_from: Annotated[int, typer.Option(min=1, help="First token scored.")] = 1,
    bos: o.Bos = None,
    positions: o.Positions = "auto",
    backend: o.Backend = "auto",
    evict_every: o.EvictEvery = 1,
    out: o.Out = None,
    resume: o.Resume = False,
    seed: o.Seed = 0,
    dtype: o.Dtype = "float32",
    device: o.Device = "cpu",
    json: o.Json = False,
) -> None:
    """Loss and perplexity of texts under policies and budgets, with the full cache as control."""
    texts, settings = o.read_texts(text), _settings(chunk, positions, backend, evict_every)
    limit = o.count(max_tokens)
    run = o.session(
        "ppl",
        out,
        resume,
        json,
        settings,
        model=model,
        policies=policy,
        budgets=budget or [],
        texts=texts,
        max_tokens=limit,
        bucket=bucket,
        score_from=score_from,
        bos=bos,
        seed=seed,
        dtype=dtype,
        device=device,
    )

    def work(loaded: Any, tokenizer: Any, folder: Any) -> Any:
        from kvevict.eval import perplexity
        from kvevict.eval.texts import encode

        streams = [encode(tokenizer, t, limit, bos) for t in texts]
        return perplexity.run(
            loaded,
            streams,
            policy,
            budgets=budget or [],
            settings=settings,
            bucket=bucket,
            score_from=score_from,
            folder=folder,
            seed=seed,
        )

    run.run(work, ("policy", "nll", "perplexity", "nll_delta", "perplexity_evicting", *_SPEED))


@app.command()
def stream(
    model: o.Model = "smollm2-135m",
    policy: o.Policies = ["streaming_llm:sinks=4,window=1020"],  # noqa: B006
    budget: o.Budgets = None,
    text: o.Texts = None,
    max_tokens: o.MaxTokens = "100000",
    chunk: o.Chunk = 64,
    bucket: o.Bucket = 1024,
    fresh: Annotated[int, typer.Option(min=0, help="Fresh-start controls; 0: none.")] = 4,
    fresh_lead: Annotated[int | None, typer.Option(min=1, help="Tokens before each.")] = None,
    fresh_span: Annotated[int, typer.Option(min=64, help="Tokens compared at each.")] = 512,
    gap: Annotated[str | None, typer.Option(help="Shifts to test, such as 16k,1M,4M.")] = None,
    gap_span: Annotated[int, typer.Option(min=16, help="Tokens read behind a gap.")] = 1020,
    checkpoint_every: Annotated[
        str, typer.Option(help="Tokens between checkpoints; 0: none.")
    ] = "8192",
    repeat: Annotated[bool, typer.Option("--repeat", help="Start the text over at its end.")] = (
        False
    ),
    bos: o.Bos = None,
    positions: o.Positions = "auto",
    backend: o.Backend = "auto",
    evict_every: o.EvictEvery = 1,
    out: o.Out = None,
    resume: o.Resume = False,
    seed: o.Seed = 0,
    dtype: o.Dtype = "float32",
    device: o.Device = "cpu",
    json: o.Json = False,
) -> None:
    """Loss, memory and speed along a long stream; resumable; with fresh-start controls."""
    texts, settings = o.read_texts(text), _settings(chunk, positions, backend, evict_every)
    limit, every = o.count(max_tokens), o.counts(checkpoint_every)[0] if out else 0
    every -= every % chunk
    gaps = o.counts(gap) if gap else []
    run = o.session(
        "stream",
        out,
        resume,
        json,
        settings,
        model=model,
        policies=policy,
        budgets=budget or [],
        texts=texts,
        max_tokens=limit,
        bucket=bucket,
        fresh=fresh,
        fresh_lead=fresh_lead,
        fresh_span=fresh_span,
        gaps=gaps,
        gap_span=gap_span,
        checkpoint_every=every,
        repeat=repeat,
        bos=bos,
        seed=seed,
        dtype=dtype,
        device=device,
    )

    def work(loaded: Any, tokenizer: Any, folder: Any) -> Any:
        from kvevict.eval import gap as gap_test
        from kvevict.eval import stream as long
        from kvevict.eval.texts import joined

        ids = joined(tokenizer, texts, limit, bos, repeat)
        common = {"budgets": budget or [], "settings": settings, "folder": folder, "seed": seed}
        done = long.run(
            loaded,
            ids,
            policy,
            bucket=bucket,
            fresh=long.FreshStarts(fresh, fresh_lead, fresh_span),
            checkpoint_every=every,
            **common,
        )
        if gaps:
            done += gap_test.run(loaded, ids, policy, gaps, span=gap_span, **common)
        return done

    columns = ("policy", "position", "gap", "positions", "nll", "stream_nll", "fresh_nll")
    run.run(work, (*columns, "nll_delta", *_SPEED))


@app.command()
def streameval(
    model: o.Model = "smollm2-135m",
    policy: o.Policies = _DEFAULT,
    budget: o.Budgets = None,
    lines: Annotated[int, typer.Option(min=2, help="Lines of facts.")] = 200,
    every: Annotated[int, typer.Option(min=1, help="Lines between questions.")] = 10,
    back: Annotated[int, typer.Option(min=1, help="Lines between fact and question.")] = 20,
    chat: Annotated[Path | None, typer.Option(help="JSONL with turns: hold a chat too.")] = None,
    conversations: Annotated[int, typer.Option(min=1, help="Of the chat.")] = 8,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="An answer of the chat.")] = 48,
    chunk: o.Chunk = 64,
    positions: o.Positions = "auto",
    backend: o.Backend = "auto",
    evict_every: o.EvictEvery = 1,
    out: o.Out = None,
    resume: o.Resume = False,
    seed: o.Seed = 0,
    dtype: o.Dtype = "float32",
    device: o.Device = "cpu",
    json: o.Json = False,
) -> None:
    """A stream of facts with a question every few lines; and a chat on one cache."""
    from kvevict.eval.streameval import Workload

    settings, workload = (
        _settings(chunk, positions, backend, evict_every),
        Workload(lines, every, back, seed),
    )
    talks = None
    if chat:
        from kvevict.eval.chat import read_prompts

        talks = read_prompts(chat, conversations)
    run = o.session(
        "streameval",
        out,
        resume,
        json,
        settings,
        model=model,
        policies=policy,
        budgets=budget or [],
        lines=lines,
        every=every,
        back=back,
        conversations=talks,
        max_new_tokens=max_new_tokens,
        seed=seed,
        dtype=dtype,
        device=device,
    )

    def work(loaded: Any, tokenizer: Any, folder: Any) -> Any:
        from kvevict.eval import chat as talk
        from kvevict.eval import streameval as facts

        common = {"budgets": budget or [], "settings": settings, "folder": folder, "seed": seed}
        done = facts.run(loaded, tokenizer, policy, workload=workload, **common)
        if talks:
            done += talk.run(
                loaded, tokenizer, talks, policy, max_new_tokens=max_new_tokens, **common
            )
        return done

    columns = ("policy", "exact_match", "answer_nll", "answer_rank", "distance_tokens")
    run.run(work, (*columns, "prompt_nll", "distinct_4grams", "max_kept_tokens", *_SPEED))


@app.command()
def needle(
    model: o.Model = "smollm2-135m",
    policy: o.Policies = _DEFAULT,
    budget: o.Budgets = None,
    task: Annotated[list[str], typer.Option(help="Once or more.")] = ["single"],  # noqa: B006
    rows: Annotated[Path | None, typer.Option(help="JSONL or parquet in kvpress's schema.")] = None,
    length: Annotated[str, typer.Option(help="Tokens of context, such as 512,1k.")] = "1k",
    depth: Annotated[str, typer.Option(help="Shares of the context.")] = "0,0.25,0.5,0.75,1",
    samples: Annotated[int, typer.Option(min=1, help="Items a cell.")] = 4,
    question: Annotated[str, typer.Option(help="after, or before too.")] = "after",
    distractors: Annotated[
        bool, typer.Option("--distractors", help="Distractor task, and the needed part alone.")
    ] = False,
    generate: Annotated[bool, typer.Option("--generate", help="Also answer greedily.")] = False,
    haystack: Annotated[Path | None, typer.Option(help="Prose to hide in; noise if none.")] = None,
    chunk: Annotated[int, typer.Option(min=0, help="Tokens a forward; 0: context in one.")] = 0,
    positions: o.Positions = "auto",
    backend: o.Backend = "auto",
    evict_every: o.EvictEvery = 1,
    out: o.Out = None,
    resume: o.Resume = False,
    seed: o.Seed = 0,
    dtype: o.Dtype = "float32",
    device: o.Device = "cpu",
    json: o.Json = False,
) -> None:
    """Answers hidden in long contexts, by depth, length and budget."""
    from kvevict.eval import needle as asks
    from kvevict.eval import needle_data, needle_tasks

    settings = _settings(chunk, positions, backend, evict_every)
    tasks = ("distractor",) if distractors else tuple(task)
    unknown = [t for t in tasks if t not in needle_tasks.TASKS]
    if unknown:
        known = ", ".join(needle_tasks.TASKS)
        raise KvevictError(f"unknown task {unknown[0]!r}; known: {known}")
    lengths, depths = tuple(o.counts(length)), o.shares(depth)
    grid = asks.Grid(tasks, lengths, depths, samples, question, distractors, generate, seed)
    texts = [o.read_texts([haystack])[0]] if haystack else []
    filler = (
        needle_tasks.prose(needle_data.sentences(texts[0].text)) if texts else needle_tasks.noise
    )
    items = needle_data.read(rows) if rows else None
    run = o.session(
        "needle",
        out,
        resume,
        json,
        settings,
        model=model,
        policies=policy,
        budgets=budget or [],
        texts=texts,
        tasks=list(tasks),
        rows=[rows.name, len(items or [])] if rows else None,
        lengths=list(lengths),
        depths=list(depths),
        samples=samples,
        question=question,
        relevant_control=distractors,
        generate=generate,
        seed=seed,
        dtype=dtype,
        device=device,
    )

    def work(loaded: Any, tokenizer: Any, folder: Any) -> Any:
        return asks.run(
            loaded,
            tokenizer,
            policy,
            grid=grid,
            rows=items,
            filler=filler,
            budgets=budget or [],
            settings=settings,
            folder=folder,
        )

    columns = ("task", "length", "depth", "context", "policy", "answer_nll", "exact_match")
    run.run(work, (*columns, "answer_rank", "string_match", "kept_tokens"))


@app.command()
def divergence(
    model: o.Model = "smollm2-135m",
    policy: o.Policies = _DEFAULT[1:],
    budget: o.Budgets = None,
    text: o.Texts = None,
    max_tokens: o.MaxTokens = "2048",
    chunk: o.Chunk = 64,
    bucket: o.Bucket = 256,
    mass_at: Annotated[int, typer.Option(min=0, help="Places to measure attention mass.")] = 4,
    bos: o.Bos = None,
    positions: o.Positions = "auto",
    backend: o.Backend = "auto",
    evict_every: o.EvictEvery = 1,
    out: o.Out = None,
    resume: o.Resume = False,
    seed: o.Seed = 0,
    dtype: o.Dtype = "float32",
    device: o.Device = "cpu",
    json: o.Json = False,
) -> None:
    """KL to the full cache, top-1 agreement, retained attention mass."""
    texts, settings = o.read_texts(text), _settings(chunk, positions, backend, evict_every)
    limit = o.count(max_tokens)
    run = o.session(
        "divergence",
        out,
        resume,
        json,
        settings,
        model=model,
        policies=policy,
        budgets=budget or [],
        texts=texts,
        max_tokens=limit,
        bucket=bucket,
        mass_at=mass_at,
        bos=bos,
        seed=seed,
        dtype=dtype,
        device=device,
    )

    def work(loaded: Any, tokenizer: Any, folder: Any) -> Any:
        from kvevict.eval import divergence as compare
        from kvevict.eval.texts import joined

        return compare.run(
            loaded,
            joined(tokenizer, texts, limit, bos),
            policy,
            budgets=budget or [],
            settings=settings,
            bucket=bucket,
            mass_at=mass_at,
            folder=folder,
            seed=seed,
        )

    columns = ("policy", "kl", "kl_low", "kl_high", "top1_agreement", "attention_mass")
    run.run(work, (*columns, "nll_delta", *_SPEED))


if __name__ == "__main__":
    console.run(app)
