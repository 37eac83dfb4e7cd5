"""A server process at full load for minutes, while clients and its files misbehave.

    python -m benchmarks soak [--minutes 10] [--plot FILE] [-- OPTIONS OF attncache serve]

Every answer is compared with the answer of the idle server, and the memory is watched.
"""
