"""What a server logs once it is loaded: model, processor, database, what reuse saves, limits and address."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from attncache_core import PrefillEngine
from attncache_core.calibration.policy_selection import could_prove
from attncache_core.calibration.thresholds import MIN_PROBES
from attncache_core.engine.info import EngineInfo
from attncache_core.reuse.maps.manifest import Manifest
from attncache_core.reuse.maps.map_reuse import MapReuse
from service.settings import Settings


def summary(engine: PrefillEngine, settings: Settings, urls: Sequence[str]) -> Iterator[str]:
    """Yield the lines of the summary. urls: where the server listens."""
    yield f"model     {_model(engine)}"
    yield f"computes  {_processor(engine)}"
    yield f"database  {_database(engine)}"
    yield f"reuse     {expected_savings(engine)}"
    yield f"limits    {_limits(settings)}"
    yield f"serves    {', '.join(urls)}"


def slowness(info: EngineInfo) -> str | None:
    """Return in one line that torch's operators compute although compiled code would be faster, and why."""
    if info.compiled_off is None:
        return None
    return (
        "the plain executor serves, without compiled code: with the default model on a processor with AVX2, "
        "full batches took 1.2 to 1.6 times the processor time, and single texts 2.4 to 3.6 times "
        f"(docs/benchmarks.md#without-compiled-code): {info.compiled_off}"
    )


def expected_savings(engine: PrefillEngine) -> str:
    """Return what reuse is expected to save, at which quality, or why nothing is reused."""
    reuse = engine.map_reuse
    if engine.key_values:
        store = engine.key_values.store
        maximum = store.memory.pool.places * store.layout.block_bytes / 2**20
        transfers = store.transfers
        disk, remote = (transfers.disk, transfers.remote) if transfers else (None, None)
        behind = f" and {disk.most_bytes / 2**20:,.0f} MiB on disk" if disk else ""
        behind += ", and in the shared store" if remote else ""
        return f"storing keys and values in up to {maximum:,.0f} MiB of memory{behind}{_blended(engine)}"
    if reuse is None:
        return f"serving exactly: {'; '.join(engine.reuse_off) or 'there is no database'}"
    if reuse.reuse_off:
        return f"serving exactly: {'; '.join(reuse.reuse_off)}"
    manifest, budget = reuse.database.manifest, reuse.policy.budget
    mean = manifest.quality.get("mean")
    kept = f"mean {budget.measure} {mean:.4f} of the hits" if mean and budget.binds else "no budget is kept"
    if reuse.awaits_gain:
        return "serving exactly until it is measured whether reuse of attention maps saves time here"
    if reuse.gain is None:
        if reuse.approximates:
            return f"reusing attention maps whether it saves time here or not ({kept})"
        return f"serving exactly: {_why_nothing_approximates(reuse)}"
    gain = reuse.gain.together
    makes = f"{_faster(gain.full_batch, 'full batches')} and {_faster(gain.one_text, 'single texts')}"
    # The bound of full batches decides whether anything is reused, and that of single texts where.
    proven = f"full batches at least {gain.full_batch_bound:+.1%} with 95 % confidence"
    required = f"needed is {reuse.gain.required:+.1%}, by --min-gain {reuse.gain.min_gain:g}"
    if gain.full_batch_bound >= reuse.gain.required and not reuse.approximates:
        required += ", and no length group reaches --min-gain alone"
    if not reuse.approximates:
        return f"serving exactly: reuse of attention maps would make {makes} here ({proven}; {required})"
    least = reuse.gain.least_tokens
    where = f" in batches of at least {least} tokens" if least else ""
    return f"reusing attention maps{where}: it makes {makes} here ({proven}; {required}; {kept})"


def _why_nothing_approximates(reuse: MapReuse) -> str:
    """Return the reason why at most recorded texts hit with the policy that holds at present."""
    manifest, opened = reuse.database.manifest, reuse.database.search.policy
    if opened != manifest.policy:
        return "with the given threshold, only recorded texts hit"
    if reuse.policy.steps != opened.steps:
        return "verified hits failed the budget, so at most recorded texts hit until the next calibration"
    return why_exact(manifest)


def why_exact(manifest: Manifest) -> str:
    """Return the reason why no held-out text hits with the policy of the manifest."""
    if has_given_threshold(manifest):
        return "no held-out text hits with the given threshold"
    budget, probes = manifest.policy.budget, manifest.quality.get("may_hit", manifest.quality["measured"])
    if probes < MIN_PROBES:
        return f"only recorded texts hit: {probes} held-out texts are too few to measure; give more texts"
    if not could_prove(budget, probes):
        kept, otherwise = (
            (f"99 of 100 hits keep cosine {budget.floor}", "--min-text-cosine 0")
            if budget.floor
            else (f"{budget.least:g} of the hits keep their decision", "a smaller --min-agreement")
        )
        return (
            f"only recorded texts hit: {probes} held-out texts cannot prove that {kept}; give more texts, of "
            f"which a tenth is held out, or use {otherwise}"
        )
    return "no mask fits the budget, so only recorded texts hit"


def has_given_threshold(manifest: Manifest) -> bool:
    """Return whether the operator gave θ: in the build, and no calibration has set a budget since."""
    return manifest.build.get("threshold") is not None and not manifest.policy.budget.binds


def _faster(gain: float, what: str) -> str:
    """Return in words how much faster a gain makes batches."""
    if abs(gain) < 0.005:
        return f"{what} neither faster nor slower"
    return f"{what} {abs(gain):.0%} {'faster' if gain >= 0 else 'slower'}"


def _blended(engine: PrefillEngine) -> str:
    gate = engine.blending.gate
    if gate is None:
        return ""
    if gate.ratio is None:
        return f"; chunks are computed exactly: {gate.off()}"
    kept = f"mean {gate.budget.measure} {gate.budget.least} in its calibration"
    return f"; blending chunks, {gate.ratio:.0%} of reused tokens computed again ({kept})"


def _model(engine: PrefillEngine) -> str:
    variant = "".join(
        f", {name.replace('_', ' ')} {change}" for name, change in engine.checkpoint.variant.items()
    )
    return (
        f"{engine.checkpoint.name} (fingerprint {engine.fingerprint[:12]}{variant}): "
        f"task {engine.checkpoint.task}, up to {engine.tokenizer.max_tokens:,} tokens"
    )


def _processor(engine: PrefillEngine) -> str:
    dtype = str(engine.dtype).removeprefix("torch.")
    return f"in {dtype} on {engine.model.device}, {engine.threads} threads, by {engine.attention}"


def _database(engine: PrefillEngine) -> str:
    if engine.map_reuse is None:
        return "none"
    database, info = engine.map_reuse.database, engine.map_reuse.database.info()
    return f"{database.folder} ({info.records:,} records and {info.prototypes:,} prototypes)"


def _limits(settings: Settings) -> str:
    return (
        f"batch {settings.max_batch_tokens:,} tokens, {settings.max_batch_sequences:,} texts; "
        f"request {settings.max_request_inputs:,} texts, {settings.max_request_tokens:,} tokens, "
        f"{settings.max_body_bytes / 2**20:,.1f} MiB; queue {settings.max_queue_sequences:,} texts"
    )
