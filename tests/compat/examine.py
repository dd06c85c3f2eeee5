"""Examine a family: the row that docs/models.md has for it, or an assertion that fails."""

from dataclasses import astuple, dataclass

import conformance
import families

from kvevict import UnsupportedModelError, patch


@dataclass(frozen=True)
class Row:
    """One family in the table.

    Attributes:
        family: the model type, and what is varied.
        served: "yes", "refused", or "not built" where there is no tiny model to try.
        in_cache: whether positions inside the cache are to be had ("-" where not served).
        padded: whether left-padded rows are.
        why: what is missing, in the words of the error.
    """

    family: str
    served: str
    in_cache: str = "-"
    padded: str = "-"
    why: str = ""

    def __str__(self) -> str:
        return "| " + " | ".join(astuple(self)) + " |"


def examine(name: str) -> Row:
    """Run the whole suite on a family.

    Raises:
        AssertionError: a family that `patch` accepts and that breaks a promise.
    """
    try:
        model = families.build(name)
    except families.NotBuiltError:
        return Row(name, "not built")
    try:
        with patch(model) as handle:
            pads = handle.pads_problem
            limit = handle.findings.position_limit
    except UnsupportedModelError as error:
        return Row(name, "refused", why=reason(error))
    conformance.large_budget_changes_nothing(model)
    conformance.budget_is_hard(model)
    conformance.chunks_change_nothing(model)
    conformance.scores_are_eagers_sums(model)
    conformance.h2o_is_exact(model)
    turned = conformance.streaming_is_exact(model)
    why = []
    if pads is None:
        conformance.padded_row_is_the_row_alone(model)
    else:
        why.append("recurrent layers see the pads")
    if not conformance.drafts_leave_no_trace(model):
        why.append("no drafts")
    if limit is not None:
        why.append("positions fed stay below the length where its positions change")
    return Row(name, "yes", "yes" if turned else "no", "no" if pads else "yes", "; ".join(why))


def reason(error: UnsupportedModelError) -> str:
    """Return an error without the model's name and without the measured numbers."""
    text = str(error).partition(": ")[2]
    text = text.partition(": `sdpa`")[0].partition(" (off by")[0]
    return text.replace("|", "/").split(", so nothing")[0].strip()
