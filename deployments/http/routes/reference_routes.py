"""The page at `/docs`: all routes and their fields, from the OpenAPI document. It has no scripts, and unlike FastAPI's
pages it works where no other server can be reached."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import HTMLResponse

from deployments.http.body import JSON
from deployments.http.routes.console_routes import PAGE_HEADERS

REFERENCE_ROUTES = ("GET /docs",)
# What a schema says of the values that a field takes, in words.
_LIMITS = {
    "minimum": "at least {}",
    "exclusiveMinimum": "more than {}",
    "maximum": "at most {}",
    "minLength": "at least {} characters",
    "maxLength": "at most {} characters",
    "maxItems": "at most {} entries",
}
_PAGE = """\
<!doctype html>
<html lang="en">
  <head>
    <meta charset="utf-8">
    <meta name="viewport" content="width=device-width, initial-scale=1">
    <meta name="color-scheme" content="light dark">
    <title>{title} API</title>
    <link rel="icon" href="{root}/console/icon.svg" type="image/svg+xml">
    <link rel="stylesheet" href="{root}/console/console.css">
  </head>
  <body>
    <header class="top">
      <h1>{title} {version}: routes</h1>
      <nav aria-label="Other pages">
        <a href="{root}/">Console</a>
        <a href="{root}/openapi.json">OpenAPI document</a>
      </nav>
    </header>
    <main class="reference">
      <ul>
{contents}
      </ul>
{sections}
    </main>
  </body>
</html>
"""


def add_reference_routes(api: FastAPI) -> None:
    """Called after all other routes have been added."""

    @api.get("/docs", response_class=HTMLResponse)
    async def show_reference(request: Request) -> HTMLResponse:
        """All routes and fields, as a page."""
        root = request.scope.get("root_path", "").rstrip("/")
        return HTMLResponse(_render(api.openapi(), root), headers=PAGE_HEADERS)


def _render(document: Mapping[str, Any], root: str) -> str:
    routes = [
        (f"{method.upper()} {path}", route)
        for path, methods in document["paths"].items()
        for method, route in methods.items()
    ]
    contents = (f'<li><a href="#{_make_anchor(name)}"><code>{escape(name)}</code></a></li>' for name, _ in routes)
    return _PAGE.format(
        title=escape(document["info"]["title"]),
        version=escape(document["info"]["version"]),
        root=escape(root),
        contents="\n".join(contents),
        sections="\n".join(_render_route(name, route) for name, route in routes),
    )


def _make_anchor(name: str) -> str:
    return escape("".join(letter if letter.isalnum() else "-" for letter in name))


def _render_route(name: str, route: Mapping[str, Any]) -> str:
    parts = [f'<h2 id="{_make_anchor(name)}"><code>{escape(name)}</code></h2>']
    if about := route.get("description"):
        parts.append(f"<p>{_render_text(about)}</p>")
    if named := route.get("parameters"):
        rows = ((each["name"], {"description": each["in"], **each["schema"]}, each["required"]) for each in named)
        parts.append(_render_table("Parameter", rows))
    if (body := route.get("requestBody")) is not None:
        forms = body["content"]
        schema = forms.get(JSON, next(iter(forms.values())))["schema"]
        required = schema.get("required", ())
        rows = ((field, about, field in required) for field, about in schema["properties"].items())
        parts += [f"<p>Body: {escape(', '.join(forms))}</p>", _render_table("Field", rows)]
    return "\n".join(parts)


def _render_table(head: str, rows: Iterator[tuple[str, Mapping[str, Any], bool]]) -> str:
    titles = "".join(f'<th scope="col">{title}</th>' for title in (head, "Type", "Default", "Meaning"))
    lines = [
        f'<tr><th scope="row"><code>{escape(name)}</code></th><td>{_render_type(about)}</td>'
        f"<td>{'required' if required else _render_default(about)}</td>"
        f"<td>{_render_text(about.get('description', ''))}</td></tr>"
        for name, about, required in rows
    ]
    return f"<div><table><thead><tr>{titles}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"


def _render_type(about: Mapping[str, Any]) -> str:
    """The types and limits of a field; null means the default, and is left out."""
    kinds = [kind for kind in about.get("anyOf", (about,)) if kind.get("type") != "null"]
    return escape(" or ".join(_describe_kind(kind) for kind in kinds))


def _describe_kind(kind: Mapping[str, Any]) -> str:
    if (choices := kind.get("enum")) is not None:
        return " | ".join(map(str, choices))
    if "const" in kind:
        return str(kind["const"])
    limits = [words.format(_format_number(kind[key])) for key, words in _LIMITS.items() if key in kind]
    return ", ".join([str(kind.get("type", "any")), *limits])


def _format_number(value: float) -> str:
    return f"{int(value):,}" if value == int(value) else str(value)


def _render_default(about: Mapping[str, Any]) -> str:
    return f"<code>{escape(str(about['default']))}</code>" if about.get("default") not in (None, "") else ""


def _render_text(text: str) -> str:
    """A description, in which backticks mark code."""
    parts = escape(text).split("`")
    return "".join(f"<code>{part}</code>" if number % 2 else part for number, part in enumerate(parts))
