"""TLS for servers of a run: a certificate that is given, or a self-signed one made on the spot."""

from __future__ import annotations

import datetime
import ipaddress
import ssl
import tempfile
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from agentrl.errors import ConfigError

VALIDITY = datetime.timedelta(days=90)
"""Of a self-signed certificate. A process makes its own, so it only needs to last as long as a run."""


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

    The key's file can be read by its owner only.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "agentrl gateway")])
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder(subject, subject, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))  # clocks of other nodes
        .not_valid_after(now + VALIDITY)
        .add_extension(x509.SubjectAlternativeName([_host(name) for name in names]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    )
    certificate = builder.sign(key, hashes.SHA256())
    paths = folder / "certificate.pem", folder / "key.pem"
    paths[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    paths[1].touch(mode=0o600)
    paths[1].write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    return str(paths[0]), str(paths[1])


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


def _host(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)
