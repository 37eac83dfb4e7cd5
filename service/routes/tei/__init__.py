"""The routes of text-embeddings-inference (TEI), in its shapes, beside /embed."""
