"""Gluon, Triton's lower level, on a CPU without Triton: enough of it to run the Hopper kernels' Python line by line.

Loads and products happen at once, in float64. So this finds wrong indices, forgotten boxes, barriers that wait for
other bytes than arrive, results that are written twice or never, and strides that the copy engine refuses. Races it
does not find.
"""

import importlib
import itertools
import math
import sys
from types import ModuleType, SimpleNamespace
from unittest.mock import MagicMock

import torch

KERNELS = "lamina.engines.stacked.gpu"


class Program:
    """The program that runs: its place in the grid."""

    grid, place, zeroed = (1, 1, 1), (0, 0, 0), False


class Number(int):
    """A scalar of a kernel."""

    def to(self, _):
        return self


class Barrier:
    """Counts the bytes that it waits for, and the times that all have arrived."""

    def __init__(self):
        self.pending = self.phases = 0


class Memory:
    """Shared memory: a part of a flat tensor, or a list of barriers."""

    def __init__(self, storage, offset, shape):
        self.storage, self.offset, self.shape = storage, offset, list(shape)

    def index(self, i):
        assert 0 <= i < self.shape[0]
        if isinstance(self.storage, list):
            return self.storage[i]
        return Memory(self.storage, self.offset + i * math.prod(self.shape[1:]), self.shape[1:])

    def reshape(self, shape):
        assert math.prod(shape) == math.prod(self.shape)
        return Memory(self.storage, self.offset, shape)

    def _reinterpret(self, dtype, shape, layout):
        assert self.offset + math.prod(shape) <= len(self.storage)
        return Memory(self.storage, self.offset, shape)

    def permute(self, order):
        return self.values.permute(order)

    def store(self, values):
        assert list(values.shape) == self.shape
        self.values.copy_(values)

    def _keep_alive(self):
        pass

    @property
    def values(self):
        return self.storage[self.offset : self.offset + math.prod(self.shape)].view(self.shape)


class Layout:
    swizzle_byte_width = 128

    def __init__(self, *_):
        pass

    @classmethod
    def get_default_for(cls, block, kind):
        return cls()


class Descriptor:
    """A tensor as the copy engine sees it, which refuses some strides."""

    def __init__(self, tensor, shape, strides, block, layout):
        assert strides[-1] == 1
        assert all(stride % 8 == 0 for stride in strides[:-1])
        assert all(size <= 256 and size & (size - 1) == 0 for size in block)
        self.view = tensor.as_strided(shape, strides, tensor.storage_offset())
        self.dtype, self.layout = tensor.dtype, layout
        assert torch.equal(self.view.nan_to_num(), tensor.nan_to_num())
        self.block_type = SimpleNamespace(shape=list(block), nbytes=math.prod(block))

    def overlap(self, place):
        """Return where a box lies in the tensor, and this part of the box; None if all of it is outside."""
        pairs = [(max(at, 0), min(at + size, end), at) for at, size, end in self._axes(place)]
        if any(last <= first for first, last, _ in pairs):
            return None
        inside = tuple(slice(first, last) for first, last, _ in pairs)
        return inside, tuple(slice(first - at, last - at) for first, last, at in pairs)

    def _axes(self, place):
        return zip(place, self.block_type.shape, self.view.shape, strict=True)


def load_box(descriptor, place, barrier, memory, pred=True):
    if not pred:
        return
    assert memory.shape == descriptor.block_type.shape
    memory.values.zero_()
    if overlap := descriptor.overlap(place):
        memory.values[overlap[1]] = descriptor.view[overlap[0]]
    barrier.pending -= descriptor.block_type.nbytes
    assert barrier.pending >= 0
    barrier.phases += barrier.pending == 0


def store_box(descriptor, place, memory):
    assert memory.shape == descriptor.block_type.shape
    assert all(at >= 0 for at in place)
    if overlap := descriptor.overlap(place):
        assert Program.zeroed or descriptor.view[overlap[0]].isnan().all(), "written twice"
        descriptor.view[overlap[0]] = memory.values[overlap[1]]


def expect(barrier, count, pred=True):
    if pred:
        assert barrier.pending == 0
        barrier.pending += count


def wait(barrier, phase):
    assert barrier.pending == 0
    assert barrier.phases > 0
    assert (barrier.phases - 1) % 2 == phase


class Pointer:
    def __init__(self, tensor, offset=0):
        self.tensor, self.offset = tensor, offset

    def __add__(self, offset):
        return Pointer(self.tensor, self.offset + offset)


