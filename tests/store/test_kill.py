from lohan.testing import kill


def test_twenty_sigkills_leave_exactly_the_last_commit_or_the_one_under_way(tmp_path):
    tally = kill.run([tmp_path / "a", tmp_path / "b"], num_rounds=20, seed=2, longest_seconds=0.3)
    assert tally.failures == 0
    assert tally.kills == 20
    assert tally.commits > 0
