"""Where a model's parts lie: on one device, dispatched over several, or over pipeline ranks."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from kvevict.errors import UnsupportedModelError

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

    Raises:
        UnsupportedModelError: the heads are split, and nothing says over which ranks.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return None
    in_all = _heads_in_all(attention, heads, config)
    if heads == in_all:
        return None
    groups = {
        id(group): group
        for parameter in attention.parameters()
        for group in _splitting(parameter, in_all // heads)
    }
    if len(groups) != 1:
        raise UnsupportedModelError(
            f"{config.model_type}: this process has {heads} of {in_all} KV heads, and its weights "
            "do not say which ranks have the others (missing part: scores)"
        )
    group = next(iter(groups.values()))

    def add_up(tensor: torch.Tensor) -> None:
        dist.all_reduce(tensor, group=group)

    return add_up


def _heads_in_all(attention: Any, heads: int, config: Any) -> int:
    """Return a layer's KV heads on all ranks together.

    A split weight knows its whole shape. A plain one does not: then the config's numbers tell (some
    models have another number in layers of another kind), and who has none of them has a part.
    """
    weight = getattr(getattr(attention, "k_proj", None), "weight", None)
    local = getattr(weight, "_local_tensor", None)
    if weight is not None and local is not None and local.shape[0]:
        # Split by rows for its heads, or whole in a forward and split for storage alone (FSDP).
        dim = getattr(attention, "head_dim", None)
        return int(weight.shape[0] // dim) if dim else heads
    names = ("num_key_value_heads", "num_global_key_value_heads", "num_attention_heads")
    known = [n for n in (getattr(config, name, None) for name in names) if isinstance(n, int)]
    return heads if heads in known or not known else known[0]


def _splitting(parameter: Any, ways: int) -> list[Any]:
    """Return the process groups that split a parameter's rows in so many ways, the one named tp."""
    from torch.distributed.tensor import DTensor

    if not isinstance(parameter, DTensor):
        return []
    mesh = parameter.device_mesh
    names = mesh.mesh_dim_names or ("",) * mesh.ndim
    found = [
        at
        for at, placement in enumerate(parameter.placements)
        if getattr(placement, "dim", None) == 0 and mesh.size(at) == ways
    ]
    named = [at for at in found if names[at] == "tp"]
    return [mesh.get_group(at) for at in named or found]
