"""Reading a request's fields: JSON that is exactly JSON, values that are exactly their type.

Python's own JSON reader takes NaN, and `True` is an `int` to it; a client that sends those has a fault that it should
hear about. So every field is read through `Fields`, which knows where it stands in the body and names the place in its
errors (`messages[0].content`). An explicit null is the same as an absent field, everywhere.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from tokenflow.errors import InvalidRequest

INVALID_JSON = "invalid_json"
MISSING = "missing_required_parameter"
INVALID_TYPE = "invalid_type"
UNSUPPORTED = "unsupported_parameter"


def loads(body: bytes | str) -> Any:
    """Strict JSON (RFC 8259) in UTF-8 to plain values.

    Raises:
        InvalidRequest: whatever is wrong with it.
    """
    try:
        text = body if isinstance(body, str) else str(body, "utf-8")
    except UnicodeDecodeError as exc:
        raise InvalidRequest(f"The body is not UTF-8: byte {exc.start} is wrong.", code=INVALID_JSON) from exc
    try:
        return _JSON.decode(text)
    except RecursionError:
        raise InvalidRequest("The body's JSON is nested too deeply.", code=INVALID_JSON) from None
    except ValueError as exc:  # also an integer of thousands of digits
        raise InvalidRequest(f"The body is not JSON: {exc}", code=INVALID_JSON) from exc


def _no_constant(name: str) -> NoReturn:
    raise InvalidRequest(f"The body is not JSON: {name} is no JSON number (RFC 8259 section 6).", code=INVALID_JSON)


_JSON = json.JSONDecoder(parse_constant=_no_constant)


def body_fields(body: object) -> Fields:
    """The fields of a request's body: bytes are JSON still to be read, anything else is JSON already read."""
    value = loads(bytes(body)) if isinstance(body, bytes | bytearray | memoryview) else body
    if not isinstance(value, Mapping):
        raise InvalidRequest(f"The body must be a JSON object, not {kind(value)}.", code=INVALID_TYPE)
    return Fields(value)


def kind(value: object) -> str:
    """What a JSON value is, in words for an error message."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    names = {int: "an integer", float: "a number", str: "a string", list: "an array", dict: "an object"}
    return names.get(type(value), "something else")


def shown(value: object) -> str:
    """A value as an error message may quote it: short, and without any character that JSON or a log would mind."""
    # A huge integer cannot be printed (sys.set_int_max_str_digits), and a long string need not be.
    if isinstance(value, int) and abs(value) >= 1 << 128:
        return "a huge number"
    text = ascii(value[:60] if isinstance(value, str) else value)
    return text if len(text) <= 80 else text[:77] + "..."


def wrong_type(path: str, expected: str, value: object) -> InvalidRequest:
    return InvalidRequest(f"'{path}' must be {expected}, not {kind(value)}.", param=path, code=INVALID_TYPE)


def missing(path: str) -> InvalidRequest:
    return InvalidRequest(f"'{path}' is required.", param=path, code=MISSING)


def unsupported(path: str, why: str) -> InvalidRequest:
    return InvalidRequest(f"'{path}' is not supported: {why}", param=path, code=UNSUPPORTED)


def as_text(value: object, path: str) -> str:
    """A string that can be written as UTF-8. JSON's escapes can spell half a surrogate pair, which cannot."""
    if not isinstance(value, str):
        raise wrong_type(path, "a string", value)
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as exc:
            raise InvalidRequest(
                f"'{path}' has a lone surrogate at character {exc.start}, which is no text.", param=path
            ) from exc
    return value


def as_number(
    value: object,
    path: str,
    *,
    least: float | None = None,
    most: float | None = None,
    above: float | None = None,
) -> float:
    """A finite number within bounds; `above` is a bound that is itself out."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise wrong_type(path, "a number", value)
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):  # 1e999 is JSON, and infinite to Python
        raise InvalidRequest(f"'{path}' is too large a number.", param=path)
    if (
        (least is not None and number < least)
        or (most is not None and number > most)
        or (above is not None and number <= above)
    ):
        raise _out_of_range(value, path, least, most, above)
    return number


def as_integer(value: object, path: str, *, least: int | None = None, most: int | None = None) -> int:
    """An integer within bounds. 3.0 is one: JSON has one kind of number, and some clients write all of them so."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise wrong_type(path, "an integer", value)
    # As integers: compiled, what is given where a float may be is made one, and a large one is another number then.
    if (least is not None and value < least) or (most is not None and value > most):
        raise _out_of_range(value, path, least, most)
    return value


def _out_of_range(value: object, path: str, least: object, most: object, above: object = None) -> InvalidRequest:
    bounds = [f"more than {above:g}"] if above is not None else []
    bounds += [f"at least {least}"] if least is not None else []
    bounds += [f"at most {most}"] if most is not None else []
    return InvalidRequest(f"'{path}' must be {' and '.join(bounds)}; got {shown(value)}.", param=path)


class Fields:
    """The fields of one JSON object, and where in the body it stands. Every reader gives None for absent and null."""

    __slots__ = ("_path", "_values")

    def __init__(self, values: Mapping[str, Any], path: str = "") -> None:
        self._values = values
        self._path = path

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def path(self, name: str) -> str:
        """A field's full name, for errors."""
        return f"{self._path}.{name}" if self._path else name

    def get(self, name: str) -> Any:
        """The value as it is."""
        return self._values.get(name)

    def text(self, name: str) -> str | None:
        value = self._values.get(name)
        return None if value is None else as_text(value, self.path(name))

    def boolean(self, name: str) -> bool | None:
        value = self._values.get(name)
        if value is not None and not isinstance(value, bool):
            raise wrong_type(self.path(name), "a boolean", value)
        return value

    def integer(self, name: str, *, least: int | None = None, most: int | None = None) -> int | None:
        value = self._values.get(name)
        return None if value is None else as_integer(value, self.path(name), least=least, most=most)

    def number(
        self, name: str, *, least: float | None = None, most: float | None = None, above: float | None = None
    ) -> float | None:
        value = self._values.get(name)
        return None if value is None else as_number(value, self.path(name), least=least, most=most, above=above)

    def array(self, name: str) -> list[Any] | None:
        value = self._values.get(name)
        if value is not None and not isinstance(value, list):
            raise wrong_type(self.path(name), "an array", value)
        return value

    def object(self, name: str) -> Fields | None:
        value = self._values.get(name)
        if value is None:
            return None
        return as_object(value, self.path(name))


def as_object(value: object, path: str) -> Fields:
    if not isinstance(value, Mapping):
        raise wrong_type(path, "an object", value)
    return Fields(value, path)
