"""grid: a run's cells, one after another or split over ranks; finished cells are never redone."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tqdm import tqdm

from kvevict.errors import KvevictError
from kvevict.eval.results import RunFolder, plain


@dataclass(frozen=True)
class Cell:
    """One piece of work: what a rank does without asking another.

    Attributes:
        name: unique in the run; names its files.
        key: what it is about, for the work function.
    """

    name: str
    key: dict[str, Any]


@dataclass
class Outcome:
    """What a cell gave.

    Attributes:
        row: measures, the same from run to run.
        timing: wall time and memory, which are not.
        arrays: kept beside the row.
    """

    row: dict[str, Any]
    timing: dict[str, Any] = field(default_factory=dict)
    arrays: dict[str, np.ndarray] = field(default_factory=dict)


def cells(keys: list[dict[str, Any]], label: Callable[[dict[str, Any]], str]) -> list[Cell]:
    """Name a run's cells by their place and a label."""
    slugs = [re.sub(r"[^a-z0-9]+", "-", label(key).lower()).strip("-")[:80] for key in keys]
    return [Cell(f"{i:04d}-{s}", k) for i, (s, k) in enumerate(zip(slugs, keys, strict=True))]


def run_cells(
    todo: list[Cell], work: Callable[[Cell], Outcome], folder: RunFolder | None, what: str
) -> list[Outcome]:
    """Do a run's cells, this rank's share of them, and return all outcomes in order.

    Args:
        todo: all cells of the run, the same list on every rank.
        work: does one cell.
        folder: where finished cells are kept and found again, or None.
        what: for the progress bar.

    Returns:
        The outcomes of all ranks; arrays only where this rank did the work or a folder has none.

    Raises:
        KvevictError: a rank came back without its cells.
    """
    rank, world = ranks()
    if folder is not None:
        first_then_others(folder.claim)
    mine = todo[rank::world]
    done: list[tuple[str, dict[str, Any], dict[str, Any]]] = []
    arrays: dict[str, dict[str, np.ndarray]] = {}
    with tqdm(total=len(mine), desc=what, unit="cell", leave=False, disable=rank > 0) as bar:
        for cell in mine:
            bar.set_postfix_str(cell.name[5:45], refresh=False)
            kept = folder.read_cell(cell.name) if folder else None
            if kept is None:
                outcome = _timed(cell, work)
                arrays[cell.name] = outcome.arrays
                kept = plain({"row": outcome.row, "timing": outcome.timing})
                if folder:
                    folder.write_cell(cell.name, kept, outcome.arrays)
            done.append((cell.name, kept["row"], kept["timing"]))
            bar.update()
    found = {name: (row, timing) for name, row, timing in _gather(done, world)}
    missing = [cell.name for cell in todo if cell.name not in found]
    if missing:
        raise KvevictError(f"cells are missing after the run: {', '.join(missing[:3])}")
    return [Outcome(*found[cell.name], arrays.get(cell.name, {})) for cell in todo]


def _timed(cell: Cell, work: Callable[[Cell], Outcome]) -> Outcome:
    began = time.perf_counter()
    outcome = work(cell)
    seconds = time.perf_counter() - began
    outcome.timing = {"seconds": seconds, **outcome.timing}
    return outcome


def ranks() -> tuple[int, int]:
    """Return this process's rank and the number of ranks, as torchrun set them."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def token_bar(total: int, name: str, done: int = 0) -> Any:
    """Return a progress bar over a cell's tokens, on the first rank only."""
    return tqdm(
        total=total, initial=done, desc=name[:40], unit="tok", leave=False, disable=ranks()[0] > 0
    )


def join_ranks() -> None:
    """Meet the other ranks, where torchrun started several; accelerate picks the backend."""
    if ranks()[1] > 1:
        import torch
        from accelerate import PartialState

        PartialState(cpu=not torch.cuda.is_available())


def leave_ranks() -> None:
    """Part from the other ranks."""
    if ranks()[1] > 1:
        from accelerate import PartialState

        PartialState().destroy_process_group()


def first_then_others(action: Callable[[], None]) -> None:
    """Do something on the first rank while the others wait."""
    rank, world = ranks()
    if rank == 0:
        action()
    if world > 1:
        from accelerate import PartialState

        PartialState().wait_for_everyone()


def _gather(done: list[Any], world: int) -> list[Any]:
    if world == 1:
        return done
    from accelerate.utils import gather_object

    return list(gather_object(done))
