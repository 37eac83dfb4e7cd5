"""All routes that Front answers by itself."""

from __future__ import annotations

from service.routes import classify, embed
from service.routes.openai import classify as openai_classify
from service.routes.openai import embeddings
from service.routes.tei import embed_all, predict, rerank, root, similarity, tokens

ENDPOINTS = (
    *embed.ENDPOINTS,
    *classify.ENDPOINTS,
    *rerank.ENDPOINTS,
    *embed_all.ENDPOINTS,
    *similarity.ENDPOINTS,
    *predict.ENDPOINTS,
    *tokens.ENDPOINTS,
    *root.ENDPOINTS,
    *embeddings.ENDPOINTS,
    *openai_classify.ENDPOINTS,
)
