"""Embed and classify texts in this process, without a server: python examples/library_embed.py."""

from attncache_core import DEFAULT_MODEL, PrefillEngine, class_scores, find_checkpoint

checkpoint = find_checkpoint(DEFAULT_MODEL)
engine = PrefillEngine.load(checkpoint)
first, second = engine.embed(["Where is my parcel?", "My delivery has not arrived."])
print(f"{len(first)} dimensions, cosine similarity {first @ second:.3f}")

labels = ("delivery", "refund", "login")
classifier = PrefillEngine.load(checkpoint.adapted(labels=labels))
result = classifier.run(classifier.requests(classifier.tokenize(["I forgot my password"])))
(scores,) = class_scores(classifier.decisions.class_logits(result.outputs))
for label, score in sorted(zip(labels, scores, strict=True), key=lambda pair: -pair[1]):
    print(f"{label} {score:.2f}")
