"""Planning collects garbage rarely, and leaves the user's settings as they were."""

import gc

import pytest

from autoshard.capture.garbage import RARELY, collected_rarely, not_collected


@pytest.mark.parametrize(("before", "during"), [((700, 10, 10), RARELY), ((0, 10, 10), (0, 10, 10))])
def test_thresholds_come_back(before: tuple[int, int, int], during: tuple[int, int, int]) -> None:
    kept = gc.get_threshold()
    gc.set_threshold(*before)
    try:
        with pytest.raises(ValueError, match="stop"), collected_rarely():
            assert gc.get_threshold() == during
            raise ValueError("stop")
        assert gc.get_threshold() == before
    finally:
        gc.set_threshold(*kept)


def test_a_collector_that_was_off_stays_off() -> None:
    assert gc.isenabled()
    with not_collected():
        assert not gc.isenabled()
        with not_collected():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
