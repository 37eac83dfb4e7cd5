"""Embed two texts over HTTP and compare them: python examples/embed.py [URL of the server]."""

import json
import sys
import urllib.request

URL = sys.argv[1] if len(sys.argv) > 1 else "http://localhost:8080"

body = {"inputs": ["Where is my parcel?", "My delivery has not arrived."]}
request = urllib.request.Request(f"{URL}/embed", json.dumps(body).encode())
with urllib.request.urlopen(request) as response:
    first, second = json.load(response)
    print("model", response.headers["X-AttnCache-Model"][:12])
    print("texts that reused attention maps", response.headers["X-AttnCache-Hits"])

# The embeddings have unit length, so their dot product is their cosine similarity.
similarity = sum(left * right for left, right in zip(first, second, strict=True))
print(f"{len(first)} dimensions, cosine similarity {similarity:.3f}")
