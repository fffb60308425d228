"""What is in the files of TLS: known before models are loaded, and without the server."""

from __future__ import annotations

import ssl
from pathlib import Path


def tls_fault(certificate: Path, key: Path) -> tuple[str, str] | None:
    """Which of `[server]`'s keys names a file that is of no use, and why; None: it can be served with both."""
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(certificate, key, _refuse)
    except _Encrypted:
        return "tls_key", f"{key} is encrypted, and a server has nobody to ask; `openssl pkey` writes it in the clear"
    except OSError as exc:  # ssl.SSLError is one
        reason = getattr(exc, "reason", None)
        if not _is_certificate(certificate):
            return "tls_certificate", f"there is no certificate in {certificate}; name a PEM file with it and its chain"
        if reason == "KEY_VALUES_MISMATCH":
            return "tls_key", f"{key} is another certificate's; name the one that {certificate} was made with"
        if reason is not None:
            why = reason.replace("_", " ").lower()
            return "tls_certificate", f"{certificate} with this key is refused ({why}); have another made"
        return "tls_key", f"there is no private key in {key}, or none that can be read; name a PEM file with one"
    return None


class _Encrypted(Exception):
    """OpenSSL asks for a pass phrase."""


def _refuse() -> str:
    raise _Encrypted


def _is_certificate(path: Path) -> bool:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(path)
    except OSError:
        return False
    return True
