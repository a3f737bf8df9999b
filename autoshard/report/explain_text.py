"""An explanation in words, for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autoshard.ir.units import bytes_text, seconds_text
from autoshard.report.chain import Chain, Link
from autoshard.report.decided import starred_label
from autoshard.report.explain import Choice, Explanation


def explanation_lines(explanation: Explanation) -> Iterator[str]:
    """What a terminal shows."""
    yield f"{explanation.name}   {explanation.kind}{_equivalent_text(explanation.equivalent)}"
    if explanation.source:
        yield f"  {explanation.source}"
    if explanation.compute or explanation.comm:
        yield (
            f"  microbatch: compute {seconds_text(explanation.compute)} + "
            f"communication {seconds_text(explanation.comm)}"
            f"{f', sum of all {len(explanation.equivalent)}' if len(explanation.equivalent) > 1 else ''}"
        )
    if explanation.parameters:
        yield ""
        for choice in explanation.parameters:
            size = f"{bytes_text(choice.rank_bytes)} per rank of {bytes_text(choice.global_bytes)}"
            yield f"{choice.what}  {choice.type}  {choice.layout}   {size}"
            yield from _reason_lines(choice.reason, choice.alternative, choice.margin)
        if explanation.more_parameters:
            yield f"... {explanation.more_parameters} more parameters"
    if explanation.result is not None:
        yield ""
        yield f"result  {_op_line(explanation.result)}"
        yield from _reason_lines(
            explanation.result.reason, explanation.result.alternative, explanation.result.margin
        )
        if explanation.fused:
            yield f"  one kernel of Inductor: {', '.join(explanation.fused)}"
    for chain in explanation.chains:
        yield ""
        yield from chain_lines(chain)
    if explanation.ops:
        yield ""
        title = {"module": "ops with the largest margins"}.get(explanation.kind, "used by")
        yield title
        for choice in explanation.ops:
            yield f"  {_op_line(choice)}  {choice.source}".rstrip()
            yield from _reason_lines(choice.reason, choice.alternative, choice.margin, "      ")
    if explanation.collectives:
        yield ""
        yield "collectives"
        for row in explanation.collectives:
            times = f" x {row.calls}" if row.calls > 1 else ""
            user = f", for {row.for_op}" if row.for_op else ""
            yield (
                f"  {row.kind} on {row.axis} of {row.value}: {row.before} -> {row.after}, "
                f"payload {bytes_text(row.payload)} per rank, {seconds_text(row.seconds)}{times}{user}"
            )


def _equivalent_text(equivalent: Sequence[str]) -> str:
    if len(equivalent) < 2:
        return ""
    return f", same decision in {len(equivalent)} layers: {starred_label(equivalent[0])}"


def _op_line(choice: Choice) -> str:
    time = f"   {seconds_text(choice.seconds)}" if choice.seconds else ""
    times = f" x {choice.count}" if choice.count > 1 and choice.seconds else ""
    return f"{choice.what} = {choice.op}  {choice.type}  {choice.layout}{time}{times}"


def _reason_lines(reason: str, alternative: str, margin: float, indent: str = "  ") -> Iterator[str]:
    text = reason_text(reason, alternative, margin)
    if text:
        yield f"{indent}reason: {text}"


def reason_text(reason: str, alternative: str, margin: float) -> str:
    """``solver; next best dp:R tp:R adds 12.0 us to a step``"""
    if not alternative:
        return reason
    cost = f"adds {seconds_text(margin)} to a step" if margin > 0 else "costs the same"
    return f"{reason}; next best {alternative} {cost}"


def chain_lines(chain: Chain) -> Iterator[str]:
    """A chain, neighbours on the same line of the user's together."""
    yield f"{chain.axis}:{chain.placement} is propagated from"
    wide = max((len(link.value) for link in chain.links), default=0)
    for links in _same_line(chain.links):
        last = links[-1]
        if last.times:
            yield f"  ...  {last.how} ({last.times} ops)"
            continue
        ops = " <- ".join(link.how for link in links)
        location = "  ".join(filter(None, (last.module, last.source)))
        placement = f"{chain.axis}:{links[0].placement}"
        yield f"  {links[0].value:<{wide}}  {placement:<10} {ops}{f'   {location}' if location else ''}"
    yield f"  because {chain.end}"
    why = chain.why
    if not why.alternative:
        return  # the line above says it
    yield from _reason_lines(why.reason, why.alternative, why.margin, "          ")


def _same_line(links: Sequence[Link]) -> Iterator[list[Link]]:
    group: list[Link] = []
    for link in links:
        continues = group and (group[-1].module, group[-1].source, group[-1].placement, group[-1].times) == (
            link.module,
            link.source,
            link.placement,
            link.times,
        )
        if continues and link.source and not link.times:
            group.append(link)
        else:
            if group:
                yield group
            group = [link]
    if group:
        yield group