def load(pointer, mask, other):
    index = torch.where(mask, pointer.offset, 0) + pointer.tensor.storage_offset()
    everything = torch.tensor([], dtype=pointer.tensor.dtype).set_(pointer.tensor.untyped_storage())
    return torch.where(mask, everything[index], other)


def allocate(dtype, shape, layout):
    if dtype == torch.int64:
        return Memory([Barrier() for _ in range(shape[0])], 0, shape)
    return Memory(torch.full((math.prod(shape),), torch.nan, dtype=torch.float64), 0, shape)


def multiply(a, b, sums, is_async):
    a, b = (each.values if isinstance(each, Memory) else each for each in (a, b))
    return sums + a @ b


def ceiling(a, b):
    return -(-a // b)


def launch(kernel, grid, *arguments, **options):
    """Run all programs of a grid, one after another."""
    assert all(count > 0 for count in grid)
    Program.grid = (*grid, 1, 1)[:3]
    arguments = [Pointer(each) if isinstance(each, torch.Tensor) else each for each in arguments]
    for place in itertools.product(*map(range, Program.grid)):
        Program.place = place
        kernel(*arguments, **options)


def fake_modules():
    """Return what the kernels import, by name."""
    gl = ModuleType("language")
    for name, value in {
        "constexpr": lambda value: value,
        "program_id": lambda axis: Number(Program.place[axis]),
        "num_programs": lambda axis: Program.grid[axis],
        "cdiv": ceiling,
        "minimum": min,
        "static_range": range,
        "zeros": lambda shape, dtype, layout: torch.zeros(shape, dtype=torch.float64),
        "arange": lambda first, last, layout: torch.arange(first, last),
        "expand_dims": torch.unsqueeze,
        "load": load,
        "allocate_shared_memory": allocate,
        "float32": torch.float64,
        "bfloat16": torch.float64,
        "int64": torch.int64,
    }.items():
        setattr(gl, name, value)
    gl.NVMMASharedLayout = gl.NVMMADistributedLayout = gl.SliceLayout = Layout
    nothing = lambda *_, **__: None  # noqa: E731
    hopper = ModuleType("hopper")
    hopper.fence_async_shared = nothing
    hopper.mbarrier = SimpleNamespace(MBarrierLayout=Layout, init=nothing, invalidate=nothing, expect=expect, wait=wait)
    hopper.tma = SimpleNamespace(
        async_copy_global_to_shared=load_box, async_copy_shared_to_global=store_box, store_wait=nothing
    )
    hopper.warpgroup_mma, hopper.warpgroup_mma_init = multiply, lambda sums: sums
    hopper.warpgroup_mma_wait = lambda pending, deps: deps[0] if len(deps) == 1 else deps
    triton, gluon, host = ModuleType("triton"), ModuleType("gluon"), ModuleType("host")
    triton.jit = lambda *given, **_: given[0] if given else (lambda kernel: kernel)
    triton.cdiv, triton.next_power_of_2 = ceiling, lambda n: 1 << (n - 1).bit_length()
    triton.language = MagicMock()
    gluon.jit, gluon.language, host.TensorDescriptor = (lambda kernel: kernel), gl, Descriptor
    above = SimpleNamespace(gluon=gluon)
    return {
        "triton": triton,
        "triton.language": triton.language,
        "triton.experimental": above,
        "triton.experimental.gluon": gluon,
        "triton.experimental.gluon.language": gl,
        "triton.experimental.gluon.language.nvidia": ModuleType("nvidia"),
        "triton.experimental.gluon.language.nvidia.hopper": hopper,
        "triton.experimental.gluon.nvidia": ModuleType("nvidia"),
        "triton.experimental.gluon.nvidia.hopper": host,
    }


def hopper_on_cpu(monkeypatch):
    """Return the module hopper.py as it computes on a CPU; afterwards the modules are as before."""
    package = importlib.import_module(KERNELS)
    for name in ("boxes", "convolution", "forked", "halo", "hopper", "launch"):
        monkeypatch.setattr(package, name, None, raising=False)  # so that it is restored, or removed, at the end
        monkeypatch.setitem(sys.modules, f"{KERNELS}.{name}", None)
        delattr(package, name)
        del sys.modules[f"{KERNELS}.{name}"]
    for name, module in fake_modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("hopper", "halo"):
        monkeypatch.setattr(importlib.import_module(f"{KERNELS}.{name}"), "launch", launch)
    empty = torch.empty

    def unwritten(*shape, **given):
        values = empty(*shape, **given)
        return values.fill_(torch.nan) if values.is_floating_point() else values

    monkeypatch.setattr(torch, "empty", unwritten)
    return sys.modules[f"{KERNELS}.hopper"]
