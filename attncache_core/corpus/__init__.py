"""The corpus that the package ships: short customer-support and search sentences.

The default database is built from it. The sentences are generated from two small text files,
``templates.txt`` and ``slots.txt``, whose first lines explain themselves.
"""

from attncache_core.corpus.generator import CorpusSentence, default_corpus, generate_corpus

__all__ = ["CorpusSentence", "default_corpus", "generate_corpus"]
