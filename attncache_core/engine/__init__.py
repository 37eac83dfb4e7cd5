"""The engine: runs token sequences through a model and returns embeddings or class logits."""
