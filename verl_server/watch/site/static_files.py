"""`StaticFiles`: the page, its scripts and styles, as a table that is read once: no path of a request is opened."""

from __future__ import annotations

from pathlib import Path

from starlette.responses import Response

from verl_server.watch.site.json_answers import error_response

FOLDER = Path(__file__).parent / "static"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}


class StaticFiles:
    """The files of a folder whose endings have a type, by their path in the folder."""

    def __init__(self, folder: Path = FOLDER) -> None:
        self._files = {
            file.relative_to(folder).as_posix(): (file.read_bytes(), _TYPES[file.suffix])
            for file in sorted(folder.rglob("*"))
            if file.is_file() and file.suffix in _TYPES
        }

    def response(self, name: str) -> Response:
        if name not in self._files:
            return error_response(404, f"There is no /static/{name}.", "The page is at /.")
        content, kind = self._files[name]
        return Response(content, media_type=kind)
