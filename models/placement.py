"""Where a model's parts lie: on one device, dispatched over several, or over pipeline ranks."""

from typing import Any

import torch


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
