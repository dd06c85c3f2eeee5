"""Decode at a budget against a DynamicCache held at exactly that many entries.

`python -m benchmarks.bench_decode` writes results/decode.csv. "held" feeds one token and crops it
again: what a step costs at that length, its `cat` included. "flat" is the cost at stream position
50,000 over that at 1,000.
"""

import torch
from transformers.cache_utils import DynamicCache

import kvevict
from benchmarks.common import arguments, paired, text_ids, write_csv
from kvevict.models.compiled import CompiledStep

STEPS = 8  # steps of every case a round: one at a time and in turn, so that a slow second hits all


def cases_at(model, ids, budget):
    """Return the step functions at one budget, every cache full."""

    def held():
        cache = DynamicCache(config=model.config)
        model(ids[:, :budget], cache=cache)

        def step():
            model(ids[:, :1], cache=cache)
            cache.crop(-1)

        return step

    def evicting(policy):
        cache = kvevict.EvictionCache(model, policy)
        model(ids[:, : budget + 40], cache=cache)
        return lambda: model(ids[:, :1], cache=cache)

    def compiled(policy):
        cache = kvevict.EvictionCache(model, policy)
        model(ids[:, : budget + 40], cache=cache)
        for _ in range(2):
            model(ids[:, :1], cache=cache)
        step = CompiledStep(model, cache)
        return lambda: step(ids[:, :1])

    h2o = f"h2o:heavy={budget // 2},recent={budget - budget // 2}"
    streaming = f"streaming_llm:sinks=4,window={budget - 4}"
    return {
        "DynamicCache held": held(),
        "window": evicting(f"window:window={budget}"),
        "streaming_llm": evicting(streaming),
        "h2o": evicting(h2o),
        "streaming_llm, compiled": compiled(streaming),
        "h2o, compiled": compiled(h2o),
    }


def position_cases(model, ids, budget):
    """Return StreamingLLM steps at stream positions 1,000 and 50,000."""

    def at(position):
        cache = kvevict.EvictionCache(model, f"streaming_llm:sinks=4,window={budget - 4}")
        long = ids.repeat(1, -(-position // ids.shape[1]))[:, :position]
        for _ in kvevict.stream(model, long, cache, chunk=512):
            pass
        return lambda: model(ids[:, :1], cache=cache)

    return {"at 1,000": at(1000), "at 50,000": at(50_000)}


@torch.no_grad()
def main():
    """Run every budget, dtype and thread count."""
    args = arguments(__doc__, budgets=[256, 1024], far=[0])
    rows = []
    for dtype in args.dtypes:
        model, tokenizer = kvevict.load(dtype=dtype)
        ids = text_ids(tokenizer, 4096)
        kvevict.patch(model)
        for threads in args.threads:
            torch.set_num_threads(threads)
            runs = [(b, cases_at(model, ids, b)) for b in args.budgets]
            if args.far[0] and (dtype, threads) == (args.dtypes[0], args.threads[0]):
                runs.append((256, position_cases(model, ids, 256)))
            for budget, cases in runs:
                for name, figures in paired(cases, STEPS * args.rounds, warmup=4).items():
                    row = {"case": name, "budget": budget, "dtype": dtype, "threads": threads}
                    rows.append(row | figures)
                    print(rows[-1], flush=True)
    print(write_csv("decode", rows))


if __name__ == "__main__":
    main()
