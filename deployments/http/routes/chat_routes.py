"""Images as answers of a chat (`POST /v1/chat/completions`), which is how vLLM-Omni's benchmark asks for them, and what
chats of other clients can show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request

from deployments.backend import Backend, wait_for_result
from deployments.http.body import JSON, make_schema, read_fields, run_until_disconnect
from deployments.http.routes.image_routes import list_data_urls
from deployments.models.served import ServedModel
from deployments.plain_updates import to_plain
from deployments.schemas.chat import parse_chat_request
from deployments.schemas.common.foreign_fields import describe_ignored
from deployments.schemas.common.ignored_fields import list_ignored
from deployments.schemas.edit import build_images
from deployments.schemas.image import ImageRequest
from deployments.schemas.image_field import count_image_chars
from tridentserve.engine.live.updates import CompletedUpdate

CHAT_ROUTES = ("POST /v1/chat/completions",)


def add_chat_routes(
    api: FastAPI, backend: Backend, models: Mapping[str, ServedModel], max_body_bytes: int, lenient: bool
) -> None:
    """A text alone goes to a model that makes images, a text with an image to one that edits them."""

    @api.post("/v1/chat/completions", openapi_extra=_describe_body())
    async def answer_chat(request: Request) -> dict[str, Any]:
        sent = await read_fields(request, max_body_bytes, count_image_chars(models))
        chat, known = parse_chat_request(sent.values, lenient), dict(models)
        spec, inputs = await build_images(chat.asked, known, sent.arrived_s)
        updates = backend.generate(spec, inputs, with_progress=False)
        update = await run_until_disconnect(request.receive, wait_for_result(updates))
        ignored = list_ignored(chat.asked, known[spec.model], streams=False)
        return _describe_chat(update, chat.as_text, sorted({*ignored, *chat.ignored}))


def _describe_body() -> dict[str, Any]:
    """The part of the OpenAPI document about the body: messages, and the fields of an image request but its prompt."""
    schema = make_schema(ImageRequest)
    messages = {"type": "array", "minItems": 1, "items": {"type": "object"}, "description": "The messages of a chat."}
    properties = {"messages": messages, **schema["properties"]}
    for name in ("prompt", "stream"):
        del properties[name]
    properties["response_format"] = {
        "type": "object",
        "description": 'With `{"type": "text"}` the content of the answer is a text: Markdown with the images in it.',
    }
    content = {JSON: {"schema": {**schema, "properties": properties, "required": ["messages"]}}}
    return {"requestBody": {"required": True, "content": content}}


def _describe_chat(update: CompletedUpdate, as_text: bool, ignored: Sequence[str]) -> dict[str, Any]:
    """OpenAI's form with all images in one message, and in addition all that is known of the request."""
    about = {key: value for key, value in to_plain(update).items() if key not in ("type", "images")}
    facts = {key: about[key] for key in ("stage_durations", "peak_memory_mb")}
    urls = list_data_urls(update)
    parts = [{"type": "image_url", "image_url": {"url": url}, **facts} for url in urls]
    text = "\n\n".join(f"![image {number}]({url})" for number, url in enumerate(urls, 1))
    message = {"role": "assistant", "content": text if as_text else parts}
    return {
        "id": f"chatcmpl-{update.request_id}",
        "object": "chat.completion",
        "choices": [{"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}],
        "usage": {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0},
        **describe_ignored(ignored),
        **about,
    }
