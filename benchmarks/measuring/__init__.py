"""What the benchmarks measure: the engine, the index, a server and stored keys and values, beside others.

peers.py, prefix_peers.py and worker.py run other engines in separate processes; few_shot.py, conversations.py
and replay.py make the work for stored keys and values.
"""
