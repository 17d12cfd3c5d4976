"""Small kernels that the capture and API tests compile: plain SIMT code, and one TMA load."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass._mlir.dialects import llvm
from cutlass.cute.nvgpu import cpasync

THREADS = 64


@cute.kernel
def axpy_kernel(x: cute.Tensor, y: cute.Tensor, out: cute.Tensor, a: cutlass.Float32):
    i = cute.arch.block_idx()[0] * cute.arch.block_dim()[0] + cute.arch.thread_idx()[0]
    if i < cute.size(x):
        out[i] = (x[i].to(cutlass.Float32) * a + y[i].to(cutlass.Float32)).to(out.element_type)


@cute.kernel
def double_kernel(out: cute.Tensor):
    i = cute.arch.thread_idx()[0]
    if i < cute.size(out):
        out[i] = out[i] + out[i]


@cute.jit
def axpy(x: cute.Tensor, y: cute.Tensor, out: cute.Tensor, a: cutlass.Float32, stream):
    """One launch: ceil(n / 64) CTAs."""
    grid = (cute.ceil_div(cute.size(x), THREADS), 1, 1)
    axpy_kernel(x, y, out, a).launch(grid=grid, block=(THREADS, 1, 1), stream=stream)


@cute.jit
def axpy_then_double(x: cute.Tensor, y: cute.Tensor, out: cute.Tensor, a: cutlass.Float32, stream):
    """Three launches of two kernels, the last with shared memory and a cluster of two."""
    grid = (cute.ceil_div(cute.size(x), THREADS), 1, 1)
    axpy_kernel(x, y, out, a).launch(grid=grid, block=(THREADS, 1, 1), stream=stream)
    double_kernel(out).launch(grid=(1, 1, 1), block=(128, 1, 1), stream=stream)
    axpy_kernel(x, y, out, a).launch(
        grid=(4, 1, 1), block=(THREADS, 1, 1), cluster=(2, 1, 1), smem=1024, stream=stream
    )


@cute.jit
def launches_nothing(x: cute.Tensor):
    cute.printf("n = {}", cute.size(x))


@cute.jit
def scaled_by_constant(out: cute.Tensor, factor: cutlass.Constexpr[int], threads: cutlass.Int32):
    """`factor` is folded into the code, `threads` is a value of the launch."""
    factor_kernel(out, factor).launch(grid=(1, 1, 1), block=(threads, 1, 1))


@cute.kernel
def factor_kernel(out: cute.Tensor, factor: cutlass.Constexpr[int]):
    out[cute.arch.thread_idx()[0]] = cutlass.Float32(factor)


@dataclass(frozen=True)
class Doubler:
    """A launcher with parameters, as kernels with a plan are: equal ones compile to the same."""

    threads: int = 128

    @cute.jit
    def __call__(self, out: cute.Tensor, stream):
        double_kernel(out).launch(grid=(1, 1, 1), block=(self.threads, 1, 1), stream=stream)


class MutableDoubler:
    """The same without value semantics, leaving something on itself while it is traced."""

    def __init__(self, threads: int) -> None:
        self.threads = threads

    @cute.jit
    def __call__(self, out: cute.Tensor, stream):
        self.traced_dtype = out.element_type
        double_kernel(out).launch(grid=(1, 1, 1), block=(self.threads, 1, 1), stream=stream)

    @cute.jit
    def method(self, out: cute.Tensor, stream):
        double_kernel(out).launch(grid=(2, 1, 1), block=(self.threads, 1, 1), stream=stream)


@cute.jit
def pair(tensors: list[cute.Tensor]):
    """A list argument: the second tensor is written from the first."""
    axpy_kernel(tensors[0], tensors[0], tensors[1], 1.0).launch(
        grid=(1, 1, 1), block=(THREADS, 1, 1)
    )


TILE = (32, 64)


@cute.kernel
def tile_kernel(
    atom: cute.CopyAtom, src: cute.Tensor, dst: cute.Tensor, layout: cute.ComposedLayout
):
    tid, _, _ = cute.arch.thread_idx()
    smem = cutlass.memory.SmemAllocator()
    # (TILE_M, TILE_K), 128-byte swizzle
    tile = smem.allocate_tensor(dst.element_type, layout.outer, 128, swizzle=layout.inner)
    barrier = smem.allocate_array(cutlass.Int64, 1)
    if tid == 0:
        cute.arch.mbarrier_init(barrier, 1)
    cute.arch.mbarrier_init_fence()
    cute.arch.barrier()
    part_smem, part_src = cpasync.tma_partition(
        atom,
        0,
        cute.make_layout(1),
        cute.group_modes(tile, 0, 2),
        cute.group_modes(cute.local_tile(src, TILE, (0, 0)), 0, 2),
    )
    if tid == 0:
        cute.arch.mbarrier_arrive_and_expect_tx(barrier, TILE[0] * TILE[1] * 2)
        cute.copy(atom, part_src, part_smem, tma_bar_ptr=barrier)
    cute.arch.mbarrier_wait(barrier, 0)
    if tid < TILE[0]:
        dst[tid] = tile[tid, 3]


@cute.jit
def load_tile(src: cute.Tensor, dst: cute.Tensor, stream):
    """Loads the first 32 x 64 tile of `src` (m, k) by TMA; `dst` gets its column 3."""
    layout = cute.nvgpu.warpgroup.make_smem_layout_atom(
        cute.nvgpu.warpgroup.SmemLayoutAtomKind.K_SW128, src.element_type
    )
    layout = cute.tile_to_shape(layout, TILE, (0, 1))
    atom, tma_src = cpasync.make_tiled_tma_atom(
        cpasync.CopyBulkTensorTileG2SOp(), src, layout, TILE
    )
    tile_kernel(atom, tma_src, dst, layout).launch(
        grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream
    )


@cute.jit
def double_all(out: cute.Tensor):
    double_kernel(out).launch(grid=(1, 1, 1), block=(128, 1, 1))


@cute.kernel
def double_pointer_kernel(out: cute.Pointer, n: cutlass.Int32):
    i = cute.arch.thread_idx()[0]
    if i < n:
        place = out + i
        place.store(place.load() * 2)


@cute.jit
def double_by_pointer(out: cute.Pointer, n: cutlass.Int32):
    double_pointer_kernel(out, n).launch(grid=(1, 1, 1), block=(128, 1, 1))


@cute.kernel
def double_beyond_kernel(out: cute.Tensor):
    i = cute.arch.thread_idx()[0]
    out[i] = out[i] * 2


@cute.jit
def doubles_beyond(out: cute.Tensor):
    """128 threads whatever the tensor's size: wrong for fewer elements."""
    double_beyond_kernel(out).launch(grid=(1, 1, 1), block=(128, 1, 1))


