"""Make the certificates of a deployment: a certificate authority (CA), and certificates that it signs.

Needs `cryptography` (the extra `tls`). To use certificates, `ssl` is enough.
"""

import ipaddress
import os
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from roseinfer.core.errors import ConfigError, ResourceError
from roseinfer.core.extras import install_command

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

MAX_CA_DAYS = 3650.0
# Hosts may have clocks that are slow.
MAX_CLOCK_SKEW_DAYS = 1.0
CA_NAME = "roseinfer deployment"


class Certificate(NamedTuple):
    """PEM texts: what `--tls-dir` holds. `expires`: last moment of validity."""

    ca: bytes
    certificate: bytes
    key: bytes
    expires: datetime

    def write(self, folder: Path) -> None:
        """Write `ca.crt`, `tls.crt` and `tls.key` into a folder that only this user may read."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name, data in (("ca.crt", self.ca), ("tls.crt", self.certificate), ("tls.key", self.key)):
            write_private(folder / name, data)


class CertificateAuthority:
    """A CA of one deployment: who has a certificate of it may use the deployment's engines."""

    def __init__(self, certificate: "x509.Certificate", key: "EllipticCurvePrivateKey") -> None:
        self._certificate = certificate
        self._key = key

    @classmethod
    def create(cls, valid_days: float = MAX_CA_DAYS) -> "CertificateAuthority":
        """Raise `ResourceError` if `cryptography` is not installed."""
        require_cryptography()
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.asymmetric import ec

        key = ec.generate_private_key(ec.SECP256R1())
        name = _name(CA_NAME)
        builder = _builder(name, name, key.public_key(), valid_days)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        builder = builder.add_extension(_key_usage(signs_certificates=True), critical=True)
        identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
        builder = builder.add_extension(identifier, critical=False)
        return cls(builder.sign(key, hashes.SHA256()), key)

    @classmethod
    def load(cls, certificate: bytes, key: bytes) -> "CertificateAuthority":
        """Read PEM texts. Raise `ValueError` if they are invalid, `ResourceError` without `cryptography`."""
        require_cryptography()
        from cryptography import x509
        from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        private = load_pem_private_key(key, None)
        found = x509.load_pem_x509_certificate(certificate)
        if not isinstance(private, EllipticCurvePrivateKey) or found.public_key() != private.public_key():
            raise ValueError("the certificate and the key do not belong together")
        return cls(found, private)

    @property
    def certificate(self) -> bytes:
        from cryptography.hazmat.primitives.serialization import Encoding

        return self._certificate.public_bytes(Encoding.PEM)

    @property
    def key(self) -> bytes:
        return _private_pem(self._key)

    def issue(self, names: Sequence[str], valid_days: float) -> Certificate:
        """Sign a certificate for hosts, by name or IP address. It serves as client and as server."""
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.hazmat.primitives.serialization import Encoding
        from cryptography.x509.oid import ExtendedKeyUsageOID

        key = ec.generate_private_key(ec.SECP256R1())
        builder = _builder(_name(names[0]), self._certificate.subject, key.public_key(), valid_days)
        purposes = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        authority = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        for extension, critical in (
            (x509.SubjectAlternativeName([_alternative_name(name) for name in names]), False),
            (x509.BasicConstraints(ca=False, path_length=None), True),
            (_key_usage(signs_certificates=False), True),
            (x509.ExtendedKeyUsage(purposes), False),
            (authority, False),
        ):
            builder = builder.add_extension(extension, critical=critical)
        signed = builder.sign(self._key, hashes.SHA256())
        pem = signed.public_bytes(Encoding.PEM)
        return Certificate(self.certificate, pem, _private_pem(key), signed.not_valid_after_utc)


def require_cryptography() -> None:
    """Raise `ResourceError` if the extra is not installed."""
    try:
        import cryptography  # noqa: F401
    except ImportError as error:
        raise ResourceError(f"making certificates needs cryptography: {install_command('tls')}") from error


def check_host(name: str) -> None:
    """Raise `ConfigError` if a certificate cannot name this host."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        labels = name.rstrip(".").split(".")
        if not all(_is_label(label) for label in labels):
            raise ConfigError(f"hosts: {name!r} is neither a host name nor an IP address") from None


def _is_label(label: str) -> bool:
    usable = label.isascii() and label.replace("-", "").isalnum()
    return usable and len(label) < 64 and not label.startswith("-") and not label.endswith("-")


def write_private(path: Path, data: bytes) -> None:
    """Replace a file at once by one that only this user may read."""
    new = path.with_name(f".{path.name}.new")
    new.unlink(missing_ok=True)
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
    new.replace(path)


# --- parts of certificates ------------------------------------------------------------------------------------------
def _builder(subject: "x509.Name", issuer: "x509.Name", key: object, valid_days: float) -> "x509.CertificateBuilder":
    from cryptography import x509

    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)  # type: ignore[arg-type]
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=MAX_CLOCK_SKEW_DAYS))
        .not_valid_after(now + timedelta(days=valid_days))
    )


def _name(common_name: str) -> "x509.Name":
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name[:64])])


def _alternative_name(name: str) -> "x509.GeneralName":
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _key_usage(*, signs_certificates: bool) -> "x509.KeyUsage":
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _private_pem(key: "EllipticCurvePrivateKey") -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
