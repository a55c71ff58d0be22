"""The description of the server in OpenAPI 3.1, made from the very models that check the bodies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from pydantic import TypeAdapter

from kvcache.server.model import ServedModel

__all__ = ["Operation", "described"]

_REF = "#/components/schemas/{model}"

_FAILURES = {
    "400": "the body is wrong; the message names the field",
    "401": "no or a wrong key",
    "403": "the host, or the page that asks, is not of this machine",
    "404": "no such model",
    "405": "another method",
    "408": "the body did not come in time",
    "413": "the body is too large",
    "500": "something nobody thought of",
    "503": "too many requests wait, the time is over, or the server is stopping",
}


class Operation(NamedTuple):
    """One method of one path. body: None where there is none. stream: the media type of a streamed answer.

    media: the type of the whole one.
    """

    method: str
    path: str
    body: Any
    reply: Any
    error: Any
    stream: str | None = None
    media: str = "application/json"


def described(operations: Sequence[Operation], model: ServedModel, version: str) -> dict[str, Any]:
    """The document. Of `model`: the names that bodies may give, and the outputs of one prompt."""
    inputs: list[tuple[str, Any, TypeAdapter[Any]]] = []
    for each in operations:
        if each.body is not None:
            inputs.append((f"{each.path} body", "validation", TypeAdapter(each.body)))
        inputs.append((f"{each.path} reply", "serialization", TypeAdapter(each.reply)))
        inputs.append((f"{each.path} error", "serialization", TypeAdapter(each.error)))
    found, definitions = TypeAdapter.json_schemas(inputs, ref_template=_REF)
    schemas = {f"{key}": schema for (key, _), schema in found.items()}
    components: dict[str, Any] = definitions.get("$defs", {})
    for name, schema in components.items():
        if name.endswith("Body") and "model" in schema["properties"]:
            schema["properties"]["model"] = _name(model)
        for several in ("n", "best_of"):
            for each in schema.get("properties", {}).get(several, {}).get("anyOf", ()):
                if "maximum" in each:
                    each["maximum"] = min(each["maximum"], model.max_sequences)
    paths: dict[str, Any] = {}
    for each in operations:
        path = each.path.replace(":path}", "}")
        paths.setdefault(path, {})[each.method.lower()] = _operation(each, schemas, model)
    return {
        "openapi": "3.1.0",
        "info": {"title": "kvcache", "version": version},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"key": []}],
    }


def _name(model: ServedModel) -> dict[str, Any]:
    return {"type": "string", "enum": list(model.names)}


def _operation(operation: Operation, schemas: dict[str, Any], model: ServedModel) -> dict[str, Any]:
    error = {"application/json": {"schema": schemas[f"{operation.path} error"]}}
    answers: dict[str, Any] = {operation.media: {"schema": schemas[f"{operation.path} reply"]}}
    if operation.stream:
        answers[operation.stream] = {"schema": {}}  # 3.1 cannot describe the items of a stream
    made: dict[str, Any] = {
        "operationId": f"{operation.method.lower()}{operation.path.replace('/', '_').partition('{')[0].rstrip('_')}",
        "responses": {
            "200": {"description": "an answer", "content": answers},
            **{status: {"description": text, "content": error} for status, text in _FAILURES.items()},
        },
    }
    if operation.body is not None:
        schema = schemas[f"{operation.path} body"]
        made["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    if "{name" in operation.path:
        made["operationId"] += "_name"
        made["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": _name(model)}]
    return made
