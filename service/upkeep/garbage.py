"""Keep Python's garbage collector from stopping the server.

The collector looks for objects that hold each other, while every thread waits. Modules and models are some
hundred thousand objects that stay until the end: to look at them all takes 0.2 seconds.
"""

from __future__ import annotations

import gc

# Requests that wait are some ten objects each, and each collection looks at the new ones.
_NEW_OBJECTS = 20_000


def look_at_requests_only() -> None:
    """Let the collector look at new objects only, and less often.

    An object that exists now is still freed when nothing refers to it, unless it refers to itself.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_NEW_OBJECTS)
