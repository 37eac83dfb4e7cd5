"""Embed every line of a file, with several requests in flight.

python examples/embed_file.py TEXTS.txt EMBEDDINGS.jsonl [URL of the server]
"""

import json
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCE, TARGET = map(Path, sys.argv[1:3])
URL = sys.argv[3] if len(sys.argv) > 3 else "http://localhost:8080"
TEXTS_PER_REQUEST, REQUESTS_IN_FLIGHT = 32, 4


def embed(texts: list[str]) -> list[list[float]]:
    """Return the embeddings of some texts; wait and try again while the server is busy or loading."""
    request = urllib.request.Request(f"{URL}/embed", json.dumps({"inputs": texts}).encode())
    while True:
        try:
            with urllib.request.urlopen(request) as response:
                embeddings: list[list[float]] = json.load(response)
                return embeddings
        except urllib.error.HTTPError as error:
            if error.code not in (429, 503):
                raise
            time.sleep(int(error.headers["Retry-After"]))


texts = [line for line in SOURCE.read_text("utf-8").splitlines() if line.strip()]
parts = [texts[at : at + TEXTS_PER_REQUEST] for at in range(0, len(texts), TEXTS_PER_REQUEST)]
with ThreadPoolExecutor(REQUESTS_IN_FLIGHT) as pool, TARGET.open("w", encoding="utf-8") as file:
    for part in pool.map(embed, parts):
        file.writelines(json.dumps(embedding) + "\n" for embedding in part)
print(f"{len(texts)} embeddings in {TARGET}")
