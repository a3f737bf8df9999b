"""An explanation in words, for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autoshard.ir.units import bytes_text, seconds_text
from autoshard.report.chain import Chain, Link
from autoshard.report.decided import starred_label
from autoshard.report.explain import Choice, Explanation


def explanation_lines(found: Explanation) -> Iterator[str]:
    """What a terminal shows."""
    yield f"{found.name}   {found.kind}{_alike_text(found.alike)}"
    if found.source:
        yield f"  {found.source}"
    if found.compute or found.comm:
        yield (
            f"  {seconds_text(found.compute)} computing, {seconds_text(found.comm)} communication in a "
            f"microbatch{f', in all {len(found.alike)}' if len(found.alike) > 1 else ''}"
        )
    if found.parameters:
        yield ""
        for choice in found.parameters:
            size = f"{bytes_text(choice.bytes)} of {bytes_text(choice.whole)} on a rank"
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
        title = {"module": "ops inside whose next best choice would cost most"}.get(found.kind, "used by")
        yield title
        for choice in found.ops:
            yield f"  {_op_line(choice)}  {choice.source}".rstrip()
            yield from _reason_lines(choice.reason, choice.alternative, choice.margin, "      ")
    if found.moves:
        yield ""
        yield "collectives"
        for move in found.moves:
            times = f" x {move.calls}" if move.calls > 1 else ""
            user = f", for {move.for_op}" if move.for_op else ""
            yield (
                f"  {move.kind} over {move.axis} of {move.value}: {move.before} -> {move.after}, "
                f"{bytes_text(move.wire)} a rank, {seconds_text(move.seconds)}{times}{user}"
            )


def _alike_text(alike: Sequence[str]) -> str:
    if len(alike) < 2:
        return ""
    return f", decided alike for {len(alike)}: {starred_label(alike[0])}"


def _op_line(choice: Choice) -> str:
    time = f"   {seconds_text(choice.seconds)}" if choice.seconds else ""
    times = f" x {choice.count}" if choice.count > 1 and choice.seconds else ""
    return f"{choice.what} = {choice.op}  {choice.type}  {choice.layout}{time}{times}"


def _reason_lines(reason: str, alternative: str, margin: float, indent: str = "  ") -> Iterator[str]:
    text = reason_text(reason, alternative, margin)
    if text:
        yield f"{indent}why: {text}"


def reason_text(reason: str, alternative: str, margin: float) -> str:
    """``solver; the next best, dp:R tp:R, would cost a step 12.0 us more``"""
    if not alternative:
        return reason
    cost = f"would cost a step {seconds_text(margin)} more" if margin > 0 else "would cost the same"
    return f"{reason}; the next best, {alternative}, {cost}"


def chain_lines(chain: Chain) -> Iterator[str]:
    """A chain, neighbours on the same line of the user's together."""
    yield f"{chain.axis}:{chain.placement} comes from"
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
