"""Is the model that is stored with a program the one that its target is now?"""

from __future__ import annotations

from dataclasses import replace

from autoshard.errors import VerificationError
from autoshard.interop.targets import build
from autoshard.passes.simplify.batch_terms import NO_TERMS
from autoshard.planner.source import Source
from autoshard.planner.step_terms import step_terms
from autoshard.program.names import port_names
from autoshard.program.original import notes_of_original, original_of, original_text
from autoshard.program.program import Program, Signature
from autoshard.rules.user import Rules
from autoshard.runtime.arguments import split_inputs
from autoshard.search.plan.plan_json import plan_from_json
from autoshard.search.problem.problem import batch_of


def same_model(program: Program, target: str, rules: Rules = None) -> None:
    """Capture the target again and compare it with what is stored, statement by statement.

    Raises VerificationError, naming the first statement that differs, and UsageError if the target cannot be
    built.
    """
    if program.original is None:
        raise VerificationError("the program was stored without its model", hint="compile it again")
    options = {k: int(v) for k, v in program.options}
    built = build(target, batch=options.get("batch"), seq=options.get("seq"))
    args, kwargs = split_inputs(built.inputs)
    plan = plan_from_json(program.plan)
    source = Source.of_plan(built.model, args, kwargs, plan, rules)
    known = analysis = source.analysed(lambda _: None)
    if plan.batch and batch_of(analysis.folded) != plan.batch:
        analysis = source.with_batch(analysis, plan.batch).analysed(lambda _: None)
    terms = NO_TERMS
    if program.microbatches > 1:
        terms = step_terms(source, known, analysis, lambda _: None)
    folded = analysis.folded
    names = port_names(folded.joint.ports)
    ports = tuple(replace(p, name=names[p.name]) for p in folded.joint.ports)
    signature = replace(Signature.of(folded.joint), ports=ports)
    original = original_of(folded, names, terms)
    now = original_text(original, signature, notes_of_original(original)).splitlines()
    stored = original_text(program.original, program.signature, program.original_notes).splitlines()
    for number, (a, b) in enumerate(zip(stored, now, strict=False), 1):
        if _bare(a) != _bare(b):
            raise VerificationError(
                f"the model stored with the program is not what {target} is now",
                where=f"original.py:{number}: {a.strip()}",
                why=f"captured again, it is: {b.strip()}",
                hint="compile the program again",
            )
    if len(stored) != len(now):
        raise VerificationError(
            f"the model stored with the program is not what {target} is now",
            where=f"original.py:{min(len(stored), len(now))}",
            why=f"it has {len(stored)} lines, captured again {len(now)}",
            hint="compile the program again",
        )


def _bare(line: str) -> str:
    """A line without its comment: where code stands may change."""
    return line.split("  #", maxsplit=1)[0].strip() if not line.strip().startswith("#") else ""
