"""The reuse of keys and values of chunks that stand in any order: CacheBlend."""
