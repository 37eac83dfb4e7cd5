"""Ports for servers that a test starts later, and perhaps again after a kill."""

import socket

_held = []


def free_port(host="127.0.0.1"):
    """Return a port that nobody else gets before a server listens there, nor while the server is away.

    A socket that is bound, and never listens, holds the port until this process ends. A server that sets
    SO_REUSEADDR may listen there all the same.
    """
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind((host, 0))
    _held.append(holder)
    return holder.getsockname()[1]
