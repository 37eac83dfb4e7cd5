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

router = APIRouter(include_in_schema=False)
docs_router = APIRouter(include_in_schema=False)

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


@router.api_route("/", methods=["GET", "HEAD"])
async def page() -> Response:
    """Return the page."""
    return _response("index.html", _FILES, _HEADERS)


@router.api_route("/page/{name}", methods=["GET", "HEAD"])
async def page_file(name: str) -> Response:
    """Return a style sheet, script or icon of the page."""
    if name not in _FILES:
        raise NotFound("the page has no such file")
    return _response(name, _FILES, _HEADERS)


@docs_router.api_route("/docs", methods=["GET", "HEAD"])
async def docs() -> Response:
    """Return the page to try the routes."""
    return _response("docs.html", _FILES_OF_DOCS, _HEADERS_OF_DOCS)


@docs_router.api_route("/docs/{name}", methods=["GET", "HEAD"])
async def docs_file(name: str) -> Response:
    """Return a style sheet, script or icon of the page to try the routes."""
    if name not in _FILES_OF_DOCS:
        raise NotFound("the page has no such file")
    return _response(name, _FILES_OF_DOCS, _HEADERS_OF_DOCS)


def _response(name: str, served: Mapping[str, bytes], headers: Mapping[str, str]) -> Response:
    return Response(served[name], media_type=_MEDIA_TYPES[name.rpartition(".")[2]], headers=headers)
