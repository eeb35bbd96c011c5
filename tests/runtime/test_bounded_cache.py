"""What is kept of what was made."""

from graphar.runtime.bounded_cache import BoundedCache


def test_things_are_kept_until_too_many_have_come():
    kept = BoundedCache(max_entries=2)

    assert [kept.keep(key, len) for key in "ab"] == [len, len]
    assert (kept.get("a"), kept.get("b"), kept.get("c")) == (len, len, None)
    kept.keep("c", max)
    assert kept == {"c": max}
