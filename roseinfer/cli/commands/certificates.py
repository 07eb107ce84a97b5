"""roseinfer certificates: make the certificates that engines and servers on several hosts use."""

from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from roseinfer.config.options import Group, OptionSet
from roseinfer.core.config.option import check_positive, option
from roseinfer.core.errors import ConfigError

if TYPE_CHECKING:
    from roseinfer.integrations.certificates import CertificateAuthority

NAME = "certificates"
HELP = "make the certificates of engines on other hosts and of their servers (--tls-dir)"
CA_FOLDER = "ca"


@dataclass(frozen=True, slots=True, kw_only=True)
class CertificatesConfig:
    """Hosts, folder and validity of certificates."""

    dir: str | None = option(None, "folder for the certificates; an existing CA in it is used again", metavar="DIR")
    hosts: str | None = option(
        None,
        "hosts of engines and servers: a,b. Name engines by the host name or address that --engines gives",
        metavar="HOST,...",
    )
    days: float = option(365.0, "days until the certificates of hosts expire")

    def __post_init__(self) -> None:
        check_positive(self, "days")

    @property
    def host_list(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name.strip() for name in (self.hosts or "").split(",")))


OPTIONS = OptionSet(Group(CertificatesConfig, "certificates", positional="dir"), config_file=False)


def run(args: Namespace) -> int:
    from roseinfer.integrations.certificates import MAX_CA_DAYS, check_host

    config = OPTIONS.build(CertificatesConfig, OPTIONS.read(args))
    for name in ("dir", "hosts"):
        if getattr(config, name) is None:
            raise ConfigError(f"{name} must be given")
    for host in config.host_list:
        if host == CA_FOLDER:
            raise ConfigError(f"hosts: {host!r} is the folder of the CA")
        check_host(host)
    if config.days > MAX_CA_DAYS:
        raise ConfigError(f"days must be at most {MAX_CA_DAYS:g}, the validity of the CA, got {config.days:g}")
    folder = Path(config.dir or "")
    try:
        authority = _authority(folder / CA_FOLDER)
        for host in config.host_list:
            certificate = authority.issue([host], config.days)
            certificate.write(folder / host)
            print(f"{folder / host}: --tls-dir of {host}, valid until {certificate.expires:%Y-%m-%d}")
    except OSError as error:
        raise ConfigError(f"dir: cannot write to {folder}: {error.strerror}") from error
    print(f"{folder / CA_FOLDER / 'ca.key'} signs further certificates; keep it on this machine")
    return 0


def _authority(folder: Path) -> "CertificateAuthority":
    """Read the CA in `folder`, or make one there."""
    from roseinfer.integrations.certificates import CertificateAuthority, write_private

    certificate, key = folder / "ca.crt", folder / "ca.key"
    if certificate.exists() or key.exists():
        try:
            return CertificateAuthority.load(certificate.read_bytes(), key.read_bytes())
        except (ValueError, TypeError) as error:
            raise ConfigError(f"dir: {folder} has no valid CA: {error}") from error
    authority = CertificateAuthority.create()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_private(key, authority.key)
    write_private(certificate, authority.certificate)
    return authority
