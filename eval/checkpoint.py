"""checkpoint: a stream that was killed goes on where its last checkpoint stands, bit by bit.

A checkpoint is written beside the one before; a pointer then changes in one step and the old one
goes. Kill the process at any moment: there is always a whole checkpoint, or none.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvevict.cache import EvictionCache
from kvevict.errors import CacheError, KvevictError
from kvevict.eval.results import read_json, write_array, write_json
from kvevict.layers import EvictionLayer

_POINTER = "checkpoint.json"


@dataclass
class Progress:
    """How far a stream has come.

    Attributes:
        nll: float32 `[n]` nats of the tokens fed so far, nan for the first.
        last: float32 `[V]` logits after the last of them, None at the start.
        notes: what else the evaluation gathered, JSON only.
    """

    nll: Tensor = field(default_factory=lambda: torch.zeros(0))
    last: Tensor | None = None
    notes: dict[str, Any] = field(default_factory=dict)


class Checkpoints:
    """The checkpoints of one stream.

    Args:
        path: a folder of its own, or None to keep none.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path

    def load(self, model: Any) -> tuple[EvictionCache, Progress] | None:
        """Return the cache and the progress of the last checkpoint, or None.

        Raises:
            KvevictError: a checkpoint that is damaged or of another model.
        """
        if self.path is None or not (self.path / _POINTER).is_file():
            return None
        pointer = read_json(self.path / _POINTER)
        try:
            where = self.path / pointer["folder"]
            arrays = [np.load(where / f"{n}.npy", allow_pickle=False) for n in ("nll", "last")]
            cache = EvictionCache.load(where / "cache", model)
        except (KeyError, TypeError, OSError, ValueError, CacheError) as error:
            raise KvevictError(
                f"{self.path} holds a damaged checkpoint ({error}): delete that folder to start "
                "this stream over"
            ) from error
        nll, last = (torch.from_numpy(a) for a in arrays)
        return cache, Progress(nll, last, pointer["notes"])

    def save(self, cache: EvictionCache, progress: Progress) -> None:
        """Write a checkpoint and drop the one before.

        Raises:
            KvevictError: the cache of this model cannot be saved, or the disk is full.
        """
        if self.path is None:
            return
        check_savable(cache)
        assert progress.last is not None
        name = f"at-{len(progress.nll)}"
        where = self.path / name
        shutil.rmtree(where, ignore_errors=True)  # half written by a killed run
        write_array(where / "nll.npy", progress.nll.numpy())
        write_array(where / "last.npy", progress.last.cpu().numpy())
        cache.save(where / "cache")
        write_json(self.path / _POINTER, {"folder": name, "notes": progress.notes})
        for old in self.path.iterdir():
            if old.is_dir() and old.name != name:
                shutil.rmtree(old, ignore_errors=True)


def check_savable(cache: EvictionCache) -> None:
    """Check that a cache can be written to disk.

    Raises:
        KvevictError: it has layers of transformers' own.
    """
    if not all(isinstance(layer, EvictionLayer) for layer in cache.layers):
        raise KvevictError(
            "this model has sliding layers of transformers, whose cache cannot be saved: give "
            "--checkpoint-every 0"
        )
