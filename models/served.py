"""transformers' server from release 5.25 on: a model is loaded, and so patched, in its own process.

The loader travels to that process, and with it the policy; so both classes can be imported by name.
"""

from typing import Any

from transformers.cli.serve import Serve
from transformers.cli.serving import model_manager

from kvevict.models.patch import patch

if not hasattr(model_manager.ModelLoader, "_load_model"):  # type: ignore[attr-defined]
    raise ImportError("this release of transformers loads served models in a way unknown here")


class PatchedLoader(model_manager.ModelLoader):  # type: ignore[misc,name-defined]
    """Loads as transformers does, and patches what it loaded.

    Attributes:
        patching: what `patch` is called with, the model apart.
    """

    patching: dict[str, Any]

    def _load_model(self, *args: Any, **kwargs: Any) -> Any:
        loaded = super()._load_model(*args, **kwargs)
        patch(loaded, **self.patching)
        return loaded


class PatchedServe(Serve):
    """transformers' server, with a loader that patches.

    Args:
        patching: what `patch` is called with, the model apart.
        **options: of `transformers serve`.
    """

    loader: Any  # transformers makes one as it starts

    def __init__(self, patching: dict[str, Any], **options: Any) -> None:
        self._patching = patching
        super().__init__(**options)

    def run(self, *args: Any, **kwargs: Any) -> None:
        """Serve, in this process."""
        self._take_over()
        super().run(*args, **kwargs)  # type: ignore[misc]

    def run_api_servers(self, count: int) -> None:
        """Serve in several processes, which share the model's."""
        self._take_over()
        super().run_api_servers(count)  # type: ignore[misc]

    def _take_over(self) -> None:
        self.loader.__class__ = PatchedLoader
        self.loader.patching = self._patching
