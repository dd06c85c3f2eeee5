"""gemini-cli's tool output masking: old outputs go to a file, a preview stays."""

from dataclasses import dataclass

from kvevict.agent.choosing import block_size, choose, is_masked, outputs
from kvevict.agent.graphemes import cut_after, cut_before
from kvevict.agent.history import Address, Block, History
from kvevict.agent.message_policy import Context, MessagePolicy, Stage, check_count
from kvevict.agent.store import Store
from kvevict.agent.verbs import mask, masked
from kvevict.policies import Window

EXEMPT = ("activate_skill", "ask_user", "enter_plan_mode", "exit_plan_mode")


def snippet(block: Block, store: Store, head: int, tail: int) -> str:
    """Return the placeholder: pointer, size and the ends of the output."""
    text = block.text
    first = text[: cut_before(text, head)]
    last = text[cut_after(text, max(head, len(text) - tail)) :]
    return (
        f"<tool_output_masked>\nkvevict-store:{store.put(text)} ({len(text)} characters)\n"
        f"{first}\n...\n{last}\n</tool_output_masked>"
    )


@dataclass(frozen=True)
class GeminiMask(MessagePolicy, name="gemini_mask"):
    """Externalise tool outputs beyond the newest 50,000 tokens, if 30,000 can be freed.

    Source: gemini-cli@5411f113, `toolOutputMaskingService` (READ): backward scan without the last
    message, newest 50,000 tokens of tool output protected, at least 30,000 prunable, exempt tools,
    a `<tool_output_masked>` snippet with path, size and 250 characters of either end, only where
    the snippet is smaller, full text on disk. Here the path is the store's pointer.

    Args:
        protect: tokens of the newest outputs that stay.
        minimum: tokens that must be prunable.
        preview: characters of either end in the snippet.
        exempt: tools whose outputs stay.
    """

    protect: int = 50_000
    minimum: int = 30_000
    preview: int = 250
    exempt: tuple[str, ...] = EXEMPT

    keeps_first = True
    keeps_last = True

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("protect", "minimum", "preview"):
            check_count(self, name)

    def stages(self) -> tuple[Stage, ...]:
        """One stage, each turn."""
        return (Stage("mask", "externalise", self._mask, self.due, self.min_gain),)

    def prunable(self, view: History, context: Context) -> list[Address]:
        """Return the outputs that may go: beyond the protected ones, smaller as a snippet."""
        found = [
            at
            for at in outputs(view, exempt=self.exempt)
            if at[0] < len(view) - 1 and not is_masked(view.block(at))
        ]
        sizes = [block_size(view, at, context) for at in found]
        kept = choose(Window(self.protect), sizes) if self.protect else [False] * len(found)
        return [at for at, stays in zip(found, kept, strict=True) if not stays]

    def _mask(self, view: History, context: Context) -> History | None:
        at = self.prunable(view, context)
        if sum(block_size(view, place, context) for place in at) < self.minimum:
            return None
        dry = mask(view, context, at, lambda b: snippet(b, Store(), self.preview, self.preview))
        chosen = [place for place in at if "mask" in dry.block(place).edits]
        store = context.services.store
        texts = {
            place: snippet(view.block(place), store, self.preview, self.preview) for place in chosen
        }
        return masked(view, texts)
