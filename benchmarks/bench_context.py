"""Long context: decode under a budget against the whole context, and against recomputation.

`python -m benchmarks.bench_context` writes results/context.csv. One token after 16k tokens of
context: a DynamicCache of all of them, the policies at budget 1,024, and the sliding window with
recomputation (a forward over the last 1,024 tokens, logits of the last one). Beside the times, the
bytes that a step must read: weights, and keys and values.
"""

import torch
from transformers.cache_utils import DynamicCache

import kvevict
from benchmarks.common import arguments, paired, text_ids, write_csv


def weight_bytes(model):
    """Return the bytes of all weights, tied ones once."""
    return sum(p.nbytes for p in {p.data_ptr(): p for p in model.parameters()}.values())


def cases_of(model, ids, context, budget):
    """Return the step functions, and the caches that they run on."""
    whole = DynamicCache(config=model.config)
    shape = (1, model.config.num_key_value_heads, context, model.config.head_dim)
    for layer in range(model.config.num_hidden_layers):  # a step costs the same on any content
        state = torch.randn(shape, dtype=model.dtype)
        whole.update(state, state.clone(), layer)
    caches = {"DynamicCache, whole context": whole}
    half = budget // 2
    for policy in (
        f"streaming_llm:sinks=4,window={budget - 4}",
        f"h2o:heavy={half},recent={half}",
    ):
        cache = kvevict.EvictionCache(model, policy)
        for _ in kvevict.stream(model, ids[:, -4 * budget :], cache, chunk=512):
            pass
        caches[policy] = cache

    def step(cache):
        def call():
            model(ids[:, :1], cache=cache)
            if cache is whole:
                cache.crop(-1)

        return call

    cases = {name: step(cache) for name, cache in caches.items()}
    window = ids[:, -budget:]
    cases[f"recomputing a window of {budget}"] = lambda: model(
        window, use_cache=False, logits_to_keep=1
    )
    return cases, caches


@torch.no_grad()
def main():
    """Run every dtype."""
    args = arguments(__doc__, context=[16_384], budgets=[1024])
    context, budget = args.context[0], args.budgets[0]
    rows = []
    torch.set_num_threads(args.threads[0])
    for dtype in args.dtypes:
        model, tokenizer = kvevict.load(dtype=dtype)
        kvevict.patch(model)
        cases, caches = cases_of(model, text_ids(tokenizer, context), context, budget)
        weights = weight_bytes(model)
        held = {
            n: sum(x.keys.nbytes + x.values.nbytes for x in c.layers) for n, c in caches.items()
        }
        read = {name: weights + count for name, count in held.items()}
        for name, figures in paired(cases, max(5, args.rounds // 2)).items():
            row = {"case": name, "context": context, "budget": budget, "dtype": dtype}
            row |= {"threads": args.threads[0], **figures, "cache_bytes": held.get(name)}
            if name in read:
                row["bytes_ratio"] = round(read[name] / read[next(iter(read))], 4)
            rows.append(row)
            print(row, flush=True)
    print(write_csv("context", rows))


if __name__ == "__main__":
    main()
