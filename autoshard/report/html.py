"""The report as one page that needs nothing else: no server, no network."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from html import escape
from importlib.resources import files
from typing import Any

#: in the order in which the page reads them
_SCRIPTS = ("viewer.js", "arrange.js", "graph.js", "passes.js", "timeline.js", "tables.js", "start.js")
_PLACES = re.compile(r"<!--(title|style|data|script)-->")
#: characters that could end a script element, or a line of JavaScript in older engines
_UNSAFE = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def page(document: Mapping[str, Any]) -> str:
    """The viewer with a document (see `autoshard.report.document`) inside it."""
    title = f"{document['title']} on {document['mesh']}"
    parts = {
        "title": escape(title),
        "style": _file("viewer.css"),
        "data": script_json(document),
        "script": "\n".join(map(_file, _SCRIPTS)),
    }
    # one pass over the template: what is put in is not looked at again
    return _PLACES.sub(lambda place: parts[place.group(1)], _file("viewer.html"))


def script_json(document: Mapping[str, Any]) -> str:
    """JSON that may stand inside a script element whatever the names in it are."""
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return re.sub("[<>&\u2028\u2029]", lambda match: _UNSAFE[match.group()], text)


def _file(name: str) -> str:
    return files("autoshard.report").joinpath("viewer", name).read_text(encoding="utf-8")
