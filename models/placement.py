"""Where a model's parts lie: on one device, dispatched over several, or over pipeline ranks."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

Reduce = Callable[[torch.Tensor], None]


def input_device(model: Any) -> torch.device:
    """Return the device that token ids belong on.

    Weights that accelerate holds on disk or in CPU memory lie on the meta device between forwards;
    its hooks move ids to where they run, so any real device will do then.
    """
    weight = getattr(model.get_input_embeddings(), "weight", None)  # none on later pipeline ranks
    if weight is not None and weight.device.type != "meta":
        return weight.device  # type: ignore[no-any-return]
    devices = {p.device for p in model.parameters()}
    real = [x for x in devices if x.type != "meta"]
    if not real and getattr(model, "hf_device_map", None) is None:
        return torch.device("meta")  # built without weights, for the planner
    return real[0] if len(real) == 1 else torch.device("cpu")


def is_pipeline_part(model: Any) -> bool:
    """Whether other processes hold some of the layers (pipeline parallelism)."""
    return any(type(module).__name__ == "PipelineIdentityLayer" for module in model.modules())


def over_ranks(attention: Any, heads: int, config: Any) -> Reduce | None:
    """Return what adds up a tensor over the ranks that an attention module's heads are split over.

    Args:
        attention: transformers' attention module.
        heads: KV heads that this process has of it.
        config: of the model.

    Returns:
        A function that works in place, or None where this process has all heads.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return None
    # A fused projection may be split and its output gathered: every rank then has all heads.
    if heads == (getattr(config, "num_key_value_heads", None) or config.num_attention_heads):
        return None
    from torch.distributed.tensor import DTensor, Shard

    for parameter in attention.parameters():
        if not isinstance(parameter, DTensor):
            continue
        mesh, names = parameter.device_mesh, parameter.device_mesh.mesh_dim_names
        if names is None and mesh.ndim > 1:
            continue  # nothing says which dimension splits heads
        at = 0 if names is None else names.index("tp") if "tp" in names else -1
        # Rows of a projection are heads: queries, keys and values are split by rows.
        if at < 0 or parameter.placements[at] != Shard(0) or mesh.size(at) == 1:
            continue
        group = mesh.get_group(at)

        def add_up(tensor: torch.Tensor, group: Any = group) -> None:
            dist.all_reduce(tensor, group=group)

        return add_up
    return None
