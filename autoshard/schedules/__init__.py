"""Pipeline schedules: in which order the ranks of a pipeline compute. Plain data; knows no torch."""

from autoshard.schedules.schedule import Action, Kind, Schedule

__all__ = ["Action", "Kind", "Schedule"]
