"""A bounded cache empties itself once it is full."""

from graphar.runtime.plan import BoundedCache


def test_entries_are_kept_until_there_are_too_many():
    kept = BoundedCache(max_entries=2)

    assert [kept.keep(key, len) for key in "ab"] == [len, len]
    assert (kept.get("a"), kept.get("b"), kept.get("c")) == (len, len, None)
    kept.keep("c", max)
    assert kept == {"c": max}
