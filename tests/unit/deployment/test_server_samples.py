"""Samples of the server that `fedquilt serve` uses, and what a loaded run does without them."""

from __future__ import annotations

import json

import pytest

from fedquilt.deployment.round_rules import RoundRules
from fedquilt.deployment.server import REQUEST, WORKPLACE, ServeRequest
from fedquilt.engines.flower.evaluation import ServerSamples
from fedquilt.errors import RecordError
from fedquilt.runs.folder_files import lacking_samples


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("both", ServerSamples(test=True, calibration=True)),
        ("test", ServerSamples(test=True, calibration=False)),
        ("calibration", ServerSamples(test=False, calibration=True)),
        ("none", ServerSamples(test=False, calibration=False)),
    ],
)
def test_the_choice_survives_writing_and_decides_if_data_is_measured_on(name, expected, tmp_path):
    (tmp_path / WORKPLACE).mkdir()
    request = ServeRequest("run1", 3, RoundRules(60.0), samples=name)
    request.save(tmp_path)
    assert ServeRequest.load(tmp_path) == request
    assert ServerSamples.of(name) == expected
    reason = lacking_samples(tmp_path)
    assert bool(reason) is not expected.calibration
    assert not reason or f"--samples {name}" in reason


def test_a_request_of_an_earlier_version_uses_all_samples(tmp_path):
    (tmp_path / WORKPLACE).mkdir()
    ServeRequest("run1", 3, RoundRules(60.0), samples="none").save(tmp_path)
    file = tmp_path / WORKPLACE / REQUEST
    plain = json.loads(file.read_text())
    file.write_text(json.dumps({key: plain[key] for key in plain if key != "samples"}))
    assert ServeRequest.load(tmp_path).samples == "both"
    assert lacking_samples(tmp_path) == ""
    file.write_text(json.dumps({**plain, "samples": "some"}))
    with pytest.raises(RecordError, match="its samples are 'some'"):
        ServeRequest.load(tmp_path)


def test_a_run_that_was_not_deployed_lacks_nothing(tmp_path):
    assert lacking_samples(tmp_path) == ""
