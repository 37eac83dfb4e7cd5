"""`attncache bench`: measure the engine, the index, a server and stored keys and values, beside others.

report.py describes the machine; peers.py, prefix_peers.py and worker.py run other engines in separate
processes; few_shot.py and conversations.py make the work for stored keys and values.
"""
