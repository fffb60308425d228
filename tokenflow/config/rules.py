"""What types cannot say: rules between keys. Each is a function that yields what it finds wrong, at a key."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any, NamedTuple

from tokenflow.config.keys import KeyPath, toml
from tokenflow.config.model import AuthConfig, ServerConfig
from tokenflow.core.hosts import is_loopback

Sections = dict[str, Any]
"""Sections by name, made of the keys that are right by themselves; without those that nothing can be made of."""


class Finding(NamedTuple):
    """What is wrong between two keys."""

    key: KeyPath
    """The one to change."""
    text: str
    other: KeyPath
    """The other one: if that is wrong by itself, this may be no finding."""


def findings(sections: Sections) -> Iterator[Finding]:
    """All that the rules find."""
    for rule in _RULES:
        yield from rule(sections)


def _open_needs_keys(sections: Sections) -> Iterator[Finding]:
    server, auth = sections.get("server"), sections.get("auth")
    if not isinstance(server, ServerConfig) or not isinstance(auth, AuthConfig):
        return
    if not auth.keys and not is_loopback(server.host):
        yield Finding(
            ("server", "host"),
            f"{toml(server.host)} can be reached from elsewhere and nobody needs a key; "
            "add [[auth.keys]] with name and sha256, or listen on 127.0.0.1",
            ("auth", "keys"),
        )


def _tls_is_whole(sections: Sections) -> Iterator[Finding]:
    server = sections.get("server")
    if not isinstance(server, ServerConfig):
        return
    for given, other in (("tls_certificate", "tls_key"), ("tls_key", "tls_certificate")):
        if getattr(server, given) is not None and getattr(server, other) is None:
            text = f"{toml(getattr(server, given))} is of no use alone; add {other}"
            yield Finding(("server", given), text, ("server", other))


EMPTY_SHA256 = hashlib.sha256(b"").hexdigest()


def _keys_are_some(sections: Sections) -> Iterator[Finding]:
    auth = sections.get("auth")
    for index, key in enumerate(auth.keys if isinstance(auth, AuthConfig) else ()):
        if key.sha256.lower() == EMPTY_SHA256:
            path = ("auth", "keys", index, "sha256")
            text = "it is the hash of an empty text, which is no key; set KEY before it is hashed: read -rs KEY"
            yield Finding(path, text, path)


def _keys_differ(sections: Sections) -> Iterator[Finding]:
    auth = sections.get("auth")
    seen: dict[str, int] = {}
    for index, key in enumerate(auth.keys if isinstance(auth, AuthConfig) else ()):
        # A key with two names would be counted under one of them, whichever comes first.
        for name, value in (("name", key.name), ("sha256", key.sha256.lower())):
            other = seen.setdefault(f"{name} {value}", index)
            if other != index:
                what = toml(value) if name == "name" else "this key"
                text = f"{what} is auth.keys[{other}]'s already; give each its own"
                yield Finding(("auth", "keys", index, name), text, ("auth", "keys", other, name))


def _defaults_within_their_max(sections: Sections) -> Iterator[Finding]:
    for name in ("timeouts", "stream"):
        section = sections.get(name)
        for field in fields(section) if section is not None else ():
            base = field.name.replace("_max_", "_")
            if base == field.name:
                continue
            value, most = getattr(section, base), getattr(section, field.name)
            if value > most:
                text = f"{toml(value)} is above {field.name}, {toml(most)}; lower it, or raise {field.name}"
                yield Finding((name, base), text, (name, field.name))


_RULES: tuple[Callable[[Sections], Iterator[Finding]], ...] = (
    _open_needs_keys,
    _tls_is_whole,
    _keys_are_some,
    _keys_differ,
    _defaults_within_their_max,
)
