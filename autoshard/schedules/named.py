"""The schedules that have an order of their own; what is searched starts from these."""

from __future__ import annotations

from autoshard.schedules.breadth_first import BREADTH_FIRST
from autoshard.schedules.gpipe import GPIPE
from autoshard.schedules.interleaved import INTERLEAVED
from autoshard.schedules.one_f_one_b import ONE_F_ONE_B
from autoshard.schedules.zb_h1 import ZB_H1
from autoshard.schedules.zb_v import ZB_V

NAMED = {spec.name: spec for spec in (GPIPE, ONE_F_ONE_B, INTERLEAVED, BREADTH_FIRST, ZB_H1, ZB_V)}
