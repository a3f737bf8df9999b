"""An explanation in words, for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autoshard.ir.units import bytes_text, seconds_text
from autoshard.report.chain import Chain, Link
from autoshard.report.decided import starred_label
from autoshard.report.explain import Choice, Explanation


def explanation_lines(found: Explanation) -> Iterator[str]:
    """What a terminal shows."""
    yield f"{found.name}   {found.kind}{_equivalent_text(found.equivalent)}"
    if found.source:
        yield f"  {found.source}"
    if found.compute or found.comm:
        yield (
            f"  microbatch: compute {seconds_text(found.compute)} + communication {seconds_text(found.comm)}"
            f"{f', sum of all {len(found.equivalent)}' if len(found.equivalent) > 1 else ''}"
        )
    if found.parameters:
        yield ""
        for choice in found.parameters:
            size = f"{bytes_text(choice.rank_bytes)} per rank of {bytes_text(choice.global_bytes)}"
            yield f"{choice.what}  {choice.type}  {choice.layout}   {size}"
            yield from _reason_lines(choice.reason, choice.alternative, choice.margin)
        if found.more_parameters:
            yield f"... {found.more_parameters} more parameters"
    if found.result is not None:
        yield ""
        yield f"result  {_op_line(found.result)}"
        yield from _reason_lines(found.result.reason, found.result.alternative, found.result.margin)
    for chain in found.chains:
        yield ""
        yield from chain_lines(chain)
    if found.ops:
        yield ""
        title = {"module": "ops with the largest margins"}.get(found.kind, "used by")
        yield title
        for choice in found.ops:
            yield f"  {_op_line(choice)}  {choice.source}".rstrip()
            yield from _reason_lines(choice.reason, choice.alternative, choice.margin, "      ")
    if found.collectives:
        yield ""
        yield "collectives"
        for row in found.collectives:
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
        how = " <- ".join(link.how for link in links)
        where = "  ".join(filter(None, (last.module, last.source)))
        placed = f"{chain.axis}:{links[0].placement}"
        yield f"  {links[0].value:<{wide}}  {placed:<10} {how}{f'   {where}' if where else ''}"
    yield f"  because {chain.end}"
    why = chain.why
    if not why.alternative:
        return  # the line above says it
    yield from _reason_lines(why.reason, why.alternative, why.margin, "          ")


def _same_line(links: Sequence[Link]) -> Iterator[list[Link]]:
    group: list[Link] = []
    for link in links:
        same = group and (group[-1].module, group[-1].source, group[-1].placement, group[-1].times) == (
            link.module,
            link.source,
            link.placement,
            link.times,
        )
        if same and link.source and not link.times:
            group.append(link)
        else:
            if group:
                yield group
            group = [link]
    if group:
        yield group
