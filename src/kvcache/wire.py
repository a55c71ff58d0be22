"""What both wire formats share: a body of JSON becomes a checked model, or an `Invalid` that names the field.

    parse(Body, b'{"temperature": 3}')   ->  Invalid: temperature: Input should be less than or equal to 2; got 3

Bodies are strict: no text is taken for a number, and a field nobody knows is an error: whoever misspells `temperature`
must not get an answer computed without it. A field that is known, yet would change the answer in a way we cannot serve,
is refused by its name (`Refused`). Values only: no I/O, no clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile
from typing import Any, TypeVar, final

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, GetJsonSchemaHandler, ValidationError
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

__all__ = ["Body", "Invalid", "Refused", "parse"]

_Model = TypeVar("_Model", bound=BaseModel)

_SHOWN = 60
"""Characters of an offending value that an error repeats: a prompt of megabytes is not sent back."""


class Invalid(ValueError):
    """The body asks for what cannot be given. `param` is the field, `code` a word for programs."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        self.param = param
        self.code = code
        super().__init__(message)


class Body(BaseModel):
    """A request body: strict types, no unknown fields, no infinite numbers."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


@final
@dataclass(frozen=True, eq=False)  # typing keeps one of equal annotations, and (0,) == (False,)
class Refused:
    """`tools: Annotated[Any, Refused("none")]`: a field that we know and do not serve.

    Null, empty values and `neutral` ones ask for nothing and pass; any other is an error with the field's name.
    """

    neutral: tuple[Any, ...] = ()

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._checked, core_schema.any_schema())

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {"enum": [None, "", [], {}, *self.neutral], "description": "not supported"}

    def _checked(self, value: Any) -> Any:
        for each in (None, "", [], {}, *self.neutral):
            if value == each and isinstance(value, bool) == isinstance(each, bool):
                return value
        raise PydanticCustomError("unsupported", "this server does not support it; leave it out")


def parse(model: type[_Model], raw: bytes) -> _Model:
    """The body as `model`. Raises `Invalid` for what is no JSON (or no UTF-8), and for what does not fit the model."""
    try:
        return model.model_validate_json(raw or b"{}")
    except ValidationError as error:
        raise _explained(error) from None


def _explained(error: ValidationError) -> Invalid:
    """The first few complaints in one sentence; `param` is the first one's field."""
    found = error.errors(include_url=False, include_context=False)
    first = next((each for each in found if each["type"] == "unsupported"), found[0])
    if first["type"] == "json_invalid":
        return Invalid(f"the body is not valid JSON in UTF-8: {first['msg'].removeprefix('Invalid JSON: ')}")
    if not first["loc"]:
        return Invalid(f"the body is {_shown(first['input'])}; expected a JSON object")
    param = str(first["loc"][0])
    if first["type"] == "extra_forbidden":
        name = ".".join(map(str, first["loc"]))
        return Invalid(f"Unrecognized request argument supplied: {_clipped(name)}", param, "unknown_parameter")
    if first["type"] == "unsupported":
        name = ".".join(
            str(part) for part in first["loc"] if "[" not in str(part)
        )  # names of types: of a union's members
        return Invalid(
            f"{_clipped(name)}: {first['msg']}; got {_shown(first['input'])}", param, "unsupported_parameter"
        )
    if first["type"] == "missing":
        name = ".".join(str(part) for part in first["loc"])
        return Invalid(f"{_clipped(name)}: missing; it is required", param, "missing_required_parameter")
    # A union complains once for each of its members: tell them all, and the value once.
    same = [each for each in found if each["loc"][:1] == first["loc"][:1]]
    common = takewhile(lambda parts: len(set(parts)) == 1, zip(*(each["loc"] for each in same), strict=False))
    where = ".".join(str(parts[0]) for parts in common)
    messages = "; or: ".join(dict.fromkeys(each["msg"] for each in same[:4]))
    return Invalid(f"{_clipped(where)}: {messages}; got {_shown(first['input'])}", param, "invalid_value")


def _shown(value: object) -> str:
    """A value in an error. Python refuses to print integers of more than 4300 digits."""
    try:
        return _clipped(repr(value))
    except ValueError:
        return f"a {type(value).__name__} too large to show"


def _clipped(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
