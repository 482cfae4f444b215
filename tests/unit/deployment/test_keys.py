"""Keys and certificates of a deployment."""

from __future__ import annotations

import datetime
import importlib.metadata
import stat
import subprocess

import pytest

pytest.importorskip("flwr")

from fedquilt.deployment import keys as keys_module
from fedquilt.deployment.keys import (
    KeyFolder,
    check_certificate,
    check_device_key,
    hosts_of,
    make_keys,
    public_key_text,
)
from fedquilt.errors import ConfigError


def test_private_files_are_private_and_public_files_match(tmp_path):
    made = make_keys(tmp_path / "keys", 2, ["server.example.org", "10.0.0.7"])
    keys = KeyFolder(tmp_path / "keys")
    private = [keys.ca_key, keys.server_key, keys.device_key(1), keys.device_key(2)]
    assert {stat.S_IMODE(path.stat().st_mode) for path in private} == {0o600}
    assert stat.S_IMODE(keys.path.stat().st_mode) == 0o700
    assert len(made.written) == 8
    assert hosts_of(keys.server) == ["localhost", "server.example.org", "127.0.0.1", "10.0.0.7"]
    for number, public in enumerate(keys.device_public_keys, 1):
        text = check_device_key(keys.device_key(number))
        assert public_key_text(public.read_bytes()) == text
        assert text.startswith("ecdsa-sha2-nistp384 ")
    check_certificate(keys.ca)
    assert made.ca_expires > made.server_expires > datetime.datetime.now(datetime.UTC)


def test_the_server_certificate_is_signed_by_the_ca(tmp_path):
    make_keys(tmp_path, 1)
    keys = KeyFolder(tmp_path)
    command = ["openssl", "verify", "-x509_strict", "-CAfile", str(keys.ca), str(keys.server)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr


def test_nothing_is_overwritten_and_more_devices_can_be_added(tmp_path):
    make_keys(tmp_path, 2)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    added = make_keys(tmp_path, 3)
    assert [path.name for path in added.written] == ["device-3", "device-3.pub"]
    for name, data in before.items():
        assert (tmp_path / name).read_bytes() == data
    assert make_keys(tmp_path, 3).written == ()


def test_a_private_key_that_was_moved_away_is_not_made_again(tmp_path):
    make_keys(tmp_path, 1)
    KeyFolder(tmp_path).device_key(1).unlink()
    assert make_keys(tmp_path, 1).written == ()


@pytest.mark.parametrize(
    ("devices", "hosts", "reason"),
    [
        (0, [], "keys for 0 devices"),
        (1, ["a b"], "--host a b"),
        (1, ["x" * 300], "--host xxx"),
        (1, ["-c\n"], "--host"),
    ],
)
def test_bad_requests_are_refused(tmp_path, devices, hosts, reason):
    with pytest.raises(ConfigError, match=reason):
        make_keys(tmp_path / "keys", devices, hosts)


def test_a_host_that_an_existing_certificate_lacks_is_refused(tmp_path):
    make_keys(tmp_path, 1)
    with pytest.raises(ConfigError, match=r"other\.org.*valid for localhost, 127\.0\.0\.1"):
        make_keys(tmp_path, 1, ["other.org"])


def test_a_folder_that_lacks_a_file_is_refused(tmp_path):
    make_keys(tmp_path, 1)
    KeyFolder(tmp_path).server_key.unlink()
    with pytest.raises(ConfigError, match=r"server\.key is missing"):
        make_keys(tmp_path, 1)


def test_an_expired_certificate_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(keys_module, "SERVER_DAYS", -0.01)
    make_keys(tmp_path, 1)
    with pytest.raises(ConfigError, match="it expired on"):
        check_certificate(KeyFolder(tmp_path).server)


def test_device_keys_of_other_kinds_are_refused(tmp_path):
    make_keys(tmp_path, 1)
    key = KeyFolder(tmp_path).device_key(1)
    with pytest.raises(ConfigError, match="cannot be read"):
        check_device_key(tmp_path / "absent")
    key.chmod(0o644)
    with pytest.raises(ConfigError, match="others can read it"):
        check_device_key(key)
    key.chmod(0o600)
    key.write_bytes(b"cos\nsystem\n(S'true'\ntR.")  # A pickle is no key.
    with pytest.raises(ConfigError, match="no private key in the OpenSSH format"):
        check_device_key(key)


def test_a_key_on_another_curve_is_refused(tmp_path):
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        NoEncryption,
        PrivateFormat,
    )

    path = tmp_path / "key"
    key = ec.generate_private_key(ec.SECP256R1())
    path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="P-384"):
        check_device_key(path)


@pytest.mark.parametrize(
    ("found", "reason"),
    [(None, "flwr is not installed"), ("1.40.0", "flwr 1.40.0 is installed, and 1.41 or 1.42")],
)
def test_flwr_that_is_missing_or_of_another_version_is_refused(
    found, reason, tmp_path, monkeypatch
):
    def version(name: str) -> str:
        if found is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(ConfigError, match=reason):
        make_keys(tmp_path, 1)
