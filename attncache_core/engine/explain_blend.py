"""Explain how the chunks of one prompt are blended: what is computed again, and what deviates how much."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from attncache_core.engine.prefill import PrefillEngine
from attncache_core.engine.request import PrefillRequest
from attncache_core.errors import InvalidInput
from attncache_core.reuse.blend.chunks import BlendReport, Recomputation
from attncache_core.reuse.blend.loading import USUAL_RATIO
from attncache_core.text.segments import segmented


def explain_blend(
    engine: PrefillEngine, segments: Sequence[str], query: str, separator: str, salt: bytes
) -> dict[str, Any]:
    """Say what blending does to a prompt, whether or not the server blends it. Stores its chunks.

    The prompt is blended with the gate's ratio, or with the usual one if there is no gate.
    Raises InvalidInput if chunks cannot be blended with this model, or fewer than two have tokens, and
    InputTooLong.
    """
    prompt = engine.tokenizer.default_prompt
    *chunks, query_ids, between = engine.tokenizer.turns([*segments, query, separator])
    sequence = segmented(engine.tokenizer.frame(prompt), chunks, query_ids, between)
    if len(sequence.spans) < 2:
        raise InvalidInput(
            "give two segments or more; one segment is a prefix, which is exact", field="segments"
        )
    blending, plan = engine.blending, prompt.sequence_plans[0]
    gate = blending.gate
    why: str | None
    if gate is None:
        why = "the server has no gate (--blend)"
    elif not engine.may_blend(prompt):
        why = "the gate is for listwise reranking"
    else:
        why = gate.off() or gate.shapes.outside(sequence.spans, len(sequence.ids))
    served = gate.recomputation if gate and why is None else None
    again = served or Recomputation(USUAL_RATIO)
    ids = [*sequence.ids, *plan.continuation]

    def run(recomputation: Recomputation) -> BlendReport:
        blend = blending.blend_with(sequence, ids, salt, recomputation)
        prefix_key = engine.prefix_key(ids, plan, salt)
        (report,) = engine.run([PrefillRequest(ids, False, plan, prefix_key, blend=blend)]).blends or []
        assert report is not None
        return report

    report = run(again)
    # A ratio of 0 compares nothing, and a ratio of 1 has nothing to choose.
    compared = report if report.deviations is not None else run(Recomputation(USUAL_RATIO, again.check_layer))
    found = compared.deviations if compared.deviations is not None else np.full(len(ids), np.nan)
    return {
        "served": why is None,  # whether the gate blends such prompts
        "why_exact": why,
        "ratio": again.ratio,
        "check_layer": again.check_layer,
        "tokens": engine.tokenizer.written(ids),
        "spans": sequence.spans,  # first token and end of each chunk
        "exact_tokens": report.exact_tokens,  # at the front, whose keys and values are exact
        "rows": report.rows,  # tokens that each layer computed
        "chunks": [chunk._asdict() for chunk in report.chunks],
        # Squared distance of each token's given keys and values to the computed ones in the check layer.
        # None: the token was not compared, because it is exact, or is computed in any case.
        "deviations": [float(deviation) if np.isfinite(deviation) else None for deviation in found],
    }