@cute.kernel
def double_rows_kernel(out: cute.Tensor):
    i = cute.arch.thread_idx()[0]
    for j in range(cute.size(out, mode=[1])):
        out[i, j] = out[i, j] * 2


@cute.jit
def double_rows(out: cute.Tensor):
    double_rows_kernel(out).launch(grid=(1, 1, 1), block=(cute.size(out, mode=[0]), 1, 1))


@cute.kernel
def through_shared_kernel(x: cute.Tensor, out: cute.Tensor, used: cutlass.Constexpr[bool]):
    """Threads beyond the data load what nobody wrote; `used`: and their neighbours use it."""
    shared = cutlass.utils.SmemAllocator().allocate_tensor(
        cutlass.Float32, cute.make_layout(128), byte_alignment=16
    )
    i = cute.arch.thread_idx()[0]
    n = cute.size(x)
    if i < n:
        shared[i] = x[i]
    cute.arch.sync_threads()
    value = cute.arch.shuffle_sync(shared[i + 1 if used else i], cute.arch.lane_idx())
    if i < n:
        out[i] = value + 1.0


@cute.jit
def through_shared(x: cute.Tensor, out: cute.Tensor, used: cutlass.Constexpr[bool]):
    through_shared_kernel(x, out, used).launch(grid=(1, 1, 1), block=(64, 1, 1))


@cute.kernel
def breakpoint_kernel(out: cute.Tensor):
    llvm.inline_asm(
        None, [], "brkpt;", "", has_side_effects=True, asm_dialect=llvm.AsmDialect.AD_ATT
    )
    out[0] = 1.0


@cute.jit
def breaks(out: cute.Tensor):
    """With an instruction that the emulator does not model."""
    breakpoint_kernel(out).launch(grid=(1, 1, 1), block=(32, 1, 1))
