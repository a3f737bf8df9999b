"""Timelines of pipelines to look at: in a terminal, in a browser (SVG), in Perfetto. Read only."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from itertools import groupby
from math import floor, log10
from typing import Any

from rich.text import Text

from autoshard.ir.units import bytes_text, seconds_text
from autoshard.schedules.schedule import Action
from autoshard.schedules.timeline import ActionSpan, Timeline

#: Okabe and Ito's colours, told apart with any kind of colour vision; B and I are never in one schedule
#: for the same microbatch, and look alike.
_COLOURS = {"F": "#0072B2", "B": "#E69F00", "I": "#E69F00", "W": "#009E73", "update": "#CC79A7"}
_WORDS = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}
_NOTHING = "#EEEEEE"
_LETTERS = "abcdefghij"
_WEIGHT, _UPDATE, _IDLE = "+", "=", "·"


def text(timeline: Timeline, width: int = 100) -> Text:
    """One line per rank, at most `width` columns: forward the last digit of the microbatch, backward the
    same as a letter (a is 0), ``+`` weight gradients, ``=`` the update, ``·`` idle.

    Later stages of a rank are paler and underlined. Every column shows what is computed at its middle.
    """
    labels = [f"rank {r}" for r in range(timeline.ranks)]
    side = max(map(len, labels))
    idle = [_idle(timeline, r) for r in range(timeline.ranks)]
    columns, scale = _columns(timeline, max(width - side - len(" ││ 100 %"), 1))
    out = Text(_head(timeline), style="bold", no_wrap=True, end="")
    out.append("\n")
    for rank, label in enumerate(labels):
        out.append(f"{label:<{side}} │", style="not bold")
        cells = _cells(timeline, rank, columns, scale)
        for (symbol, style), same in groupby(cells):
            out.append(symbol * len(list(same)), style=f"not bold {style}")
        out.append(f"│ {100 * idle[rank]:3.0f} %\n", style="not bold dim")
    kinds = {span.action.kind for row in timeline.spans for span in row}
    words = ["0-9 forward", "a-j backward" if "B" in kinds else "a-j input gradient"]
    words += [f"{_WEIGHT} weight gradient"] if "W" in kinds else []
    words += [f"{_UPDATE} update"] if any(timeline.update) else []
    out.append(f"{', '.join(words)}, {_IDLE} idle (its share to the right)", style="not bold dim")
    return out


def svg(timeline: Timeline, width: int = 1200) -> str:
    """A picture of `width` pixels that needs nothing else; pointing at an action tells what it is."""
    left, right, top, row, gap = 70, 150, 52, 24, 4
    scale = (width - left - right) / (timeline.makespan or 1.0)
    bottom = top + timeline.ranks * (row + gap)
    height = bottom + 44
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{left}" y="18" font-size="14" font-weight="bold">{escape(_head(timeline))}</text>',
        *_svg_legend(timeline, left, 36),
    ]
    for rank, spans in enumerate(timeline.spans):
        y = top + rank * (row + gap)
        idle = f"{100 * _idle(timeline, rank):.0f} % idle, {bytes_text(timeline.peak[rank])}"
        parts += [
            f'<text x="{left - 8}" y="{y + 16}" text-anchor="end">rank {rank}</text>',
            _svg_box(left, y, timeline.makespan * scale, row, _NOTHING, "idle"),
            f'<text x="{width - right + 8}" y="{y + 16}">{escape(idle)}</text>',
        ]
        shades = _shades(timeline, rank)
        for span in spans:
            action, shade = span.action, shades[span.action.stage]
            title = (
                f"{_WORDS[action.kind]}, stage {action.stage}, microbatch {action.microbatch}: "
                f"{seconds_text(span.start)} to {seconds_text(span.end)}"
            )
            colour = _paler(_COLOURS[action.kind], shade)
            parts.append(
                _svg_box(left + span.start * scale, y, (span.end - span.start) * scale, row, colour, title)
            )
            label = str(action.microbatch)
            if (span.end - span.start) * scale >= 7 * len(label) + 2:
                x = left + (span.start + span.end) / 2 * scale
                ink = "white" if action.kind == "F" and not shade else "black"
                parts.append(
                    f'<text x="{x:.2f}" y="{y + 16}" text-anchor="middle" fill="{ink}" '
                    f'pointer-events="none">{label}</text>'
                )
        if timeline.update[rank]:
            start = spans[-1].end if spans else 0.0
            title = f"update: {seconds_text(start)} to {seconds_text(start + timeline.update[rank])}"
            x, wide = left + start * scale, timeline.update[rank] * scale
            parts.append(_svg_box(x, y, wide, row, _COLOURS["update"], title))
    for tick in _ticks(timeline.makespan):
        x = left + tick * scale
        parts.append(f'<line x1="{x:.2f}" x2="{x:.2f}" y1="{bottom}" y2="{bottom + 6}" stroke="#666666"/>')
        label = seconds_text(tick) if tick else "0"
        parts.append(f'<text x="{x:.2f}" y="{bottom + 20}" text-anchor="middle">{label}</text>')
    return "\n".join([*parts, "</svg>", ""])


def perfetto(timeline: Timeline) -> dict[str, Any]:
    """Chrome's trace format (JSON), for ui.perfetto.dev: a thread per rank, an arrow per send, and a
    counter of the bytes that each rank holds. Microseconds."""
    events: list[dict[str, Any]] = [_meta("process_name", 0, f"pipeline {timeline.name}")]
    spans_by_result: dict[tuple[str, int, int, int], ActionSpan] = {}
    sliced = any(span.action.slice for spans in timeline.spans for span in spans)
    for rank, spans in enumerate(timeline.spans):
        stages = [s for s, owner in enumerate(timeline.owner) if owner == rank]
        some = ", ".join(map(str, stages))
        events.append(_meta("thread_name", rank, f"rank {rank}: stage{'s'[: len(stages) != 1]} {some}"))
        order = {"name": "thread_sort_index", "ph": "M", "pid": 0, "tid": rank}
        events.append({**order, "args": {"sort_index": rank}})
        for span in spans:
            spans_by_result[_result(span.action)] = span
            events.append(_complete(str(span.action), _WORDS[span.action.kind], rank, span.start, span.end))
            action = span.action
            part = {"slice": action.slice} if sliced else {}
            events[-1]["args"] = {"stage": action.stage, "microbatch": action.microbatch, **part}
        if timeline.update[rank]:
            start = spans[-1].end if spans else 0.0
            events.append(_complete("update", "update", rank, start, start + timeline.update[rank]))
        for time, held in timeline.curve[rank]:
            counter = {"name": f"rank {rank} bytes", "ph": "C", "pid": 0, "ts": _microseconds(time)}
            events.append({**counter, "args": {"bytes": held}})
    for number, send in enumerate(timeline.sends):
        source = spans_by_result[_result(send.action)]
        target = spans_by_result[_result(send.action, onward=True)]
        same = {"name": "send", "cat": "send", "id": number, "pid": 0}
        # An arrow binds to the slices that enclose its ends, so both are a little inside of them.
        leaves = source.end - 1e-3 * (source.end - source.start)
        lands = target.start + 1e-3 * (target.end - target.start)
        events.append({**same, "ph": "s", "tid": send.source, "ts": _microseconds(leaves)})
        events.append({**same, "ph": "f", "bp": "e", "tid": send.target, "ts": _microseconds(lands)})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _head(timeline: Timeline) -> str:
    time, bubble = seconds_text(timeline.makespan), 100 * timeline.bubble
    peak = bytes_text(max(timeline.peak, default=0.0))
    return f"{timeline.name}: {time}, bubble {bubble:.1f} %, at most {peak} on a rank"


def _idle(timeline: Timeline, rank: int) -> float:
    return 1.0 - timeline.busy[rank] / timeline.makespan if timeline.makespan else 0.0


def _columns(timeline: Timeline, most: int) -> tuple[int, float]:
    """How many columns a row has and columns per second: whole columns for the shortest action, where there
    is room for that, so that equal actions look equal."""
    if not timeline.makespan:
        return 0, 0.0
    lengths = [s.end - s.start for row in timeline.spans for s in row if s.end > s.start]
    shortest = min(lengths, default=timeline.makespan)
    full = int(most * shortest / timeline.makespan + 1e-9)
    scale = full / shortest if full else most / timeline.makespan
    return min(most, round(timeline.makespan * scale)), scale


def _cells(timeline: Timeline, rank: int, columns: int, scale: float) -> Iterator[tuple[str, str]]:
    """Symbol and style of each column."""
    spans, k, shades = timeline.spans[rank], 0, _shades(timeline, rank)
    end = spans[-1].end if spans else 0.0
    for column in range(columns):
        time = (column + 0.5) / scale
        while k < len(spans) and spans[k].end <= time:
            k += 1
        if k < len(spans) and spans[k].start <= time:
            yield _symbol(spans[k].action), _style(spans[k].action, shades[spans[k].action.stage])
        elif k == len(spans) and time < end + timeline.update[rank]:
            yield _UPDATE, f"black on {_COLOURS['update']}"
        else:
            yield _IDLE, "dim"


def _symbol(action: Action) -> str:
    if action.kind == "W":
        return _WEIGHT
    digit = action.microbatch % 10
    return str(digit) if action.kind == "F" else _LETTERS[digit]


def _style(action: Action, shade: float) -> str:
    ink = "white" if action.kind == "F" and not shade else "black"
    later = " underline" if shade else ""
    return f"{ink} on {_paler(_COLOURS[action.kind], shade)}{later}"


def _shades(timeline: Timeline, rank: int) -> dict[int, float]:
    """How much paler each stage of a rank is drawn: 0 for its first one."""
    stages = [s for s, owner in enumerate(timeline.owner) if owner == rank]
    return {stage: 0.6 * k / max(len(stages) - 1, 1) for k, stage in enumerate(stages)}


def _paler(colour: str, share: float) -> str:
    parts = (int(colour[k : k + 2], 16) for k in (1, 3, 5))
    return "#" + "".join(f"{round(c + (255 - c) * share):02X}" for c in parts)


def _ticks(seconds: float) -> list[float]:
    """Round times from 0 on, ten or fewer steps."""
    if not seconds:
        return [0.0]
    power = 10.0 ** (floor(log10(seconds)) - 1)
    step = next(n * power for n in (1, 2, 5, 10) if seconds / (n * power) <= 10)
    return [k * step for k in range(int(seconds / step + 1e-9) + 1)]


def _svg_box(x: float, y: float, wide: float, high: float, colour: str, title: str) -> str:
    return (
        f'<rect x="{x:.2f}" y="{y}" width="{wide:.2f}" height="{high}" fill="{colour}" stroke="white" '
        f'stroke-width="0.5"><title>{escape(title)}</title></rect>'
    )


def _svg_legend(timeline: Timeline, x: float, y: float) -> Iterator[str]:
    kinds = {span.action.kind for row in timeline.spans for span in row}
    shown = [(_WORDS[k], _COLOURS[k]) for k in ("F", "B", "I", "W") if k in kinds]
    shown += [("update", _COLOURS["update"])] if any(timeline.update) else []
    shown += [("idle", _NOTHING)]
    for word, colour in shown:
        yield f'<rect x="{x}" y="{y - 10}" width="12" height="12" fill="{colour}"/>'
        yield f'<text x="{x + 16}" y="{y}">{word}</text>'
        x += 36 + 6.5 * len(word)
    if len(timeline.owner) > timeline.ranks:
        yield f'<text x="{x}" y="{y}">(later stages of a rank are paler)</text>'


def _meta(name: str, thread: int, value: str) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": 0, "tid": thread, "args": {"name": value}}


def _complete(name: str, kind: str, rank: int, start: float, end: float) -> dict[str, Any]:
    same = {"name": name, "cat": kind, "ph": "X", "pid": 0, "tid": rank}
    # Rounded at both ends alike: what follows at once must not overlap by a nanosecond.
    first, last = _microseconds(start), _microseconds(end)
    return {**same, "ts": first, "dur": round(last - first, 3)}


def _microseconds(seconds: float) -> float:
    """To the nanosecond, which is what Perfetto keeps."""
    return round(seconds * 1e6, 3)


def _result(action: Action, onward: bool = False) -> tuple[str, int, int, int]:
    """What names an action whichever way backward is done; onward: the one that its result is sent to."""
    step = (1 if action.kind == "F" else -1) if onward else 0
    kind = "B" if action.kind == "I" else action.kind
    return kind, action.stage + step, action.microbatch, action.slice
