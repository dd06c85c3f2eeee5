"""Slow and obvious oracles: Llama in numpy float64, with eviction written as loops over lists.

They share no code with the project. Keys are held before RoPE and turned again for every query, so
that positions inside a cache need no trick; H2O keeps a list of positions and a dict of scores for
every layer and KV head of one row.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Attend = Callable[[int, Array, Array, Array], Array]


def softmax(logits: Array) -> Array:
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


class Reference:
    """One row at a time through a Llama model's weights."""

    def __init__(self, model: Any) -> None:
        self.weights = {k: v.double().numpy() for k, v in model.state_dict().items()}
        config = model.config
        self.layers = config.num_hidden_layers
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.eps = config.rms_norm_eps
        rotary = model.model.rotary_emb
        self.inv_freq = rotary.inv_freq.double().numpy()
        self.rope_scale = float(rotary.attention_scaling)

    # -- the model --------------------------------------------------------------------------------

    def forward(self, ids: list[int], attend: Attend) -> Array:
        """Return logits `[n, V]`; `attend(layer, q, k, v)` gets raw states `[heads, n, D]`."""
        x = self.weights["model.embed_tokens.weight"][ids]
        for layer in range(self.layers):
            name = f"model.layers.{layer}."
            h = self._norm(x, name + "input_layernorm.weight")
            q = self._split(h, name + "self_attn.q_proj.weight", self.heads)
            k = self._split(h, name + "self_attn.k_proj.weight", self.kv_heads)
            v = self._split(h, name + "self_attn.v_proj.weight", self.kv_heads)
            out = attend(layer, q, k, v).transpose(1, 0, 2).reshape(len(ids), -1)
            x = x + out @ self.weights[name + "self_attn.o_proj.weight"].T
            h = self._norm(x, name + "post_attention_layernorm.weight")
            gate = h @ self.weights[name + "mlp.gate_proj.weight"].T
            up = h @ self.weights[name + "mlp.up_proj.weight"].T
            x = (
                x
                + (gate / (1 + np.exp(-gate)) * up) @ self.weights[name + "mlp.down_proj.weight"].T
            )
        return self._norm(x, "model.norm.weight") @ self.weights["lm_head.weight"].T

    def _norm(self, x: Array, name: str) -> Array:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + self.eps) * self.weights[name]

    def _split(self, h: Array, name: str, heads: int) -> Array:
        return (h @ self.weights[name].T).reshape(len(h), heads, -1).transpose(1, 0, 2)

    def rope(self, x: Array, position: Any) -> Array:
        """Rotate `[..., n, D]` to positions `[n]`."""
        angle = np.asarray(position, dtype=np.float64)[..., None] * self.inv_freq
        cos, sin = np.cos(angle) * self.rope_scale, np.sin(angle) * self.rope_scale
        first, second = np.split(x, 2, axis=-1)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)

    # -- full attention under a mask, one query at a time -----------------------------------------

    def masked(self, ids: list[int], visible: Callable[[int], list[int]], in_cache: bool) -> Array:
        """Let query i see exactly the tokens `visible(i)`, itself last.

        With in_cache, what it sees is numbered 0..m-1 and every key is turned to its number anew:
        what the authors of StreamingLLM do at every step.
        """

        def attend(layer: int, q: Array, k: Array, v: Array) -> Array:
            group = self.heads // self.kv_heads
            out = np.zeros_like(q)
            for i in range(q.shape[1]):
                seen = visible(i)
                at = list(range(len(seen))) if in_cache else seen
                keys = self.rope(k[:, seen], at)
                for head in range(self.heads):
                    query = self.rope(q[head, i : i + 1], at[-1:])[0]
                    weights = softmax(keys[head // group] @ query / np.sqrt(len(query)))
                    out[head, i] = weights @ v[head // group, seen]
            return out

        return self.forward(ids, attend)

    def full(self, ids: list[int]) -> Array:
        return self.masked(ids, lambda i: list(range(i + 1)), in_cache=False)

    def streaming(
        self, ids: list[int], sinks: int, window: int, in_cache: bool = True, early: bool = False
    ) -> Array:
        """Sinks and window; `early` evicts before attention, which the authors do not."""
        reach = window - 1 if early else window

        def visible(i: int) -> list[int]:
            return [j for j in range(i + 1) if j < sinks or i - j <= reach]

        return self.masked(ids, visible, in_cache)

    # -- H2O --------------------------------------------------------------------------------------

    def h2o(
        self,
        ids: list[int],
        heavy: int,
        recent: int,
        *,
        sinks: int = 0,
        forwards: list[int] | None = None,
        in_cache: bool = False,
        evict_every: int = 1,
        decay: float = 1.0,
        age: bool = False,
        counted: str = "all",
        early: bool = False,
        pooled: bool = False,
        voters: int | None = None,
        anew: str = "",
        silent: bool = False,
        cleared: bool = False,
        kernel: int = 1,
    ) -> "H2OResult":
        """Attend, accumulate, evict, in loops; TOVA and SnapKV differ in which queries count.

        Args:
            ids: tokens of one row.
            heavy: see the policy, as recent, sinks, evict_every, decay and age.
            forwards: lengths of the forwards; one token each when None.
            in_cache: number the stored keys 0..m-1 at every forward.
            counted: "all" queries; or, for wrong variants, only the "last" of a forward, all but
                a token's "others" (its own weight is left out), or only the last step "now".
            early: wrong variant: evict before attention.
            pooled: one score for all KV heads, the sum of theirs.
            voters: only a forward's last queries count.
            anew: "all" forwards' scores replace the older ones, or those of "chunks" alone.
            silent: a forward of one token counts for nothing.
            cleared: where a forward of one token evicts, scores start from 0 after it.
            kernel: scores are max-pooled over so many neighbours among what is stored.
        """
        lengths = [1] * len(ids) if forwards is None else forwards
        assert sum(lengths) == len(ids)
        result = H2OResult()
        group, capacity = self.heads // self.kv_heads, heavy + recent + sinks

        def keep(
            stored: list[int], score: dict[int, float], limit: int, heavy: int = heavy
        ) -> list[int]:
            if len(stored) <= limit:
                return stored
            newest = max(stored)
            head, rest = stored[:sinks], stored[sinks:]
            tail = rest[len(rest) - recent :]
            middle = rest[: len(rest) - recent]

            def worth(j: int) -> tuple[float, int]:
                at, reach = stored.index(j), kernel // 2
                most = max(score[i] for i in stored[max(0, at - reach) : at + reach + 1])
                return (most / (newest + 1 - j) if age else most, j)

            best = sorted(middle, key=worth)[len(middle) - heavy :] if heavy else []
            return head + sorted(best) + tail

        def attend(layer: int, q: Array, k: Array, v: Array) -> Array:
            out = np.zeros_like(q)
            stored: list[list[int]] = [[] for _ in range(self.kv_heads)]
            scores: list[dict[int, float]] = [{} for _ in range(self.kv_heads)]
            start = 0
            for length in lengths:
                new = list(range(start, start + length))
                columns: list[dict[int, float]] = []
                for h in range(self.kv_heads):
                    if early:
                        stored[h] = keep(stored[h], scores[h], capacity - 1, heavy - 1)
                    seen = stored[h] + new
                    at = list(range(len(seen))) if in_cache else seen
                    keys = self.rope(k[h, seen], at)
                    column = dict.fromkeys(seen, 0.0)
                    votes = not (silent and length == 1)
                    fresh = anew == "all" or (anew == "chunks" and length > 1)
                    stays = 0.0 if counted == "now" or (fresh and votes) else decay**length
                    scores[h] = {j: scores[h].get(j, 0.0) * stays for j in seen}
                    for i in new:
                        own = seen.index(i)
                        for head in range(h * group, (h + 1) * group):
                            query = self.rope(q[head, i : i + 1], at[own : own + 1])[0]
                            weights = softmax(keys[: own + 1] @ query / np.sqrt(len(query)))
                            out[head, i] = weights @ v[h, seen[: own + 1]]
                            last = 1 if counted == "last" else voters or length
                            if not votes or i not in new[-last:]:
                                continue
                            for j, weight in zip(seen, weights, strict=False):
                                if counted != "others" or j != i:
                                    column[j] += weight * decay ** (new[-1] - i)
                    columns.append(column)
                if pooled:
                    columns = [{j: sum(c[j] for c in columns) for j in columns[0]}] * len(columns)
                for h in range(self.kv_heads):
                    scores[h] = {j: scores[h][j] + columns[h][j] for j in columns[h]}
                    limit = capacity + evict_every - 1
                    before = len(stored[h]) + length
                    stored[h] = keep(stored[h] + new, scores[h], limit)
                    scores[h] = {j: scores[h][j] for j in stored[h]}
                    if cleared and length == 1 and len(stored[h]) < before:
                        scores[h] = dict.fromkeys(scores[h], 0.0)
                    result.most = max(result.most, len(stored[h]))
                start += length
            result.kept.append(stored)
            result.scores.append(
                [[s[j] for j in kept] for kept, s in zip(stored, scores, strict=True)]
            )
            return out

        result.logits = self.forward(ids, attend)
        return result


class H2OResult:
    """Logits `[n, V]`; kept positions and scores, `[layer][kv head]` lists in time order."""

    def __init__(self) -> None:
        self.logits: Array = np.zeros(0)
        self.kept: list[list[list[int]]] = []
        self.scores: list[list[list[float]]] = []
        self.most = 0
