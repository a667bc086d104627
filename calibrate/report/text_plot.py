"""A curve in the terminal, in Braille dots: two across and four down in each character."""

from collections.abc import Sequence

_BLANK = 0x2800
# The bits of a Braille character, by row and column of its dots.
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))


def draw_curve(
    x: Sequence[float], y: Sequence[float], x_label: str, y_label: str, rows: int = 9
) -> list[str]:
    """Lines of text with a curve, its axes and its labels.

    Args:
      x: rising, one point per column of dots: two per character; the first and last are written.
      y: as many.
      x_label: written under the horizontal axis.
      y_label: written over the vertical axis.
      rows: height in characters.
    """
    low, high = min(y), max(y)
    span = high - low
    columns, dots_down = (len(x) + 1) // 2, 4 * rows
    cells = [[_BLANK] * columns for _ in range(rows)]
    flat = span <= 1e-9 * max(abs(low), abs(high))
    shares = [0.5 if flat else (value - low) / span for value in y]
    heights = [round(share * (dots_down - 1)) for share in shares]
    for i, height in enumerate(heights):
        previous = heights[i - 1] if i else height
        for dot in range(*_span(previous, height)):
            down = dots_down - 1 - dot
            cells[down // 4][i // 2] |= _DOTS[down % 4][i % 2]
    labels = [f"{high:.4g}", *[""] * (rows - 2), f"{low:.4g}"]
    if flat:
        labels = [""] * rows
        labels[(dots_down - 1 - heights[0]) // 4] = f"{low:.4g}"
    width = max(map(len, labels))
    lines = [f"{'':{width}}  {y_label}"]
    lines += [
        f"{label:>{width}} {'┤' if label else '│'}{''.join(map(chr, row))}"
        for label, row in zip(labels, cells, strict=True)
    ]
    left, right = (f"{end:,.0f}" if 1e4 <= end < 1e9 else f"{end:.4g}" for end in (x[0], x[-1]))
    lines.append(f"{'':{width}} └" + "─" * columns)
    middle = max(1, columns - len(left) - len(right))
    lines.append(f"{'':{width}}  {left}{x_label:^{middle}}{right}")
    return lines


def _span(previous: int, height: int) -> tuple[int, int]:
    """The dots of one column that join a point to the one before it."""
    if abs(height - previous) <= 1:
        return height, height + 1
    return (previous + 1, height + 1) if height > previous else (height, previous)
