"""Cost models in seconds: compute per device, collectives per mesh axis."""

from autoshard.cost.collective import KINDS, AxisLink, link_of, seconds
from autoshard.cost.compute import compute_seconds, flop_rate

__all__ = ["KINDS", "AxisLink", "compute_seconds", "flop_rate", "link_of", "seconds"]
