"""Classify texts over HTTP, among given labels: python examples/classify.py [URL of the server]."""

import json
import sys
import urllib.request

URL = sys.argv[1] if len(sys.argv) > 1 else "http://localhost:8080"

texts = ["My parcel has not arrived", "I forgot my password", "I want my money back"]
body = {"inputs": texts, "labels": ["delivery", "refund", "login"]}
request = urllib.request.Request(f"{URL}/classify", json.dumps(body).encode())
with urllib.request.urlopen(request) as response:
    answers = json.load(response)

for text, scores in zip(texts, answers, strict=True):
    best = scores[0]  # the labels of a text are sorted by score, the best label first
    print(f"{text}: {best['label']} ({best['score']:.2f})")
