"""Measure AttnCache, its peers and the papers' baselines from a checkout: `python -m benchmarks NAME`.

commands/    what a command line says: options, tables and reports
measuring/   what the commands measure: the engine, the index, a server, stored keys and values, and peers
papers/      the papers' baselines and experiments
soak/        a server at full load, while clients and its files misbehave

Each module beside this one is a measurement by itself.
"""
