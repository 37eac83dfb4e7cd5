"""Search a list of texts by meaning, over HTTP: python examples/search.py [QUESTION [URL of the server]]."""

import json
import sys
import urllib.request

QUESTION = sys.argv[1] if len(sys.argv) > 1 else "I can't get into my account"
URL = sys.argv[2] if len(sys.argv) > 2 else "http://localhost:8080"

ARTICLES = [
    "How to reset a forgotten password",
    "How to track a parcel",
    "How to return an item and get a refund",
    "How to change the delivery address",
    "Which cards and payment methods we accept",
]


def embed(texts: list[str]) -> list[list[float]]:
    """Return an embedding of unit length for each text."""
    request = urllib.request.Request(f"{URL}/embed", json.dumps({"inputs": texts}).encode())
    with urllib.request.urlopen(request) as response:
        embeddings: list[list[float]] = json.load(response)
    return embeddings


question, *articles = embed([QUESTION, *ARTICLES])
similarities = [sum(a * b for a, b in zip(question, article, strict=True)) for article in articles]
for similarity, article in sorted(zip(similarities, ARTICLES, strict=True), reverse=True):
    print(f"{similarity:.3f}  {article}")
