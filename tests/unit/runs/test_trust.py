"""The list of trusted code: code in settings, comparison with the list, and damaged lists."""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import multiprocessing
import os
import py_compile
import sys
from pathlib import Path

import pytest

from fedquilt.errors import ConfigError
from fedquilt.names import _read, module_files
from fedquilt.runs.trust import (
    check_code,
    check_study_code,
    is_recorded,
    named_code,
    remember_code,
    trusted_file,
)

SETTINGS = {
    "method": "mine.py:Mine",
    "model": [{"name": "mine.py:net"}],
    "data": {"name": "digits"},
}


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("net = Mine = dict\n")
    return tmp_path


def check(settings: object = SETTINGS, trust: bool = False) -> None:
    check_code({"run/config.toml": {"settings": settings}}, trust)


def test_the_list_is_where_xdg_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("XDG_CONFIG_HOME", "/elsewhere")
    assert trusted_file() == Path("/elsewhere/fedquilt/trusted")
    for value in ("", "relative"):
        monkeypatch.setenv("XDG_CONFIG_HOME", value)
        assert trusted_file() == Path("/home/me/.config/fedquilt/trusted")


def test_code_is_refused_until_it_is_listed(own: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        check()
    told = str(caught.value)
    assert "run/config.toml names code that you have not trusted" in told
    assert f"{own}/mine.py:Mine is not in your list." in told
    assert f"{own}/mine.py:net is not in your list." in told
    assert "--trust" in told
    assert str(trusted_file()) in told
    assert not trusted_file().exists()

    remember_code([SETTINGS])
    check()
    sha256 = hashlib.sha256(b"net = Mine = dict\n").hexdigest()
    assert f"{sha256}  {own}/mine.py:net\n" in trusted_file().read_text()


def test_trust_adds_to_the_list(own: Path) -> None:
    check(trust=True)
    check()


def test_a_file_that_changed_is_not_trusted(own: Path) -> None:
    remember_code([SETTINGS])
    (own / "mine.py").write_text("net = Mine = list\n")
    with pytest.raises(ConfigError, match=r"mine\.py:net has changed since you trusted it"):
        check()
    check(trust=True)
    assert trusted_file().read_text().count("mine.py:net") == 1


def test_another_name_in_a_trusted_file_is_not_trusted(own: Path) -> None:
    """Without this, a folder could call anything that a trusted file imports, such as
    `subprocess.run`.
    """
    remember_code([SETTINGS])
    with pytest.raises(ConfigError, match=r"mine\.py:run is not in your list"):
        check({"model": {"name": "mine.py:run", "args": "harmful"}})


def test_the_same_file_elsewhere_is_not_trusted(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remember_code([SETTINGS])
    (own / "other").mkdir()
    (own / "other" / "mine.py").write_text("net = Mine = dict\n")
    monkeypatch.chdir(own / "other")
    with pytest.raises(ConfigError, match="is not in your list"):
        check()


def test_modules_and_the_packages_above_them_are_compared(
    own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (own / "quilted_package").mkdir()
    first, second = own / "quilted_package" / "__init__.py", own / "quilted_package" / "nets.py"
    for file in (first, second):
        file.write_text("raise SystemExit('imported')\n")
    monkeypatch.syspath_prepend(own)
    settings = {"model": "quilted_package.nets:net"}
    assert module_files("quilted_package.nets") == [first, second]
    with pytest.raises(ConfigError) as caught:
        check(settings)
    assert f"{first} is not in your list" in str(caught.value)
    assert f"{second}:net is not in your list" in str(caught.value)
    remember_code([settings])
    check(settings)
    first.write_text("")
    with pytest.raises(ConfigError, match=r"__init__\.py has changed"):
        check(settings)
    assert "quilted_package" not in sys.modules


def test_functions_of_the_standard_library_are_not_trusted(own: Path) -> None:
    with pytest.raises(ConfigError, match=r":os\.system is not in your list"):
        check({"data": {"name": "os.path:os.system", "command": "touch harmed"}})


def test_a_module_that_cannot_be_found_is_not_trusted(own: Path) -> None:
    """Importing it would first import the package above it."""
    settings = {"model": "json.nowhere:net"}
    for trust in (False, True):
        with pytest.raises(ConfigError, match=r"json\.nowhere:net: this module has no file"):
            check(settings, trust)


def test_settings_without_code_need_no_trust(own: Path) -> None:
    check(
        {
            "data": "hub:owner/name",
            "engine": {"address": "head:6379"},
            "model": "missing.py:net",
            "x": "no.such:net",
        }
    )


def test_files_are_found_at_any_depth(own: Path) -> None:
    plain = {"a": [{"b": ({"c": "mine.py:one"},)}], "d": "mine.py:two", "e": 3}
    assert [code.name for code in named_code(plain)] == ["one", "two"]


def test_a_file_beside_records_belongs_to_a_run(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text("")
    assert not is_recorded(file)
    (tmp_path / "rounds.jsonl").touch()
    assert is_recorded(file)
    link = tmp_path / "elsewhere" / "mine.toml"
    link.parent.mkdir()
    link.symlink_to(file)
    assert is_recorded(link)


def test_a_study_and_all_its_runs_are_compared(own: Path) -> None:
    folder = own / "study" / "fedavg" / "seed0"
    folder.mkdir(parents=True)
    (own / "study" / "study.toml").write_text('entries = [{settings = {model = "mine.py:net"}}]')
    (folder / "config.toml").write_text('model = "mine.py:other"')
    (own / "study" / "waiting").mkdir()
    os.mkfifo(own / "study" / "waiting" / "config.toml")
    with pytest.raises(ConfigError) as caught:
        check_study_code(own / "study")
    assert "mine.py:net is not" in str(caught.value)
    assert "mine.py:other is not" in str(caught.value)
    check_study_code(own / "study", trust=True)
    check_study_code(own / "study")
    check_study_code(own / "nothing")


def test_damaged_lines_are_ignored_and_named(own: Path, caplog: pytest.LogCaptureFixture) -> None:
    remember_code([SETTINGS])
    lines = trusted_file().read_bytes().split(b"\n")
    trusted_file().write_bytes(b"\n".join([lines[0], b"\xff\x00broken", *lines[2:]]))
    with pytest.raises(ConfigError, match=r"mine\.py:Mine is not in your list"):
        check()
    assert f"{trusted_file()}, the list of code that you trust, is damaged in line 2" in caplog.text
    check({"model": "mine.py:net"})
    check(trust=True)
    caplog.clear()
    check()
    assert not caplog.text


def test_a_list_that_cannot_be_read_is_named(own: Path, caplog: pytest.LogCaptureFixture) -> None:
    trusted_file().mkdir(parents=True)
    with pytest.raises(
        ConfigError,
        match="trusted, the list of code that you trust, cannot be read: Is a directory",
    ):
        check()
    with caplog.at_level(logging.WARNING):
        remember_code([SETTINGS])  # costs a warning, and not the run
    assert "could not be written" in caplog.text


def test_processes_that_start_together_lose_no_line(own: Path) -> None:
    for number in range(8):
        (own / f"mine{number}.py").write_text("net = dict\n")
    context = multiprocessing.get_context("fork")
    settings = [{"model": f"mine{number}.py:net"} for number in range(8)]
    processes = [context.Process(target=remember_code, args=([one],)) for one in settings]
    for process in processes:
        process.start()
    for process in processes:
        process.join(30)
    assert len(trusted_file().read_text().splitlines()) == 9  # a comment first


def test_bytecode_is_not_run_in_place_of_the_source(tmp_path: Path) -> None:
    file, other = tmp_path / "cached.py", tmp_path / "other.py"
    file.write_text("value = 'source'\n")
    other.write_text("value = 'bytecode'\n")
    cached = importlib.util.cache_from_source(str(file))
    py_compile.compile(
        str(other), cached, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH
    )
    assert _read(file).value == "source"
