"""One file a policy; every module here is found by itself and registers its class by name."""

import pkgutil
from importlib import import_module

from kvevict.policies.full import Full
from kvevict.policies.h2o import H2O
from kvevict.policies.random import Random
from kvevict.policies.snapkv import SnapKV
from kvevict.policies.streaming_llm import StreamingLLM
from kvevict.policies.tova import TOVA
from kvevict.policies.window import Window

for _module in pkgutil.iter_modules(__path__):  # a new policy needs no edit here
    import_module(f"{__name__}.{_module.name}")

__all__ = ["H2O", "TOVA", "Full", "Random", "SnapKV", "StreamingLLM", "Window"]
