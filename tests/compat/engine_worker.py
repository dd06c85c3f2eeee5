"""Run under torchrun by test_engines: generate with a model split over ranks, write the tokens."""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from transformers import AutoModelForCausalLM

from kvevict import EvictionCache, patch, stream


def load(mode: str, folder: str) -> Any:
    """Load a model whole, or its part of it."""
    if mode == "tp":
        return AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto").eval()
    from transformers.distributed import DistributedConfig

    config = DistributedConfig(pp_size=2)
    return AutoModelForCausalLM.from_pretrained(folder, distributed_config=config).eval()


def losses(model: Any, ids: torch.Tensor, cache: EvictionCache) -> list[float]:
    """Stream tokens through a cache and return the loss of each but the first."""
    steps = list(stream(model, ids, cache, chunk=7))
    return torch.cat([x.nll for x in steps])[1:].tolist()


def main() -> None:
    mode, folder, out, *policies = sys.argv[1:]
    transformers.logging.set_verbosity_error()
    model = load(mode, folder)
    ids = torch.arange(3, 33, device=model.device)[None]
    settings = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    found: dict[str, Any] = {}
    for policy in policies:
        with patch(model, policy):
            found[policy] = model.generate(ids, **settings)[0].tolist()
            again = ids[:, :10].repeat(1, 3)  # repeats itself, so that drafts are found
            plain = model.generate(again, **settings)
            drafted = model.generate(again, prompt_lookup_num_tokens=3, **settings)
            found[policy + " drafts"] = bool(torch.equal(plain, drafted))
        if mode == "tp":
            with patch(model) as handle:
                cache = EvictionCache(model, policy)
                found[policy + " nll"] = losses(model, ids, cache)
                found[policy + " bytes"] = cache.nbytes()
                found[policy + " kept"] = cache.kept_positions(3).tolist()
                handle.findings.over_ranks = [None] * len(cache.layers)
                found[policy + " nll, deaf"] = losses(model, ids, EvictionCache(model, policy))
    Path(out, f"{mode}-{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
