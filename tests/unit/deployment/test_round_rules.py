"""Rules of a deployment's rounds."""

from __future__ import annotations

import json
import math

import pytest

from fedquilt.deployment.round_rules import RoundRules
from fedquilt.errors import ConfigError


@pytest.mark.parametrize(
    "rules", [RoundRules(), RoundRules(5.0, 2, 3, 0.5, 4.0), RoundRules(max_rms_ratio=2.0)]
)
def test_rules_survive_writing_and_reading(rules):
    text = json.dumps(rules.to_dict(), allow_nan=False)
    assert RoundRules.from_dict(json.loads(text)) == rules


def test_missing_rules_have_their_defaults():
    assert RoundRules.from_dict({"least": 2, "other": 7}) == RoundRules(least=2)


@pytest.mark.parametrize(
    "rules",
    [
        RoundRules(deadline=0.5),
        RoundRules(deadline=math.inf),
        RoundRules(deadline=math.nan),
        RoundRules(least=0),
        RoundRules(least=4),
        RoundRules(enough=4),
        RoundRules(least=3, enough=2),
        RoundRules(max_rms=0.0),
        RoundRules(max_rms=math.nan),
        RoundRules(max_rms_ratio=1.0),
    ],
)
def test_rules_that_no_run_can_follow_are_refused(rules):
    with pytest.raises(ConfigError, match="would work"):
        rules.check(3)


def test_rules_at_their_limits_are_allowed():
    rules = RoundRules(1.0, 3, 3, 1e-9, 1.1)
    assert rules.check(3) is rules
