"""One parallel model answers any call, on four gloo processes: see `calls_worker`."""

from __future__ import annotations

from ranks import HERE, run_ranks
from sampling import all_cases


def test_calls_of_every_kind_equal_eager() -> None:
    """Other sizes, modes, masks, types, numbers; logits, submodules, generation; then training as before; and
    random batch sizes and lengths, of which the last need no capture."""
    told = run_ranks(
        [str(HERE / "calls_worker.py"), "GPT2", "dp=2,tp=2", "--some", "--also-sizes", "3"]
    ).splitlines()
    lines = [x for x in told if x.startswith(("ok ", "BAD"))]
    assert len(lines) == (24 if all_cases() else 13)
    assert not [x for x in lines if x.startswith("BAD")]
