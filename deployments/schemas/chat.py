"""The body of a chat request that asks for images, as vLLM-Omni's clients send it: the text of the last message of the
user is the prompt, an image in it is the input image, and the other fields are those of an image request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deployments.schemas.common.parsing import parse_as
from deployments.schemas.edit import EditRequest
from deployments.schemas.image import ImageRequest
from tridentserve.errors import InvalidRequestError

# Fields of chats that say nothing about an image.
_OF_CHATS = frozenset(
    (
        "add_generation_prompt",
        "audio",
        "chat_template_kwargs",
        "continue_final_message",
        "frequency_penalty",
        "function_call",
        "functions",
        "ignore_eos",
        "include_stop_str_in_output",
        "logit_bias",
        "logprobs",
        "max_completion_tokens",
        "max_tokens",
        "metadata",
        "min_p",
        "min_tokens",
        "mm_processor_kwargs",
        "modalities",
        "parallel_tool_calls",
        "prediction",
        "presence_penalty",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "reasoning_effort",
        "repetition_penalty",
        "response_format",
        "return_token_ids",
        "safety_identifier",
        "skip_special_tokens",
        "stop",
        "store",
        "stream_options",
        "temperature",
        "tool_choice",
        "tools",
        "top_k",
        "top_logprobs",
        "top_p",
        "verbosity",
        "web_search_options",
    )
)
_MESSAGES = "messages"
# How a client says in OpenAI's words that it reads texts alone.
_AS_TEXT = {"type": "text"}


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A chat that asks for images."""

    asked: ImageRequest
    """The request for the images, an `EditRequest` where the message has an image."""
    as_text: bool
    """The content of the answer is a text, in place of a list of parts."""
    ignored: tuple[str, ...]
    """The fields of chats that have no effect."""


def parse_chat_request(body: Any, lenient: bool = True) -> ChatRequest:
    """Raises `InvalidRequestError`, which never repeats a value of the body."""
    if not isinstance(body, Mapping):
        raise InvalidRequestError('the body must be an object of named fields, such as {"messages": [...]}')
    if body.get("stream"):
        raise InvalidRequestError("stream: must be false here; POST /v1/images/generations streams", "stream")
    prompt, images = _read_message(body.get(_MESSAGES))
    as_text = body.get("response_format") == _AS_TEXT
    if as_text:
        body = {name: value for name, value in body.items() if name != "response_format"}
    own, of_chats = _part_fields(body, lenient)
    fields = {name: value for name, value in own.items() if name not in (_MESSAGES, "stream")}
    if isinstance(extra := fields.get("extra_body"), Mapping):
        fields["extra_body"], of_chats_there = _part_fields(extra, lenient)
        of_chats |= of_chats_there
    if "prompt" in fields:
        raise InvalidRequestError("prompt: is the text of the last message here", "prompt")
    fields["prompt"] = prompt
    kind: type[ImageRequest] = ImageRequest
    if images:
        kind, fields["image"] = EditRequest, images
    request = parse_as(kind, fields, lenient=lenient, others=_OF_CHATS if lenient else ())
    return ChatRequest(request, as_text, tuple(sorted(of_chats)))


def _part_fields(body: Mapping[str, Any], lenient: bool) -> tuple[dict[str, Any], set[str]]:
    """The fields of `body` without those of chats, which a service that is not lenient does not know; and the names of
    the latter that were given a value."""
    of_chats = _OF_CHATS & body.keys() if lenient else frozenset[str]()
    own = {name: value for name, value in body.items() if name not in of_chats}
    return own, {name for name in of_chats if body[name] is not None}


def _read_message(messages: Any) -> tuple[str, list[Any]]:
    """The text and the images of the last message of the user."""
    if not isinstance(messages, list) or not messages:
        raise InvalidRequestError("messages: must be a list with at least one message", _MESSAGES)
    of_user = [one for one in messages if isinstance(one, Mapping) and one.get("role") == "user"]
    if not of_user:
        raise InvalidRequestError('messages: must have one with the role "user"', _MESSAGES)
    content = of_user[-1].get("content")
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(parts, list):
        raise InvalidRequestError("messages: content must be a text, or a list of parts", _MESSAGES)
    texts: list[str] = []
    images: list[Any] = []
    for part in parts:
        match part:
            case {"type": "text", "text": str(text)}:
                texts.append(text)
            case {"type": "image_url", "image_url": {"url": address}}:
                images.append(address)
            case {"type": "image_url", "image_url": str(address)}:
                images.append(address)
            case _:
                raise InvalidRequestError('messages: parts are of type "text" or "image_url"', _MESSAGES)
    return "\n".join(texts), images
