"""Sums for which torch takes too few processors (the gradients of biases and scales) or too much memory (distances)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lamina.engines.stacked.gpu.launch import launch

ROWS, COLUMNS = 32, 64  # that a program adds up at a time
PROGRAMS = 720  # rows are cut into parts to have about as many
ROWS_PER_PART = 128  # at least: every part is written down and added up

ELEMENTS = 4096  # of a row that a program compares with its centre at a time
PROGRAMS_PER_DISTANCE = 16


@triton.jit
def _sum_rows(  # type: ignore[no-untyped-def]
    values, sums, rows, per_part, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """sums[n, part, column] = the sum over the rows of a part of values[n, row, column]."""
    n = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    last = tl.minimum((part + 1) * per_part, rows)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(part * per_part, last, ROWS):
        row = start + tl.arange(0, ROWS)
        mask = (row < last)[:, None] & (column < WIDTH)[None, :]
        place = (n * rows + row[:, None]) * WIDTH + column[None, :]
        total += tl.load(values + place, mask=mask, other=0.0).to(tl.float32)
    place = (n * tl.num_programs(1) + part) * WIDTH + column
    tl.store(sums + place, tl.sum(total, axis=0), mask=column < WIDTH)


def sum_rows(values: Tensor) -> Tensor:
    """Return the sums [N, width] of contiguous values [N, rows, width], in float32."""
    count, rows, width = values.shape
    columns = triton.cdiv(width, COLUMNS)
    parts = max(1, min(PROGRAMS // (count * columns), rows // ROWS_PER_PART))
    per_part = triton.cdiv(rows, parts)
    parts = triton.cdiv(rows, per_part)  # none is empty
    sums = torch.empty(count, parts, width, dtype=torch.float32, device=values.device)
    launch(_sum_rows, (count, parts, columns), values, sums, rows, per_part, width, ROWS, COLUMNS)
    return sums[:, 0] if parts == 1 else sums.sum(1)


@triton.jit(do_not_specialize=["width", "per_part"])  # so that it is compiled once
def _squared_distances(rows, centres, which, sums, width, per_part, ELEMENTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """sums[n, part] = the sum over the elements of a part of (rows[n] - centres[which[n]])^2."""
    n, part = tl.program_id(0), tl.program_id(1)
    row, centre = rows + n.to(tl.int64) * width, centres + tl.load(which + n) * width
    last = tl.minimum((part + 1) * per_part, width)
    total = tl.zeros((ELEMENTS,), dtype=tl.float32)
    for start in range(part * per_part, last, ELEMENTS):
        place = start + tl.arange(0, ELEMENTS)
        mask = place < last
        difference = tl.load(row + place, mask=mask, other=0.0) - tl.load(centre + place, mask=mask, other=0.0)
        total += difference * difference
    tl.store(sums + n * tl.num_programs(1) + part, tl.sum(total))


def squared_distances(rows: Tensor, centres: Tensor, which: Tensor) -> Tensor:
    """Return the squared distances [N] of rows [N, p] from centres[which], all contiguous float32."""
    count, width = rows.shape
    per_part = triton.cdiv(triton.cdiv(width, PROGRAMS_PER_DISTANCE), ELEMENTS) * ELEMENTS
    parts = triton.cdiv(width, per_part)
    sums = torch.empty(count, parts, dtype=torch.float32, device=rows.device)
    launch(_squared_distances, (count, parts), rows, centres, which, sums, width, per_part, ELEMENTS)
    return sums.sum(1)
