"""What an op lets you shard: one rule per op, written as the factors of its iteration space.

To use an op of your own (or one that has no rule yet), write its rule beside it and hand it over::

    import autoshard
    from autoshard.rules import einsum

    @autoshard.rule("mine.scaled_matmul.default")
    def scaled_matmul(node, ins):
        return einsum("m k, k n, -> m n", ins, node.types, linear=((0,), (1,)), kind="matmul")

    autoshard.parallelize(model, "dp=2,tp=2", example_inputs=batch, rules=[scaled_matmul])

A rule is a pure function of the call: ``node`` has the arguments (``node.args``, ``node.kwarg(name)``) and
the types of the outputs (``node.types``), ``ins`` are the types of the tensors among the arguments, in
order; a type has ``shape`` and ``dtype``. It gives a `Factored`, most easily made by

* `einsum`: one word per dim (``.`` for a dim that is broadcast), no word for a tensor without dims; what
  the output lacks is summed over shards (``reduce``) unless it is ``fixed``;
* `broadcast`: elementwise; ``fixed_dims`` stay whole;
* `opaque`: only full tensors.

``linear`` groups inputs in which the op is linear: pending sums may pass through. An op whose arguments
name sizes that are smaller on a shard needs ``local``, see `Factored`. The op's gradient is an op too and
needs a rule if it is not made of ops that have one.

`autoshard.check_rule` runs the op whole and on shards in every way that a rule allows, and raises
`autoshard.WrongRule` where they differ::

    autoshard.check_rule(scaled_matmul, torch.randn(6, 4), torch.randn(4, 8), torch.tensor(2.0))
"""

from __future__ import annotations

from autoshard.rules.core import Factored, broadcast, einsum, opaque
from autoshard.rules.user import UserRule, rule

__all__ = ["Factored", "UserRule", "broadcast", "einsum", "opaque", "rule"]
