"""The prediction benchmark's own arithmetic, and that its settings are what the issue of predicting asks for."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import prediction


def test_errors_are_those_of_medians_and_the_last_line_is_json(capsys):
    one, other = (prediction.Found(setting) for setting in prediction.SETTINGS[:2])
    one.predicted, one.measured = [1.0, 1.1, 9.0], [1.0, 1.0, 2.0]  # medians 1.1 and 1.0
    other.predicted, other.measured = [2.0, 2.0, 2.0], [2.0, 4.0, 1.0]
    prediction.report([one, other])
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last == {"median_error": 0.05, "worst_error": 0.1, "settings": 2}


def test_the_settings_differ_in_everything_a_prediction_depends_on():
    settings = prediction.SETTINGS
    assert len(settings) >= 12
    assert len({setting.name for setting in settings}) == len(settings)
    assert {setting.strategy for setting in settings} >= {"lohan", "lohan-paper", "separate-stage", "in-memory"}
    assert {setting.state_format for setting in settings} >= {"split", "fp32"}
    assert {setting.flops is None for setting in settings} == {True, False}
    assert len({setting.model for setting in settings}) >= 3
    assert len({setting.memory for setting in settings}) >= 3
