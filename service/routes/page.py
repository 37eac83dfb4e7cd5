"""GET /: the page that shows the server at work, and the files of the page.

The files are the same for everyone and hold nothing of the server. The page reads /metrics and /info, and its
box sends requests to the routes for inference and to /explain. So visitors see what they may ask these routes
for.
"""

from __future__ import annotations

from importlib.resources import files

from fastapi import APIRouter, Response

from service.errors import NotFound

router = APIRouter(include_in_schema=False)

_MEDIA_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
# By name. Other files in the folder, such as an editor's backup, are not served.
_FILES = {
    file.name: file.read_bytes()
    for file in files("service").joinpath("page").iterdir()
    if file.name.rpartition(".")[2] in _MEDIA_TYPES
}
_HEADERS = {
    # The page loads nothing from other servers, runs only its own scripts, and is shown in no frame.
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; object-src 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    # The files change with the server's version, and their names do not.
    "Cache-Control": "no-store",
}


@router.api_route("/", methods=["GET", "HEAD"])
async def page() -> Response:
    """Return the page."""
    return _file("index.html")


@router.api_route("/page/{name}", methods=["GET", "HEAD"])
async def page_file(name: str) -> Response:
    """Return a style sheet, script or icon of the page."""
    if name not in _FILES:
        raise NotFound("the page has no such file")
    return _file(name)


def _file(name: str) -> Response:
    return Response(_FILES[name], media_type=_MEDIA_TYPES[name.rpartition(".")[2]], headers=_HEADERS)
