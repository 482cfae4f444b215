"""Keys and certificates of a deployment: a CA, a server certificate and a key for each device.

The CA signs the server certificate, by which devices recognise the server. The server recognises a
device by its public key. Private files can be read by their owner alone.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fedquilt.errors import ConfigError
from fedquilt.errors.extras import how_to_install
from fedquilt.storage.files import make_folder, why

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.x509 import Certificate

CA_DAYS = 3650  # Days for which the CA is valid
SERVER_DAYS = 730  # Days for which the server certificate is valid
MAX_DEVICES = 10_000
LOCAL_HOSTS = ("localhost", "127.0.0.1")  # Names that every server certificate has
_HOUR = datetime.timedelta(hours=1)  # Certificates are valid from an hour ago, as clocks differ.


@dataclass(frozen=True)
class KeyFolder:
    """Paths of the files in a folder of keys."""

    path: Path

    @property
    def ca(self) -> Path:
        """Return the CA certificate, which every device needs."""
        return self.path / "ca.crt"

    @property
    def ca_key(self) -> Path:
        """Return the private key of the CA, which stays with whoever made the keys."""
        return self.path / "ca.key"

    @property
    def server(self) -> Path:
        """Return the server certificate."""
        return self.path / "server.crt"

    @property
    def server_key(self) -> Path:
        """Return the private key of the server."""
        return self.path / "server.key"

    def device_key(self, number: int) -> Path:
        """Return the private key of a device. Devices are numbered from 1."""
        return self.path / f"device-{number}"

    @property
    def device_public_keys(self) -> list[Path]:
        """Return the public keys of all devices, in the order of their numbers."""
        numbered = {}
        for path in self.path.glob("device-*.pub"):
            number = path.stem.removeprefix("device-")
            if number.isdecimal():
                numbered[int(number)] = path
        return [numbered[number] for number in sorted(numbered)]


@dataclass(frozen=True)
class NewKeys:
    """Files that `make_keys` wrote, and the days on which certificates expire."""

    written: tuple[Path, ...]
    ca_expires: datetime.datetime
    server_expires: datetime.datetime


def check_installed() -> None:
    """Refuse to continue without the extra `flower`.

    Raises:
        ConfigError: flwr is not installed, or has a version that was not tested.
    """
    from importlib.metadata import PackageNotFoundError, version

    try:
        found = version("flwr")
    except PackageNotFoundError:
        raise ConfigError(
            f"a deployment was asked for; flwr is not installed: {how_to_install('flower')}."
        ) from None
    if not found.startswith(("1.41.", "1.42.")):
        raise ConfigError(
            f"a deployment was asked for; flwr {found} is installed, and 1.41 or 1.42 works: "
            f"{how_to_install('flower')}."
        )


def make_keys(folder: Path, num_devices: int, hosts: Sequence[str] = ()) -> NewKeys:
    """Write a CA, a server certificate and device keys. Existing files stay as they are.

    So a second call with more devices adds the keys of the new ones.

    Args:
        folder: Folder for the files. It is created if it does not exist.
        num_devices: Number of devices in all.
        hosts: Names and addresses of the server besides localhost and 127.0.0.1.

    Raises:
        ConfigError: A number or host is not valid, files are missing or damaged, or an existing
            server certificate lacks a host.
    """
    check_installed()
    if not 1 <= num_devices <= MAX_DEVICES:
        raise ConfigError(
            f"keys for {num_devices} devices were asked for; 1 to {MAX_DEVICES:,} would work."
        )
    for host in hosts:
        _check_host(host)
    keys = KeyFolder(folder)
    try:
        make_folder(folder)
        folder.chmod(0o700)
        written = [*_make_certificates(keys, tuple(hosts)), *_make_device_keys(keys, num_devices)]
    except OSError as error:
        raise ConfigError(f"keys in {folder} were asked for; {why(error)}.") from error
    return NewKeys(tuple(written), expiry(keys.ca), expiry(keys.server))


def expiry(path: Path) -> datetime.datetime:
    """Return when a certificate expires, in UTC."""
    moment: datetime.datetime = read_certificate(path).not_valid_after_utc
    return moment


def read_certificate(path: Path) -> Certificate:
    """Read a certificate.

    Raises:
        ConfigError: There is none, or it is damaged.
    """
    from cryptography import x509

    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except OSError as error:
        raise ConfigError(
            f"the certificate {path} was asked for; it cannot be read: {why(error)}."
        ) from error
    except ValueError as error:
        raise ConfigError(
            f"the certificate {path} was asked for; it is no certificate in PEM."
        ) from error


def check_certificate(path: Path) -> None:
    """Refuse a certificate that is not valid now.

    Raises:
        ConfigError: It has expired, is not valid yet, or cannot be read.
    """
    certificate = read_certificate(path)
    now = datetime.datetime.now(datetime.UTC)
    if now > certificate.not_valid_after_utc:
        raise ConfigError(
            f"the certificate {path} was asked for; it expired on "
            f"{certificate.not_valid_after_utc:%Y-%m-%d}. A new folder of keys would work."
        )
    if now < certificate.not_valid_before_utc:
        raise ConfigError(
            f"the certificate {path} was asked for; it is valid from "
            f"{certificate.not_valid_before_utc:%Y-%m-%d %H:%M} UTC on, and the clock here shows "
            f"{now:%Y-%m-%d %H:%M} UTC."
        )


def hosts_of(path: Path) -> list[str]:
    """Return the names and addresses that a server certificate is valid for."""
    from cryptography import x509

    extensions = read_certificate(path).extensions
    try:
        names = extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    addresses = [str(address) for address in names.get_values_for_type(x509.IPAddress)]
    return [*names.get_values_for_type(x509.DNSName), *addresses]


def check_device_key(path: Path) -> str:
    """Return the public key of a device's private key, or refuse the private key.

    Raises:
        ConfigError: The file cannot be read, is readable by others, or is no key on P-384.
    """
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key

    request = f"the device key {path} was asked for"
    try:
        mode = path.stat().st_mode
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{request}; it cannot be read: {why(error)}.") from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(f"{request}; others can read it. chmod 600 {path} makes it private.")
    try:
        key = load_ssh_private_key(data, None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ConfigError(
            f"{request}; it is no private key in the OpenSSH format without a password. "
            "`fedquilt keys` makes such keys."
        ) from error
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.curve.name != "secp384r1":
        raise ConfigError(
            f"{request}; it is no key on the curve P-384. `fedquilt keys` makes such keys."
        )
    return _public_text(key)


def public_key_text(data: bytes) -> str:
    """Return a public key as one line in the OpenSSH format, without a comment.

    Args:
        data: The key as PEM (as Flower states it) or in the OpenSSH format.

    Raises:
        ValueError: It is neither.
    """
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        PublicFormat,
        load_pem_public_key,
        load_ssh_public_key,
    )

    try:
        load = load_pem_public_key if data.startswith(b"-----") else load_ssh_public_key
        text: str = load(data).public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()
    except UnsupportedAlgorithm as error:
        raise ValueError(str(error)) from error
    return text


# --- making them --------------------------------------------------------------------------------


def _check_host(host: str) -> None:
    labels = host.removesuffix(".").split(".")
    is_name = all(
        0 < len(label) <= 63 and label.replace("-", "").isalnum() and label.isascii()
        for label in labels
    )
    if not (_is_address(host) or (is_name and len(host) <= 253)):
        raise ConfigError(
            f"--host {host} was asked for; a name such as server.example.org or an address would "
            "work."
        )


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _make_certificates(keys: KeyFolder, hosts: tuple[str, ...]) -> list[Path]:
    """Write the CA and the server certificate, or check those that exist."""
    files = (keys.ca, keys.ca_key, keys.server, keys.server_key)
    existing = [path for path in files if path.exists()]
    if not existing:
        return _new_certificates(keys, hosts)
    missing = [path.name for path in files if path not in existing]
    if missing:
        raise ConfigError(
            f"keys in {keys.path} were asked for; {', '.join(missing)} is missing there, and "
            f"{existing[0].name} exists. Another folder would work."
        )
    known = hosts_of(keys.server)
    lacking = [host for host in hosts if host not in known]
    if lacking:
        raise ConfigError(
            f"--host {lacking[0]} was asked for; {keys.server} exists and is valid for "
            f"{', '.join(known)}. Nothing is overwritten; another folder would work."
        )
    return []


def _new_certificates(keys: KeyFolder, hosts: tuple[str, ...]) -> list[Path]:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    now = datetime.datetime.now(datetime.UTC)
    ca_key, server_key = _new_key(), _new_key()
    ca_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fedquilt CA")])
    server_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fedquilt server")])
    ca_identifier = x509.SubjectKeyIdentifier.from_public_key(ca_key.public_key())
    ca = (
        x509.CertificateBuilder()
        .subject_name(ca_name)
        .issuer_name(ca_name)
        .public_key(ca_key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _HOUR)
        .not_valid_after(now + datetime.timedelta(days=CA_DAYS))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .add_extension(ca_identifier, critical=False)
        .sign(ca_key, hashes.SHA384())
    )
    names: list[x509.GeneralName] = []
    for host in dict.fromkeys((*LOCAL_HOSTS, *hosts)):
        if _is_address(host):
            names.append(x509.IPAddress(ipaddress.ip_address(host)))
        else:
            names.append(x509.DNSName(host))
    server = (
        x509.CertificateBuilder()
        .subject_name(server_name)
        .issuer_name(ca_name)
        .public_key(server_key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _HOUR)
        .not_valid_after(now + datetime.timedelta(days=SERVER_DAYS))
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(
            x509.SubjectKeyIdentifier.from_public_key(server_key.public_key()), critical=False
        )
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(ca_identifier),
            critical=False,
        )
        .sign(ca_key, hashes.SHA384())
    )
    _write_new(keys.ca_key, _pem_key(ca_key), private=True)
    _write_new(keys.server_key, _pem_key(server_key), private=True)
    _write_new(keys.ca, _pem(ca))
    _write_new(keys.server, _pem(server))
    return [keys.ca, keys.ca_key, keys.server, keys.server_key]


def _usage(signs_certificates: bool) -> object:
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


def _make_device_keys(keys: KeyFolder, num_devices: int) -> list[Path]:
    """Write the keys of those devices that have none."""
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        NoEncryption,
        PrivateFormat,
    )

    written = []
    for number in range(1, num_devices + 1):
        private = keys.device_key(number)
        public = private.with_name(private.name + ".pub")
        if private.exists() or public.exists():  # The owner may have moved the private key away.
            continue
        key = _new_key()
        text = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
        _write_new(private, text, private=True)
        _write_new(public, f"{_public_text(key)} {private.name}\n".encode())
        written += [private, public]
    return written


def _new_key() -> EllipticCurvePrivateKey:
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.generate_private_key(ec.SECP384R1())


def _public_text(key: EllipticCurvePrivateKey) -> str:
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    text = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    return str(text, "ascii")


def _pem(certificate: Certificate) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding

    return bytes(certificate.public_bytes(Encoding.PEM))


def _pem_key(key: EllipticCurvePrivateKey) -> bytes:
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        NoEncryption,
        PrivateFormat,
    )

    return bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))


def _write_new(path: Path, data: bytes, private: bool = False) -> None:
    """Write a file that does not exist yet. The mode is set when it is created, and not later."""
    mode = 0o600 if private else 0o644
    handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode)
    with os.fdopen(handle, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
