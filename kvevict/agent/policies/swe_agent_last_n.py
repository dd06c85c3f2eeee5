"""SWE-agent's `last_n_observations`: only the last n observations stay, the older become a line."""

from dataclasses import dataclass

from kvevict.agent.choosing import choose, outputs
from kvevict.agent.history import Address, Block, History
from kvevict.agent.message_policy import Context, MessagePolicy, Stage, check_count
from kvevict.agent.verbs import mask
from kvevict.policies import Window


def omitted(block: Block) -> str:
    """Return SWE-agent's placeholder for an observation."""
    lines = len(block.text.splitlines())
    images = sum(1 for kind in block.media if kind == "image")
    text = f"Old environment output: ({lines} lines omitted)"
    return f"{text} ({images} images omitted)" if images else text


@dataclass(frozen=True)
class SWEAgentLastN(MessagePolicy, name="swe_agent_last_n"):
    """Keep the last n observations; elide the older in place.

    Source: SWE-agent 3ea751c0, `history_processors.py`, `LastNObservations`: of the list of
    observations `[1 : max(0, (len // polling) * polling - n)]` are elided; the first observation
    is the instance template (here the first user message) and never goes, demonstrations are not
    counted, and `polling` keeps the prefix for that many calls. Differs: observations are tool
    results wherever the format has them.

    Args:
        n: observations kept, up to n + polling - 1.
        keep_tools: tools whose observations are always kept (the `keep_output` tag).
        remove_tools: tools whose observations always go (the `remove_output` tag).
    """

    n: int = 5
    keep_tools: tuple[str, ...] = ()
    remove_tools: tuple[str, ...] = ()

    keeps_first = True
    keeps_last = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count(self, "n", 1)

    def stages(self) -> tuple[Stage, ...]:
        """One stage, on every request."""
        return (Stage("last_n_observations", "mask", self._elide, self.due, self.min_gain),)

    def _elide(self, view: History, context: Context) -> History:
        demos = {i for i, m in enumerate(view.messages) if m.note == "demo"}
        seen = [at for at in outputs(view, shell=True) if at[0] not in demos]
        template: list[Address | None] = [None] if view.first_user is not None else []
        observations: list[Address | None] = [*template, *seen]
        counted = (len(observations) // self.polling) * self.polling
        kept = choose(Window(self.n), [1] * counted)
        old = [at for at, stays in zip(observations, kept, strict=False) if at and not stays]
        keep = set(outputs(view, exempt=self.keep_tools, shell=True)) if self.keep_tools else None
        old = [at for at in old if keep is None or at in keep]
        always = outputs(view, self.remove_tools, shell=True) if self.remove_tools else []
        return mask(view, context, {*old, *always}, omitted)
