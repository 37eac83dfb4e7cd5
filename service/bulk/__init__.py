"""Files of texts in, files of embeddings or classes out, without a server.

    rows -> chunks -> computing, on the engine's threads -> spool -> formats
                                                            continues after the process was killed

At most two chunks are in memory, so a file may have any size.
"""
