"""How many bytes of requests the server holds at a time."""

from __future__ import annotations

from service.errors import BodyTooLarge, QueueFull


class ByteBudget:
    """Counts the bytes of request bodies from their arrival until their response. Used on the event loop."""

    def __init__(self, most: int) -> None:
        """most: bytes of all requests together."""
        self._most = most
        self.taken = 0

    def take(self, count: int) -> None:
        """Count bytes that arrive. Raises QueueFull if they would be too many."""
        if self.taken + count > self._most:
            raise QueueFull(
                f"requests with {self.taken} bytes are being answered, and at most {self._most} are accepted",
                retry_after_seconds=1,
            )
        self.taken += count

    def give(self, count: int) -> None:
        """Count bytes of a request that was answered as free."""
        self.taken -= count


def require_small(size: int, most: int) -> None:
    """Raise BodyTooLarge if a body has more than `most` bytes."""
    if size > most:
        raise BodyTooLarge(f"the body must have at most {most} bytes; send fewer texts per request")
