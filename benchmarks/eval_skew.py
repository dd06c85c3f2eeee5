"""How much of all accumulated attention the heaviest fifth of the tokens holds, by layer.

    python -m benchmarks.eval_skew smollm2-135m 2048 [TEXT]

Scores of an H2O cache large enough to evict nothing are the accumulated attention of Zhang et al.
2023 (section 3.2). Older tokens were seen by more queries, so the share is also given with every
score divided by the queries that could see its token, and without the first four tokens (sinks).
"""

import json
import sys
from pathlib import Path

import torch
from torch import Tensor

from kvevict.eval.caches import CacheSettings, feed
from kvevict.eval.texts import encode, read
from kvevict.layers import EvictionLayer
from kvevict.models.patch import patch
from kvevict.models.small import load
from kvevict.policies import H2O


def share(scores: Tensor, part: float = 0.2) -> float:
    """Return the mean share of `[H, N]` scores that the largest part of each row holds."""
    count = max(1, int(scores.shape[-1] * part))
    return float((scores.topk(count).values.sum(-1) / scores.sum(-1)).mean())


def main() -> None:
    """Print one JSON object."""
    name, tokens, *rest = sys.argv[1:] or ["smollm2-135m", "2048"]
    model, tokenizer = load(name)
    ids = encode(tokenizer, read(Path(rest[0]) if rest else None), int(tokens)).ids
    settings = CacheSettings(chunk=256)
    with patch(model):
        cache = settings.cache(model, H2O(heavy=len(ids), recent=1))
        feed(model, ids, cache, settings)
        rows = []
        for index, layer in enumerate(cache.layers):
            if not isinstance(layer, EvictionLayer):
                continue
            scores = cache.scores(index)[0]
            seen_by = torch.arange(len(ids), 0, -1)
            rows.append(
                {
                    "layer": index,
                    "top20": share(scores),
                    "top20_normalised": share(scores / seen_by),
                    "top20_without_first4": share(scores[:, 4:]),
                    "first_token": float((scores[:, 0] / scores.sum(-1)).mean()),
                }
            )
    mean = {k: sum(r[k] for r in rows) / len(rows) for k in rows[0] if k != "layer"}
    print(json.dumps({"model": name, "tokens": len(ids), "mean": mean, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
