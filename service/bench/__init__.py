"""`attncache bench`: how fast the engine, the index and a server are, beside what one would use instead.

report.py says on what machine; peers.py and worker.py run other engines in processes of their own.
"""
