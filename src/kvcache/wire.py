"""What both wire formats share: a body of JSON becomes a checked model, or an `Invalid` that names the field.

    parse(Body, b'{"temperature": 3}')   ->  Invalid: temperature: Input should be less than or equal to 2; got 3

Bodies are strict: no text is taken for a number, and a field nobody knows is an error: whoever misspells `temperature`
must not get an answer computed without it. A field that is known, yet would change the answer in a way we cannot serve,
is refused by its name (`Refused`). On the way back, tokens that are no whole characters have bytes all the same
(`bytes_of`), and probabilities of 0 a logarithm (`logarithm`). Values only: no I/O, no clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Final, TypeVar, final

from pydantic import BaseModel, BeforeValidator, ConfigDict, GetCoreSchemaHandler, GetJsonSchemaHandler, ValidationError
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from kvcache.request import Logprob

__all__ = ["WHOLE", "Body", "Invalid", "Refused", "bytes_of", "likeliest", "logarithm", "parse"]

_Model = TypeVar("_Model", bound=BaseModel)

_SHOWN = 60
"""Characters of an offending value that an error repeats: a prompt of megabytes is not sent back."""


_LEAST = -9999.0
"""Less than the logarithm of any probability that f32 can hold; OpenAI's number."""


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


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


WHOLE: Final = BeforeValidator(_whole)
"""`Annotated[int, Field(ge=1), WHOLE]`: JSON has one kind of number, so 8192.0 is an integer, as its schema says."""


def parse(model: type[_Model], raw: bytes) -> _Model:
    """The body as `model`. Raises `Invalid` for what is no JSON (or no UTF-8), and for what does not fit the model."""
    try:
        return model.model_validate_json(raw or b"{}")
    except ValidationError as error:
        raise _explained(error) from None


def likeliest(top_p: float, top_k: int) -> tuple[float, int]:
    """What `SamplingParams` calls them: no negative number, and no share of 0, which is the likeliest token alone."""
    return (top_p, max(top_k, 0)) if top_p else (1.0, 1)


def logarithm(token: Logprob) -> float:
    """The logarithm of a token's probability, as JSON can hold it: of a probability of 0 it is no infinity there."""
    return max(token.logprob, _LEAST)


def bytes_of(token: Logprob) -> bytes | None:
    """The bytes of a token; None where they are not known: U+FFFD stands for any that are no whole character."""
    return token.bytes or (None if "\ufffd" in token.text else token.text.encode())


def _explained(error: ValidationError) -> Invalid:
    """The complaints about the first field in one sentence; `param` is that field."""
    found = error.errors(include_url=False, include_context=False)
    if found[0]["type"] == "json_invalid":
        return Invalid(f"the body is not valid JSON in UTF-8: {found[0]['msg'].removeprefix('Invalid JSON: ')}")
    if not found[0]["loc"]:
        return Invalid(f"the body is {_shown(found[0]['input'])}; expected a JSON object")
    param = str(found[0]["loc"][0])
    # A union complains once for each of its members: those count that have come farthest.
    same = [each for each in found if each["loc"][0] == found[0]["loc"][0]]
    depth = max(len(each["loc"]) for each in same)
    farthest = [each for each in same if len(each["loc"]) == depth]
    first, places = farthest[0], [_places(each["loc"]) for each in farthest]
    common = takewhile(lambda parts: len(set(parts)) == 1, zip(*places, strict=False))
    name = _clipped(".".join(str(part) for part, *_ in common))
    if first["type"] == "extra_forbidden":
        return Invalid(f"Unrecognized request argument supplied: {name}", param, "unknown_parameter")
    if first["type"] == "unsupported":
        return Invalid(f"{name}: {first['msg']}; got {_shown(first['input'])}", param, "unsupported_parameter")
    if first["type"] == "missing":
        return Invalid(f"{name}: missing; it is required", param, "missing_required_parameter")
    messages = "; or: ".join(dict.fromkeys(each["msg"] for each in farthest[:4]))
    return Invalid(f"{name}: {messages}; got {_shown(first['input'])}", param, "invalid_value")


def _places(where: tuple[int | str, ...]) -> list[int | str]:
    """Fields and indices, without the types (`list[TextPart]`) by which pydantic names a union's members on the way."""
    return [*where[:1], *(part for part in where[1:-1] if "[" not in str(part)), *where[1:][-1:]]


def _shown(value: object) -> str:
    """A value in an error. Python refuses to print integers of more than 4300 digits."""
    try:
        return _clipped(repr(value))
    except ValueError:
        return f"a {type(value).__name__} too large to show"


def _clipped(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
