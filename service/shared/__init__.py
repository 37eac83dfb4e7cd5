"""What servers on several machines share in one Valkey server, as by --shared.

client      connections, how long an answer may take, and what happens after a failure; imports valkey
store       histories of sessions, and what API keys have used
blocks      keys and values
findings    what verification has found
"""
