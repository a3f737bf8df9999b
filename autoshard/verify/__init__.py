"""Static verification: what is proved of the programs of all ranks without running them.

`static.verify_static` is the entry. Each rule has a file of its own:

* `states`, `operators`: every op runs in a way that its sharding rule allows, with the arguments that follow;
* `moves`: every collective does to a placement what its text says;
* `terms`, `walk`: with placements erased and collectives removed, the program is the model;
* `ports`: shards cover parameters, gradients end as their parameters lie, tied weights are added up;
* `order`: schedules end, messages match in order, nobody waits in a circle;
* `memory`: the fullest rank fits its device.
"""
