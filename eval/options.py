"""options: what the eval commands share: options, one run from its settings to its output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from kvevict import console
from kvevict.errors import KvevictError
from kvevict.eval.caches import CacheSettings, short
from kvevict.eval.grid import Outcome, join_ranks, leave_ranks, ranks
from kvevict.eval.results import RunFolder
from kvevict.eval.texts import Text, read
from kvevict.policy import parse

Model = Annotated[str, typer.Argument(help="Folder, hub id or smollm2-135m.")]
Policies = Annotated[list[str], typer.Option("--policy", help="Such as full; once or more.")]
Budgets = Annotated[
    list[str] | None, typer.Option("--budget", help='Tokens or "20%"; once or more.')
]
Texts = Annotated[
    list[Path] | None, typer.Option("--text", help="UTF-8 file; Python's help topics if none.")
]
MaxTokens = Annotated[str | None, typer.Option(help="Tokens read, such as 4096 or 100k.")]
Chunk = Annotated[int, typer.Option(min=1, help="Tokens a forward; 1 is token-exact.")]
Positions = Annotated[str, typer.Option(help="auto, in_cache or original.")]
Backend = Annotated[str, typer.Option(help="auto, torch or triton.")]
EvictEvery = Annotated[int, typer.Option(min=1, help="Tokens evicted at a time (ranked).")]
Bos = Annotated[bool | None, typer.Option(help="BOS first; as the tokenizer does if not given.")]
Bucket = Annotated[int, typer.Option(min=1, help="Positions a bucket.")]
Out = Annotated[Path | None, typer.Option(help="Folder for results; none: print only.")]
Resume = Annotated[bool, typer.Option("--resume", help="Finish a run that was stopped.")]
Seed = Annotated[int, typer.Option(help="Seed of every random draw.")]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16 or float16.")]
Device = Annotated[str, typer.Option(help="A torch device such as cpu or cuda.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]

_BULKY = ("kept_map", "track", "at_fresh_starts")


@dataclass
class Session:
    """One run of an eval command.

    Attributes:
        command: its name.
        config: all settings that its numbers depend on.
        out: results folder, or None.
        resume: whether a stopped run may be finished.
        as_json: whether stdout gets JSON.
        room: what stands before the command's name.
    """

    command: str
    config: dict[str, Any]
    out: Path | None
    resume: bool
    as_json: bool
    room: str = "eval "

    def run(
        self,
        work: Callable[[Any, Any, RunFolder | None], list[Outcome]],
        columns: Sequence[str],
    ) -> None:
        """Check the folder, load the model, do the work, write and print.

        Args:
            work: gets model, tokenizer and folder.
            columns: of the table.

        Raises:
            KvevictError: bad input; nothing was overwritten.
        """
        folder = RunFolder(self.out, self.command, self.config) if self.out else None
        rank, world = ranks()
        if folder and rank == 0:
            folder.check(self.resume)
        import torch

        from kvevict.models.small import load

        torch.manual_seed(self.config["seed"])
        device = self.config["device"]
        if world > 1 and device == "cuda":
            device = f"cuda:{rank % torch.cuda.device_count()}"
        model, tokenizer = load(self.config["model"], dtype=self.config["dtype"], device=device)
        join_ranks()
        outcomes = work(model, tokenizer, folder)
        if rank == 0:
            self._report(outcomes, folder, world, columns)
        leave_ranks()

    def _report(
        self,
        outcomes: list[Outcome],
        folder: RunFolder | None,
        world: int,
        columns: Sequence[str],
    ) -> None:
        if folder:
            folder.finish([o.row for o in outcomes], [o.timing for o in outcomes], world)
        rows = [
            {k: v for k, v in {**o.row, **o.timing}.items() if k not in _BULKY} for o in outcomes
        ]
        if self.as_json:
            console.emit(f"{self.room}{self.command}", self.config, rows)
            return
        for kind in dict.fromkeys(row.get("kind", self.command) for row in rows):
            part = [row for row in rows if row.get("kind", self.command) == kind]
            present = [c for c in columns if any(row.get(c) is not None for row in part)]
            title = f"{kind}: {self.config['model']}"
            console.show([{**r, "policy": short(r["policy"])} for r in part], present, title=title)
        if folder:
            typer.echo(f"Results: {folder.path}   Page: kvevict report {folder.path}")


def session(
    command: str,
    out: Path | None,
    resume: bool,
    as_json: bool,
    settings: CacheSettings,
    **config: Any,
) -> Session:
    """Return a run; policies are checked now, before anything is loaded.

    Raises:
        KvevictError: a bad policy, or --resume without --out.
    """
    if resume and out is None:
        raise KvevictError("--resume needs --out: the folder of the run to finish")
    config["policies"] = [str(parse(p)) for p in config["policies"]]
    config["texts"] = [t.facts() for t in config.get("texts", [])]
    return Session(command, {**config, **asdict(settings)}, out, resume, as_json)


def read_texts(paths: list[Path] | None) -> list[Text]:
    """Read the texts that the user names, or the embedded one.

    Raises:
        KvevictError: a file that is missing, empty or not UTF-8.
    """
    return [read(path) for path in paths] if paths else [read(None)]


def count(text: str | None) -> int | None:
    """Read a number of tokens such as 8192, 128k or 4M (k is 1,024).

    Raises:
        KvevictError: something else.
    """
    if text is None:
        return None
    scale = {"k": 1024, "m": 1024 * 1024}.get(text[-1:].lower(), 1)
    digits = (text[:-1] if scale > 1 else text).replace("_", "").replace(",", "")
    if not digits.isdigit() or int(digits) < 1:
        raise KvevictError(f"{text!r} is no number of tokens: write 8192, 128k or 1M")
    return int(digits) * scale


def counts(text: str) -> list[int]:
    """Read numbers of tokens such as 16k,64k; 0 is allowed."""
    parts = [p.strip() for p in text.split(",") if p.strip()]
    return [0 if p == "0" else count(p) or 0 for p in parts]


def shares(text: str) -> tuple[float, ...]:
    """Read shares such as 0,0.5,1.

    Raises:
        KvevictError: something that is no number.
    """
    try:
        return tuple(float(p) for p in text.split(",") if p.strip())
    except ValueError as error:
        raise KvevictError(f"{text!r} is no list of shares: write 0,0.5,1") from error
