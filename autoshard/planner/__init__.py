"""From a captured model and a cluster to a plan that was simulated, and its program."""
