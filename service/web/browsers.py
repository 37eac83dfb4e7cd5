"""What browsers and clients of large responses need: CORS and compression. Both are off by default."""

from __future__ import annotations

from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.types import ASGIApp

from service.settings import Settings

# A page of another origin may read these headers of a response.
_EXPOSED = [
    *("Retry-After", "X-Request-Id"),
    *("X-AttnCache-Hits", "X-AttnCache-Cached-Tokens", "X-AttnCache-Repeated", "X-AttnCache-Model"),
]
# Smaller responses fit into a few packets anyway.
_LEAST_GZIP_BYTES = 8 * 1024
# Numbers written as text hardly become smaller at higher levels, and the event loop waits meanwhile.
_GZIP_LEVEL = 1


def for_browsers(app: ASGIApp, settings: Settings) -> ASGIApp:
    """Return the app with the middleware around it that the settings ask for."""
    if settings.gzip:
        app = GZipMiddleware(app, minimum_size=_LEAST_GZIP_BYTES, compresslevel=_GZIP_LEVEL)
    if settings.cors_origin is not None:
        app = CORSMiddleware(
            app,
            allow_origins=[origin.strip() for origin in settings.cors_origin.split(",")],
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=_EXPOSED,
        )
    return app
