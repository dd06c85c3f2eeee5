"""Streams: tokens per second at chunk 64 against the bare model at the same length held.

`python -m benchmarks.bench_stream` writes results/stream.csv. The bare model's forward feeds 64
tokens to a DynamicCache held at the budget and crops them again.
"""

import torch
from transformers.cache_utils import DynamicCache

import kvevict
from benchmarks.common import arguments, paired, text_ids, write_csv


def cases_of(model, ids, budget, chunk):
    """Return functions that feed one chunk, the bare model's first."""
    whole = DynamicCache(config=model.config)
    model(ids[:, :budget], cache=whole)
    piece = ids[:, :chunk]

    def bare():
        model(piece, cache=whole)
        whole.crop(-chunk)

    def streamed(policy):
        cache = kvevict.EvictionCache(model, policy)
        for _ in kvevict.stream(model, ids[:, : budget + 200], cache, chunk=200):
            pass
        return lambda: next(iter(kvevict.stream(model, piece, cache, chunk=chunk)))

    half = budget // 2
    policies = (f"streaming_llm:sinks=4,window={budget - 4}", f"h2o:heavy={half},recent={half}")
    return {"DynamicCache held": bare} | {policy: streamed(policy) for policy in policies}


@torch.no_grad()
def main():
    """Run every dtype and budget."""
    args = arguments(__doc__, budgets=[256, 1024], chunk=[64])
    chunk = args.chunk[0]
    rows = []
    torch.set_num_threads(args.threads[0])
    for dtype in args.dtypes:
        model, tokenizer = kvevict.load(dtype=dtype)
        ids = text_ids(tokenizer, 4096)
        kvevict.patch(model)
        for budget in args.budgets:
            cases = cases_of(model, ids, budget, chunk)
            for name, figures in paired(cases, args.rounds).items():
                row = {"case": name, "budget": budget, "chunk": chunk, "dtype": dtype}
                row |= {"threads": args.threads[0], **figures}
                row["tokens_per_cpu_second"] = round(chunk / figures["cpu_ms"] * 1e3, 1)
                rows.append(row)
                print(row, flush=True)
    print(write_csv("stream", rows))


if __name__ == "__main__":
    main()
