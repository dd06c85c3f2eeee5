"""kvevict serve: transformers' own OpenAI-compatible server, its models patched as they load.

Chat completions, completions and responses, streamed or not, are transformers' code; every request
gets a fresh cache under the policy. Continuous batching pages a cache of its own and is refused.
"""

from contextlib import contextmanager
from typing import Annotated, Any

import typer

from kvevict.cache import Backend, Positions
from kvevict.errors import KvevictError
from kvevict.models.patch import patch
from kvevict.models.small import resolve
from kvevict.policy import Policy, parse

app = typer.Typer(add_completion=False, rich_markup_mode=None)
_EXTRA = 'pip install "kvevict[serve]"'


def make_server(
    model: str,
    policy: Policy | str,
    *,
    positions: Positions = "auto",
    backend: Backend = "auto",
    evict_every: int = 1,
    **options: Any,
) -> Any:
    """Make transformers' server for one model under a policy.

    Args:
        model: a folder, a hub id or `smollm2-135m`; requests name it as given here.
        policy: a policy or its string.
        positions: see `kvevict.patch`.
        backend: see `kvevict.patch`.
        evict_every: see `kvevict.patch`.
        **options: of `transformers serve`: host, port, device, dtype, ...

    Returns:
        transformers' `Serve`, when the server has stopped.

    Raises:
        KvevictError: what the server needs is not installed, or continuous batching is wanted.
        PolicyError: a bad policy.
    """
    chosen = parse(policy)
    if options.get("continuous_batching"):
        raise KvevictError(
            "continuous batching has a paged cache of its own, to which no policy applies: leave "
            "it out, or see docs/serving.md for engines that evict"
        )
    settings = {"positions": positions, "backend": backend, "evict_every": evict_every}
    try:
        from transformers.cli.serve import Serve
        from transformers.cli.serving import model_manager
    except ImportError as error:
        raise KvevictError(f"the server is not installed ({error}): {_EXTRA}") from error

    if hasattr(model_manager, "ModelLoader"):  # from release 5.25 on
        from kvevict.models.served import PatchedServe

        patching = {"policy": chosen, **settings}
        try:
            return PatchedServe(patching, force_model=resolve(model), **options)
        except ImportError as error:
            raise KvevictError(f"the server is not installed ({error}): {_EXTRA}") from error

    class Manager(model_manager.ModelManager):  # type: ignore[misc,name-defined]
        """Loads as transformers does, and patches what it loaded."""

        def _load_model(self, *args: Any, **kwargs: Any) -> Any:
            loaded = super()._load_model(*args, **kwargs)
            patch(loaded, chosen, **settings)  # type: ignore[arg-type]
            return loaded

    try:
        with _replaced(model_manager, "ModelManager", Manager):  # Serve looks it up as it starts
            return Serve(force_model=resolve(model), **options)
    except ImportError as error:
        raise KvevictError(f"the server is not installed ({error}): {_EXTRA}") from error


@contextmanager
def _replaced(module: Any, name: str, value: Any) -> Any:
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


@app.command()
def serve(
    model: Annotated[str, typer.Argument(help="Folder, hub id or smollm2-135m.")] = "smollm2-135m",
    policy: Annotated[str, typer.Option(help="Such as h2o:heavy=512,recent=512.")] = (
        "streaming_llm:sinks=4,window=1020"
    ),
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "localhost",
    port: Annotated[int, typer.Option(help="Port to listen at.")] = 8000,
    positions: Annotated[str, typer.Option(help="auto, in_cache or original.")] = "auto",
    evict_every: Annotated[int, typer.Option(min=1)] = 1,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, ...")] = "auto",
    seed: Annotated[int, typer.Option(help="Seed of every random draw.")] = 0,
    log_level: Annotated[str, typer.Option(help="Of transformers.")] = "warning",
) -> None:
    """Serve a model under a policy over an OpenAI-compatible API until it is stopped."""
    make_server(
        model,
        policy,
        positions=positions,  # type: ignore[arg-type]
        evict_every=evict_every,
        host=host,
        port=port,
        dtype=dtype,
        device=device,
        default_seed=seed,
        log_level=log_level,
    )
