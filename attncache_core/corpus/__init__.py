"""The corpus that the package ships: short customer-support and search sentences.

The default database is built from it. The sentences are generated from two small text files,
``templates.txt`` and ``slots.txt``, whose first lines explain themselves. ``unfamiliar.py`` generates
texts that do not resemble a corpus.
"""

from attncache_core.corpus.generator import CorpusSentence, default_corpus, generate_corpus
from attncache_core.corpus.unfamiliar import UnfamiliarText, unfamiliar_texts

__all__ = ["CorpusSentence", "UnfamiliarText", "default_corpus", "generate_corpus", "unfamiliar_texts"]
