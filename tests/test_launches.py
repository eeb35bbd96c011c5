"""What is kept of launches."""

from graphar import launches
from graphar.launches import Launches


def test_a_launch_is_kept_until_too_many_have_come(monkeypatch):
    monkeypatch.setattr(launches, "_MOST", 2)
    kept = Launches()

    assert [kept.keep(key, len) for key in "ab"] == [len, len]
    assert (kept.get("a"), kept.get("b"), kept.get("c")) == (len, len, None)
    kept.keep("c", max)
    assert kept == {"c": max}
