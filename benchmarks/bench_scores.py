"""The exact score pass of a prefill against the fused attention alone, and against eager.

`python -m benchmarks.bench_scores` writes results/scores.csv: CPU time and peak extra memory of
one layer's attention on SmolLM2's shape (9 query heads on 3 KV heads, head dim 64).
"""

import subprocess
import sys
from pathlib import Path

import torch

from benchmarks.common import arguments, paired, write_csv
from kvevict.kernels import library

HEADS, KV_HEADS, D = 9, 3, 64


def states(n, dtype):
    """Return seeded q, k and v of one layer."""
    torch.manual_seed(0)
    shape = (1, KV_HEADS, n, D)
    q = torch.randn(1, HEADS, n, D).to(dtype)
    return q, torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)


def fused(q, k, v):
    """Attend without scores."""
    return library.attention_lse(q, k, v, D**-0.5, causal=True)


def scored(q, k, v, window=0):
    """Attend and sum columns, of all queries or of the last `window`."""
    out, lse = fused(q, k, v)
    lo = q.shape[2] - window if window else 0
    return out, library.column_sum(q, k, lse, D**-0.5, causal=True, q_lo=lo)


def eager(q, k, v):
    """Attend as transformers' eager attention does, and sum the weights."""
    n, G = q.shape[2], HEADS // KV_HEADS
    k, v = k.repeat_interleave(G, 1), v.repeat_interleave(G, 1)
    hidden = torch.full((n, n), torch.finfo(q.dtype).min, dtype=q.dtype).triu(1)
    logits = torch.matmul(q, k.mT) * D**-0.5 + hidden
    weights = torch.softmax(logits, -1, dtype=torch.float32).to(q.dtype)
    return torch.matmul(weights, v), weights.float().sum(2).view(1, KV_HEADS, G, n).sum(2)


CASES = {
    "fused attention": fused,
    "exact scores": scored,
    "scores of the last 64": lambda q, k, v: scored(q, k, v, 64),
    "eager": eager,
}


def peak(name, n, dtype):
    """Return the MiB that one call adds to the peak resident size, in a process of its own."""
    code = f"import benchmarks.bench_scores as b; b.report_peak({name!r}, {n}, {dtype!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def report_peak(name, n, dtype):
    """Print the growth of the peak resident size over one call."""
    torch.set_num_threads(1)
    q, k, v = states(n, getattr(torch, dtype))
    CASES[name](*(t[:, :, :64] for t in (q, k, v)))  # code and threads are loaded before
    Path("/proc/self/clear_refs").write_text("5")  # the peak restarts from what is held now
    before = _status("VmRSS")
    with torch.no_grad():
        CASES[name](q, k, v)
    print((_status("VmHWM") - before) / 1024)


def _status(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(x for x in lines if x.startswith(name)).split()[1])


@torch.no_grad()
def main():
    """Run every length and dtype."""
    args = arguments(__doc__, lengths=[2048, 4096, 8192], memory=[2048, 4096, 8192, 16384])
    rows = []
    torch.set_num_threads(args.threads[0])
    for dtype in args.dtypes:
        for n in args.lengths:
            q, k, v = states(n, getattr(torch, dtype))
            use = {c: f for c, f in CASES.items() if c != "eager" or n <= 4096}
            calls = {c: lambda f=f, q=q, k=k, v=v: f(q, k, v) for c, f in use.items()}
            for name, figures in paired(calls, max(3, args.rounds // 3)).items():
                rows.append({"case": name, "length": n, "dtype": dtype} | figures)
                print(rows[-1], flush=True)
        for n in args.memory:
            for name in CASES:
                if name == "eager" and n > 4096:
                    continue
                rows.append({"case": name, "length": n, "dtype": dtype})
                rows[-1]["peak_extra_mib"] = round(peak(name, n, dtype), 1)
                print(rows[-1], flush=True)
    print(write_csv("scores", rows))


if __name__ == "__main__":
    main()
