"""`fedquilt serve` while the SuperLink is away."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

pytest.importorskip("flwr")
from fedquilt.deployment import serving
from fedquilt.deployment.server import Status
from fedquilt.deployment.serving import Service
from fedquilt.deployment.superlink import MAX_FAILED_STARTS, SuperLink, SuperLinkAwayError
from fedquilt.errors import ConfigError

UNAVAILABLE = "Error: Connection to the SuperLink is unavailable. Please check your network"


class Link(SuperLink):
    """A SuperLink that nobody starts. `flwr` gets the answers that a test has prepared."""

    def __init__(self, home: Path, answers: list[tuple[int, str] | None]) -> None:
        super().__init__(home)
        self.answers = answers
        self.mended: list[list[str]] = []
        self.up = True

    @property
    def is_up(self) -> bool:
        """Return what the test says."""
        return self.up

    def mend(self) -> list[str]:
        """Return the names that a test has prepared."""
        return self.mended.pop(0) if self.mended else []

    def flwr(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Give the next answer, or none in time."""
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if answer is None:
            raise subprocess.TimeoutExpired(arguments, 1)
        return subprocess.CompletedProcess(arguments, answer[0], "", answer[1])


@pytest.fixture
def service(tmp_path, monkeypatch):
    """Return a function that makes a service whose SuperLink gives these answers."""
    monkeypatch.setattr(serving, "LOOK_SECONDS", 0.001)

    def make(*answers: tuple[int, str] | None) -> Service:
        return Service(tmp_path, Link(tmp_path, list(answers)), None)  # type: ignore[arg-type]

    return make


def test_a_server_app_is_submitted_again_until_the_superlink_is_back(service):
    said: list[str] = []
    made = service((1, UNAVAILABLE), None, (1, UNAVAILABLE), (0, ""))
    made.link.mended = [[], ["the SuperLink"]]
    made.start_app(said.append)
    assert made.starts == 1
    assert said == [
        "The SuperLink does not answer. The ServerApp is started once it does.",
        "the SuperLink had ended and was started again.",
        "The SuperLink answers again. The ServerApp was started.",
    ]


def test_a_superlink_that_ended_while_an_app_was_submitted_is_away(service):
    made = service((1, "Traceback: connection reset"), (0, ""))
    made.link.up = False
    made.start_app(lambda _: None)
    assert made.starts == 1


def test_a_refusal_is_not_tried_again(service):
    made = service((1, "Error: the app is invalid"), (0, ""))
    with pytest.raises(ConfigError, match="refused it: Error: the app is invalid"):
        made.start_app(lambda _: None)
    assert made.starts == 0


def test_a_superlink_that_stays_away_is_an_error_after_some_time(service, monkeypatch):
    monkeypatch.setattr(serving, "SUBMIT_SECONDS", 0.05)
    said: list[str] = []
    with pytest.raises(SuperLinkAwayError, match="does not answer"):
        service((1, UNAVAILABLE)).start_app(said.append)
    assert len(said) == 1


def test_a_run_goes_on_after_its_superlink_and_its_server_app_have_ended(service, tmp_path):
    made = service((0, ""), (1, UNAVAILABLE), (0, ""))
    said: list[str] = []
    flwr = made.link.flwr

    def submitted(*arguments: str) -> subprocess.CompletedProcess[str]:
        done = flwr(*arguments)
        if done.returncode == 0 and made.starts == 0:
            ended = subprocess.Popen(["true"])
            ended.wait()
            Status("waiting", process=ended.pid).save(tmp_path)
        elif done.returncode == 0:
            Status("finished").save(tmp_path)
        return done

    made.link.flwr = submitted
    made.follow(said.append, lambda _: lambda _: None)
    assert made.starts == 2
    assert "The ServerApp had ended. It is started again and resumes the run." in said


@pytest.mark.parametrize(
    ("is_full", "kind"), [(True, "RecordError"), (False, "RecordError"), (True, "ConfigError")]
)
def test_a_failure_on_a_full_disk_is_waited_out_and_any_other_is_an_error(
    is_full, kind, service, tmp_path, monkeypatch
):
    made = service((0, ""))
    said: list[str] = []
    free = iter([0, 0, serving.MIN_FREE_BYTES]) if is_full else iter([])
    monkeypatch.setattr(serving, "free_bytes", lambda _: next(free, serving.MIN_FREE_BYTES))
    flwr = made.link.flwr

    def submitted(*arguments: str) -> subprocess.CompletedProcess[str]:
        state = "failed" if made.starts == 0 else "finished"
        Status(state, "rounds.jsonl could not be written", kind).save(tmp_path)
        return flwr(*arguments)

    made.link.flwr = submitted
    if not is_full or kind == "ConfigError":
        with pytest.raises(ConfigError, match="could not be written"):
            made.follow(said.append, lambda _: lambda _: None)
        return
    made.follow(said.append, lambda _: lambda _: None)
    assert made.starts == 2
    assert said == [
        f"The disk of {tmp_path} is full. The run continues from the last round once 64 MiB are "
        "free.",
        f"The disk of {tmp_path} has space again.",
        "The ServerApp had ended. It is started again and resumes the run.",
    ]


def test_a_key_that_is_registered_already_is_accepted_and_a_refused_one_is_not(service, tmp_path):
    key = tmp_path / "device-1.pub"
    key.write_text("ecdsa-sha2-nistp384 AAAA device-1\n")
    service((1, "Public key already in use")).link.register(key)
    key.write_text("ecdsa-sha2-nistp384 BBBB device-1\n")
    with pytest.raises(ConfigError, match="was to be registered; the SuperLink refused it"):
        service((1, "Error: invalid key")).link.register(key)
    with pytest.raises(SuperLinkAwayError):
        service((1, UNAVAILABLE)).link.register(key)


def test_a_superlink_that_does_not_start_again_is_an_error_after_some_tries(tmp_path):
    link = SuperLink(tmp_path)
    link.link.command = ["false"]
    link.executor.command = ["true"]
    for _ in range(MAX_FAILED_STARTS - 1):
        assert link.mend() == []
    with pytest.raises(ConfigError, match="it does not listen"):
        link.mend()
    link.link.stop()
