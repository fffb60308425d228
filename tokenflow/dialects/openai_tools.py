"""Tools: what a client says of the functions that the model may call.

A template sees each as `{"type": "function", "function": {…}}`, built anew from the fields that templates know, in the
client's order. What they may be called with is a JSON Schema, which goes through as it is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from tokenflow.core.types import Tools
from tokenflow.dialects.fields import Fields, as_object, as_text, missing, shown, unsupported, wrong_type
from tokenflow.dialects.structured import check_depth
from tokenflow.errors import InvalidRequest

_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}", re.ASCII)
_KNOWN = ("name", "description", "parameters")
_CHOICES: dict[str, Literal["auto", "none", "required"]] = {"auto": "auto", "none": "none", "required": "required"}


def parse_tools(fields: Fields) -> Tools | None:
    """The fields `tools`, `tool_choice` and `parallel_tool_calls`; None: there are none.

    Raises:
        InvalidRequest: with `param` naming the place, as in `tools[0].function.name`.
    """
    _refuse_functions(fields)
    parallel = fields.boolean("parallel_tool_calls")
    functions = tuple(_tool(item, f"tools[{i}]") for i, item in enumerate(fields.array("tools") or []))
    places: dict[str, int] = {}
    for i, tool in enumerate(functions):
        name = tool["function"]["name"]
        if name in places:
            raise InvalidRequest(f"There are two tools named {shown(name)}.", param=f"tools[{i}].function.name")
        places[name] = i
    tools = Tools(functions=functions, parallel=parallel is not False) if functions else None
    chosen = _chosen(fields, tools, places)
    if chosen is not None and chosen.choice in ("required", "named"):  # its arguments are held to their schema
        for tool in chosen.functions:
            i = places[tool["function"]["name"]]
            check_depth(tool["function"].get("parameters"), f"tools[{i}].function.parameters")
    return chosen


def _refuse_functions(fields: Fields) -> None:
    """What came before tools. Without functions, both of its choices mean none."""
    if fields.array("functions"):
        raise unsupported("functions", "OpenAI replaced them; send 'tools'.")
    choice = fields.get("function_call")
    if choice is not None and not isinstance(choice, str | dict):
        raise wrong_type("function_call", "a string or an object", choice)
    if choice not in (None, "none", "auto"):
        raise unsupported("function_call", "OpenAI replaced it; send 'tool_choice'.")


def _tool(item: object, path: str) -> Mapping[str, Any]:
    tool = as_object(item, path)
    kind = tool.text("type")
    if kind is None:
        raise missing(f"{path}.type")
    if kind != "function":
        raise unsupported(f"{path}.type", f"only functions are; got {shown(kind)}.")
    function = tool.object("function")
    if function is None:
        raise missing(f"{path}.function")
    name = function.text("name")
    if name is None:
        raise missing(f"{path}.function.name")
    if not _NAME.fullmatch(name):
        where = f"{path}.function.name"
        raise InvalidRequest(f"'{where}' has 1 to 64 letters, digits, '_', '-' or '.'; got {shown(name)}.", param=where)
    function.text("description")
    function.boolean("strict")
    function.object("parameters")
    known = {key: function.get(key) for key in function if key in _KNOWN and function.get(key) is not None}
    check_text(known, f"{path}.function")
    return {"type": kind, "function": known}


def check_text(value: object, path: str) -> None:
    """Every string in a JSON value is text, for a template may write it."""
    try:
        _check_text(value, path)
    except RecursionError:
        raise InvalidRequest(f"'{path}' is nested too deeply.", param=path) from None


def _check_text(value: object, path: str) -> None:
    if isinstance(value, str):
        as_text(value, path)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            as_text(key, path)
            _check_text(item, path)
    elif isinstance(value, list):
        for item in value:
            _check_text(item, path)


def _chosen(fields: Fields, tools: Tools | None, places: Mapping[str, int]) -> Tools | None:
    """The tools under the client's `tool_choice`. `places` are theirs, by name."""
    choice = fields.get("tool_choice")
    if choice is None:
        return tools
    if isinstance(choice, str):
        if choice not in _CHOICES:
            said = f"'tool_choice' is auto, none, required or a function, not {shown(choice)}."
            raise InvalidRequest(said, param="tool_choice")
        if tools is None and choice == "required":
            raise InvalidRequest("'tool_choice' asks for a tool, and there are none.", param="tool_choice")
        return tools and replace(tools, choice=_CHOICES[choice])
    if not isinstance(choice, dict):
        raise wrong_type("tool_choice", "a string or an object", choice)
    return _named(as_object(choice, "tool_choice"), tools, places)


def _named(choice: Fields, tools: Tools | None, places: Mapping[str, int]) -> Tools:
    kind = choice.text("type")
    if kind != "function":
        raise unsupported("tool_choice.type", f"only functions are; got {shown(kind)}.")
    function = choice.object("function")
    name = None if function is None else function.text("name")
    if name is None:
        raise missing("tool_choice.function.name")
    if tools is None or name not in places:
        raise InvalidRequest(f"There is no tool named {shown(name)}.", param="tool_choice.function.name")
    return replace(tools, functions=(tools.functions[places[name]],), choice="named")
