"""TLS for servers of a run: a certificate that is given, or a self-signed one made on the spot."""

from __future__ import annotations

import ssl
import tempfile
from collections.abc import Sequence
from pathlib import Path

from agentrl.errors import ConfigError


def server_context(certificate: str, private_key: str) -> ssl.SSLContext:
    """Return the TLS settings of a server with a certificate (chain) and key, both PEM files.

    Raises:
        ConfigError: a file is missing, or the two do not belong together.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(certificate, private_key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"the certificate {certificate!r} and the key {private_key!r} cannot be used: {error}"
        ) from error
    return context


def make_self_signed(names: Sequence[str], folder: Path) -> tuple[str, str]:
    """Write a self-signed certificate for the given hosts and its key; return both paths.

    Raises:
        ConfigError: `cryptography` is not installed.
    """
    try:
        from agentrl.extras.gateway.self_signed import write_self_signed
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"a self-signed certificate of agent.gateway needs {error.name}: pip install 'agentrl[tls]', or "
            "name a certificate of your own"
        ) from error
    return write_self_signed(names, folder)


def write_bundle(certificate: str, folder: Path) -> str:
    """Write the certificates that this machine trusts, and `certificate`, into one file; return its path.

    Programs read such a file by SSL_CERT_FILE in place of the machine's own.
    """
    system = ssl.get_default_verify_paths().cafile
    trusted = Path(system).read_text(encoding="utf-8") if system is not None else ""
    path = folder / "trusted.pem"
    path.write_text(f"{trusted}\n{Path(certificate).read_text(encoding='utf-8')}", encoding="utf-8")
    return str(path)


def new_folder() -> tempfile.TemporaryDirectory[str]:
    """Return a folder of this process for keys; it is removed with the object."""
    return tempfile.TemporaryDirectory(prefix="agentrl-tls-")
