"""The help of each field: the string literal right under it.

Python drops such strings (PEP 224 was rejected), so they are read from the class's source, once a class, with `ast`.
pydantic can do it too, but only for its own classes, and stumbles over `slots=True`, which makes a second class.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import textwrap
from functools import lru_cache


def summary(cls: type) -> str:
    """The class's docstring on one line; empty if it has none (dataclass makes one up, which says nothing)."""
    text = inspect.cleandoc(cls.__doc__ or "")
    return "" if text.startswith(f"{cls.__name__}(") else " ".join(text.split())


@lru_cache(maxsize=256)
def field_docs(cls: type) -> dict[str, str]:
    """Help by field name, inherited fields included, each on one line."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__[:-1]):
        docs |= _own_docs(base)
    return docs


def _own_docs(cls: type) -> dict[str, str]:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except (OSError, TypeError, SyntaxError):
        return {}  # no source at hand (made at run time, or shipped without): it works, without help
    body = next((node.body for node in tree.body if isinstance(node, ast.ClassDef)), [])
    docs: dict[str, str] = {}
    for field, below in itertools.pairwise(body):
        match field, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                docs[name] = " ".join(text.split())
    return docs
