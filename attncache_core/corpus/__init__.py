"""Generate the shipped corpus of short customer-support and search sentences, and read corpora from files.

The default database is built from the shipped corpus. generator.py generates its sentences from two text
files, templates.txt and slots.txt; comments at the top of these files explain their syntax. unfamiliar.py
generates texts that do not resemble a corpus. tables.py and reading.py read users' files.
"""

from attncache_core.corpus.generator import CorpusSentence, default_corpus, generate_corpus
from attncache_core.corpus.unfamiliar import UnfamiliarText, unfamiliar_texts

__all__ = ["CorpusSentence", "UnfamiliarText", "default_corpus", "generate_corpus", "unfamiliar_texts"]
