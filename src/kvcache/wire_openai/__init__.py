"""OpenAI's JSON <-> requests and events. Values in, values out: no I/O, and the time is passed in.

    bytes -> CompletionBody | ChatBody -> SamplingParams     `parse_completion`, `parse_chat`, then `.params(room)`
    Token, Completion -> objects for JSON                     `replies_to(body, ...)`, one for each HTTP request

Beyond OpenAI's fields it takes those that other servers have: `top_k`, `min_p`, `repetition_penalty`, `ignore_eos`,
`stop_token_ids`, `context_shift`, `keep`, `use_beam_search`, `length_penalty`, `early_stopping`, and `cache_salt`,
which separates tenants.
"""

from __future__ import annotations

from kvcache.wire_openai.bodies import ChatBody, CompletionBody, Message, parse_chat, parse_completion
from kvcache.wire_openai.replies import (
    ChatChunk,
    ChatReply,
    Chunk,
    CompletionReply,
    ErrorReply,
    ModelList,
    ModelObject,
    Numbered,
    Replies,
    error_reply,
    model_list,
    model_object,
    replies_to,
)

__all__ = [
    "ChatBody",
    "ChatChunk",
    "ChatReply",
    "Chunk",
    "CompletionBody",
    "CompletionReply",
    "ErrorReply",
    "Message",
    "ModelList",
    "ModelObject",
    "Numbered",
    "Replies",
    "error_reply",
    "model_list",
    "model_object",
    "parse_chat",
    "parse_completion",
    "replies_to",
]
