"""Generation with a bounded KV cache, for `model.generate(..., custom_generate=<this folder>)`.

Put the folder `custom_generate` into a model repository (or pass its parent as a path) and every
`generate` call of that model can take a kvevict policy; kvevict must be installed.
"""

from typing import Any

import kvevict


def generate(
    model: Any,
    policy: str = "streaming_llm:sinks=4,window=1020",
    positions: str = "auto",
    evict_every: int = 1,
    **kwargs: Any,
) -> Any:
    """Generate as `model.generate` does, with the cache held to a policy's budget.

    Args:
        model: handed over by transformers.
        policy: such as "h2o:heavy=512,recent=512".
        positions: see `kvevict.patch`.
        evict_every: see `kvevict.patch`.
        **kwargs: what `model.generate` takes.
    """
    for name in ("cache", "past_key_values"):  # transformers fills one in; the policy's is wanted
        kwargs.pop(name, None)
    with kvevict.patch(model, policy, positions=positions, evict_every=evict_every):
        return model.generate(**kwargs)
