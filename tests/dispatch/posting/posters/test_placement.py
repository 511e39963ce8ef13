"""Capacity is split exactly: the shares sum to the whole and differ by at most one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatch.posting.posters.placement import check_counts, split
from protocol import CodedError

counts = st.integers(0, 1 << 20)


@given(total=counts, parts=st.integers(1, 2000))
def test_shares_sum_exactly_and_differ_by_at_most_one(total: int, parts: int) -> None:
    shares = split(total, parts)
    assert len(shares) == parts
    assert sum(shares) == total
    assert max(shares) - min(shares) <= 1
    assert shares == sorted(shares, reverse=True)


@given(total=counts)
def test_no_parts_no_shares(total: int) -> None:
    assert split(total, 0) == []


@pytest.mark.parametrize(("total", "parts"), [(-1, 2), (2, -1)])
def test_negative_counts_are_refused(total: int, parts: int) -> None:
    with pytest.raises(ValueError, match="cannot split"):
        split(total, parts)


@given(nodes=st.integers(1, 50), each=st.integers(1, 50), spare=st.integers(0, 100))
def test_every_poster_gets_a_share_or_the_settings_are_refused(nodes: int, each: int, spare: int) -> None:
    posters = nodes * each
    check_counts(posters + spare, each, nodes)
    assert min(split(posters + spare, posters)) >= 1
    with pytest.raises(CodedError) as caught:
        check_counts(posters - 1, each, nodes)
    assert caught.value.code == "CONFIG.INVALID"
    assert str(posters) in caught.value.detail
