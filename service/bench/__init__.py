"""`attncache bench`: measure the engine, the index and a server beside other engines and servers.

report.py describes the machine; peers.py and worker.py run other engines in separate processes.
"""
