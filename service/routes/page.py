"""GET /, the page that shows the server at work; GET /docs, the page to try the routes; and their files.

The files are the same for everyone and hold nothing of the server. The first page reads /metrics and /info,
and its box sends requests to the routes for inference and to /explain. The second page is Swagger UI, which
reads /openapi.json. So visitors see what they may ask these routes for. Browsers load nothing from others.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files

from fastapi import APIRouter, Response

from service.errors import NotFound

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
_SWAGGER_UI = files("fastapi_swagger").joinpath("resources")
_FILES_OF_DOCS = {
    **{name: _FILES[name] for name in ("docs.html", "docs.js", "icon.svg")},
    **{name: _SWAGGER_UI.joinpath(name).read_bytes() for name in ("swagger-ui.css", "swagger-ui-bundle.js")},
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
# Swagger UI's style sheet holds its pictures, and its scripts set styles of single elements.
_HEADERS_OF_DOCS = {
    **_HEADERS,
    "Content-Security-Policy": f"{_HEADERS['Content-Security-Policy']}; img-src 'self' data:; "
    "style-src 'self' 'unsafe-inline'",
}


def _router(
    path: str, index: str, below: str, served: Mapping[str, bytes], headers: Mapping[str, str]
) -> APIRouter:
    """Return the routes of a page, whose file is `index`, and of its other files at `below`."""
    router = APIRouter(include_in_schema=False)

    @router.api_route(path, methods=["GET", "HEAD"])
    async def page() -> Response:
        return await page_file(index)

    @router.api_route(below + "/{name}", methods=["GET", "HEAD"])
    async def page_file(name: str) -> Response:
        if name not in served:
            raise NotFound("the page has no such file")
        return Response(served[name], media_type=_MEDIA_TYPES[name.rpartition(".")[2]], headers=headers)

    return router


router = _router("/", "index.html", "/page", _FILES, _HEADERS)
docs_router = _router("/docs", "docs.html", "/docs", _FILES_OF_DOCS, _HEADERS_OF_DOCS)
