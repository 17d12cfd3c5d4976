"""Kernels as users of CuTe DSL write them: one thread an element, rows, reductions, tables.

Nothing here is tuned; what matters is that each uses the language in its own way.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, Uint64
from cutlass.memory import SmemAllocator

THREADS = 128
WARPS = THREADS // 32


@cute.jit
def warp_sum(value):
    for step in cutlass.range_constexpr(5):
        value += cute.arch.shuffle_sync_bfly(value, offset=1 << step)
    return value


@cute.jit
def block_sum(value, scratch: cute.Tensor):
    """Sum over the block's threads, in all of them."""
    tid = cute.arch.thread_idx()[0]
    value = warp_sum(value)
    if tid % 32 == 0:
        scratch[tid // 32] = value
    cute.arch.sync_threads()
    total = Float32(0.0)
    for i in cutlass.range_constexpr(WARPS):
        total += scratch[i]
    cute.arch.sync_threads()
    return total


# -- elementwise ---------------------------------------------------------------------------------


@cute.kernel
def map_kernel(x: cute.Tensor, y: cute.Tensor, out: cute.Tensor, f: cutlass.Constexpr):
    i = cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0]
    if i < cute.size(out):
        out[i] = f(x[i], y[i]).to(out.element_type)


@cute.jit
def elementwise(x: cute.Tensor, y: cute.Tensor, out: cute.Tensor, f: cutlass.Constexpr):
    grid = (cute.ceil_div(cute.size(out), THREADS), 1, 1)
    map_kernel(x, y, out, f).launch(grid=grid, block=(THREADS, 1, 1))


@cute.kernel
def vector_kernel(x: cute.Tensor, y: cute.Tensor, out: cute.Tensor, f: cutlass.Constexpr):
    i = cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0]
    parts = [cute.local_tile(t, (8,), (i,)) for t in (x, y, out)]
    parts[2].store(f(parts[0].load(), parts[1].load()).to(out.element_type))


@cute.jit
def vectorised(x: cute.Tensor, y: cute.Tensor, out: cute.Tensor, f: cutlass.Constexpr):
    """Eight elements a thread, as one vector."""
    grid = (cute.size(out) // (8 * THREADS), 1, 1)
    vector_kernel(x, y, out, f).launch(grid=grid, block=(THREADS, 1, 1))


# -- rows ----------------------------------------------------------------------------------------


@cute.kernel
def rms_norm_kernel(x: cute.Tensor, w: cute.Tensor, out: cute.Tensor, eps: Float32):
    tid, row = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
    n = cute.size(x, mode=[1])
    scratch = SmemAllocator().allocate_tensor(Float32, cute.make_layout(WARPS), 16)
    total = Float32(0.0)
    for i in cutlass.range(tid, n, THREADS):
        v = x[row, i].to(Float32)
        total += v * v
    scale = cute.math.rsqrt(block_sum(total, scratch) / n + eps)
    for i in cutlass.range(tid, n, THREADS):
        out[row, i] = (x[row, i].to(Float32) * scale * w[i].to(Float32)).to(out.element_type)


@cute.jit
def rms_norm(x: cute.Tensor, w: cute.Tensor, out: cute.Tensor, eps: Float32):
    grid = (cute.size(x, mode=[0]), 1, 1)
    rms_norm_kernel(x, w, out, eps).launch(grid=grid, block=(THREADS, 1, 1))


@cute.kernel
def layer_norm_kernel(
    x: cute.Tensor, w: cute.Tensor, b: cute.Tensor, out: cute.Tensor, eps: Float32
):
    tid, row = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
    n = cute.size(x, mode=[1])
    scratch = SmemAllocator().allocate_tensor(Float32, cute.make_layout(WARPS), 16)
    total = Float32(0.0)
    for i in cutlass.range(tid, n, THREADS):
        total += x[row, i].to(Float32)
    mean = block_sum(total, scratch) / n
    total = Float32(0.0)
    for i in cutlass.range(tid, n, THREADS):
        v = x[row, i].to(Float32) - mean
        total += v * v
    scale = cute.math.rsqrt(block_sum(total, scratch) / n + eps)
    for i in cutlass.range(tid, n, THREADS):
        v = (x[row, i].to(Float32) - mean) * scale
        out[row, i] = (v * w[i].to(Float32) + b[i].to(Float32)).to(out.element_type)


@cute.jit
def layer_norm(x: cute.Tensor, w: cute.Tensor, b: cute.Tensor, out: cute.Tensor, eps: Float32):
    grid = (cute.size(x, mode=[0]), 1, 1)
    layer_norm_kernel(x, w, b, out, eps).launch(grid=grid, block=(THREADS, 1, 1))


@cute.kernel
def softmax_kernel(x: cute.Tensor, out: cute.Tensor):
    """A warp a row; maximum and sum kept online."""
    lane, row = cute.arch.lane_idx(), cute.arch.block_idx()[0]
    n = cute.size(x, mode=[1])
    most, total = -Float32.inf, Float32(0.0)
    for i in cutlass.range(lane, n, 32):
        v = x[row, i].to(Float32)
        larger = cute.arch.fmax(most, v)
        total = total * cute.math.exp(most - larger) + cute.math.exp(v - larger)
        most = larger
    for step in cutlass.range_constexpr(5):
        other = cute.arch.shuffle_sync_bfly(most, offset=1 << step)
        more = cute.arch.shuffle_sync_bfly(total, offset=1 << step)
        larger = cute.arch.fmax(most, other)
        total = total * cute.math.exp(most - larger) + more * cute.math.exp(other - larger)
        most = larger
    for i in cutlass.range(lane, n, 32):
        out[row, i] = (cute.math.exp(x[row, i].to(Float32) - most) / total).to(out.element_type)


@cute.jit
def softmax(x: cute.Tensor, out: cute.Tensor):
    softmax_kernel(x, out).launch(grid=(cute.size(x, mode=[0]), 1, 1), block=(32, 1, 1))


@cute.kernel
def argmax_kernel(x: cute.Tensor, out: cute.Tensor):
    """The first largest element of a row; value and index travel together."""
    lane, row = cute.arch.lane_idx(), cute.arch.block_idx()[0]
    best, at = -Float32.inf, Int32(0)
    for i in cutlass.range(lane, cute.size(x, mode=[1]), 32):
        v = x[row, i].to(Float32)
        if v > best:
            best, at = v, i
    for step in cutlass.range_constexpr(5):
        value = cute.arch.shuffle_sync_down(best, offset=16 >> step)
        index = cute.arch.shuffle_sync_down(at, offset=16 >> step)
        if value > best or (value == best and index < at):
            best, at = value, index
    if lane == 0:
        out[row] = Int64(at)


@cute.jit
def argmax(x: cute.Tensor, out: cute.Tensor):
    argmax_kernel(x, out).launch(grid=(cute.size(x, mode=[0]), 1, 1), block=(32, 1, 1))


@cute.kernel
def top_k_kernel(x: cute.Tensor, values: cute.Tensor, indices: cute.Tensor, k: cutlass.Constexpr):
    """A thread a row; the list is a register array that is indexed by a variable."""
    row = cute.arch.block_idx()[0] * 32 + cute.arch.thread_idx()[0]
    if row < cute.size(x, mode=[0]):
        kept = cute.make_rmem_tensor(k, Float32)
        where = cute.make_rmem_tensor(k, Int32)
        kept.fill(-Float32.inf)
        where.fill(-1)
        for i in cutlass.range(cute.size(x, mode=[1])):
            v = x[row, i].to(Float32)
            if v > kept[k - 1]:
                at = Int32(k - 1)
                go = at > 0
                while go:
                    if kept[at - 1] < v:
                        kept[at] = kept[at - 1]
                        where[at] = where[at - 1]
                        at -= 1
                        go = at > 0
                    else:
                        go = False
                kept[at] = v
                where[at] = i
        for j in cutlass.range(k):
            values[row, j] = kept[j].to(values.element_type)
            indices[row, j] = where[j]


@cute.jit
def top_k(x: cute.Tensor, values: cute.Tensor, indices: cute.Tensor, k: cutlass.Constexpr):
    grid = (cute.ceil_div(cute.size(x, mode=[0]), 32), 1, 1)
    top_k_kernel(x, values, indices, k).launch(grid=grid, block=(32, 1, 1))


# -- across threads ------------------------------------------------------------------------------


@cute.kernel
def transpose_kernel(x: cute.Tensor, out: cute.Tensor):
    """32 by 32 tiles through shared memory, a column of padding."""
    tx, ty, _ = cute.arch.thread_idx()
    bx, by, _ = cute.arch.block_idx()
    tile = SmemAllocator().allocate_tensor(
        x.element_type, cute.make_layout((32, 32), stride=(33, 1)), 16
    )
    rows, columns = cute.size(x, mode=[0]), cute.size(x, mode=[1])
    for k in cutlass.range_constexpr(0, 32, 8):
        if by * 32 + ty + k < rows and bx * 32 + tx < columns:
            tile[ty + k, tx] = x[by * 32 + ty + k, bx * 32 + tx]
    cute.arch.sync_threads()
    for k in cutlass.range_constexpr(0, 32, 8):
        if bx * 32 + ty + k < columns and by * 32 + tx < rows:
            out[bx * 32 + ty + k, by * 32 + tx] = tile[tx, ty + k]


@cute.jit
def transpose(x: cute.Tensor, out: cute.Tensor):
    grid = (
        cute.ceil_div(cute.size(x, mode=[1]), 32),
        cute.ceil_div(cute.size(x, mode=[0]), 32),
        1,
    )
    transpose_kernel(x, out).launch(grid=grid, block=(32, 8, 1))


@cute.kernel
def scan_kernel(x: cute.Tensor, out: cute.Tensor):
    """Inclusive sum over a block: within warps by shuffles, over warps through shared memory."""
    tid = cute.arch.thread_idx()[0]
    lane = cute.arch.lane_idx()
    totals = SmemAllocator().allocate_tensor(Int32, cute.make_layout(WARPS), 16)
    value = Int32(x[tid])
    for step in cutlass.range_constexpr(5):
        below = cute.arch.shuffle_sync_up(value, offset=1 << step, mask_and_clamp=0)
        if lane >= 1 << step:
            value += below
    if lane == 31:
        totals[tid // 32] = value
    cute.arch.sync_threads()
    for w in cutlass.range_constexpr(WARPS):
        if w < tid // 32:
            value += totals[w]
    out[tid] = value


@cute.jit
def scan(x: cute.Tensor, out: cute.Tensor):
    scan_kernel(x, out).launch(grid=(1, 1, 1), block=(THREADS, 1, 1))


@cute.kernel
def histogram_kernel(x: cute.Tensor, out: cute.Tensor, bins: cutlass.Constexpr):
    """Counted in shared memory, then added to global memory."""
    tid = cute.arch.thread_idx()[0]
    counts = SmemAllocator().allocate_tensor(Int32, cute.make_layout(bins), 16)
    for i in cutlass.range(tid, bins, THREADS):
        counts[i] = 0
    cute.arch.sync_threads()
    first = cute.arch.block_idx()[0] * 512
    for i in cutlass.range(tid, 512, THREADS):
        if first + i < cute.size(x):
            cute.arch.atomic_add((counts.iterator + Int32(x[first + i])).llvm_ptr, Int32(1))
    cute.arch.sync_threads()
    for i in cutlass.range(tid, bins, THREADS):
        if counts[i] > 0:
            cute.arch.atomic_add((out.iterator + i).llvm_ptr, counts[i])


@cute.jit
def histogram(x: cute.Tensor, out: cute.Tensor, bins: cutlass.Constexpr):
    grid = (cute.ceil_div(cute.size(x), 512), 1, 1)
    histogram_kernel(x, out, bins).launch(grid=grid, block=(THREADS, 1, 1))


@cute.kernel
def bitonic_kernel(x: cute.Tensor, out: cute.Tensor):
    """Each warp sorts 32 integers by shuffles."""
    tid = cute.arch.thread_idx()[0]
    lane = cute.arch.lane_idx()
    value = Int32(x[tid])
    for k in cutlass.range_constexpr(1, 6):
        for j in cutlass.range_constexpr(k):
            step = 1 << (k - 1 - j)
            other = cute.arch.shuffle_sync_bfly(value, offset=step)
            rising = (lane & (1 << k)) == 0
            lower = (lane & step) == 0
            value = min(value, other) if rising == lower else max(value, other)
    out[tid] = value


@cute.jit
def bitonic_sort(x: cute.Tensor, out: cute.Tensor):
    bitonic_kernel(x, out).launch(grid=(1, 1, 1), block=(THREADS, 1, 1))


@cute.kernel
def matmul_kernel(a: cute.Tensor, b: cute.Tensor, c: cute.Tensor):
    """16 by 16 tiles of both factors in shared memory, ordinary multiply-adds."""
    tx, ty, _ = cute.arch.thread_idx()
    bx, by, _ = cute.arch.block_idx()
    smem = SmemAllocator()
    sa = smem.allocate_tensor(a.element_type, cute.make_layout((16, 16), stride=(16, 1)), 16)
    sb = smem.allocate_tensor(b.element_type, cute.make_layout((16, 16), stride=(17, 1)), 16)
    total = Float32(0.0)
    for k in cutlass.range(0, cute.size(a, mode=[1]), 16):
        sa[ty, tx] = a[by * 16 + ty, k + tx]
        sb[ty, tx] = b[k + ty, bx * 16 + tx]
        cute.arch.sync_threads()
        for i in cutlass.range_constexpr(16):
            total += sa[ty, i].to(Float32) * sb[i, tx].to(Float32)
        cute.arch.sync_threads()
    c[by * 16 + ty, bx * 16 + tx] = total


@cute.jit
def matmul(a: cute.Tensor, b: cute.Tensor, c: cute.Tensor):
    grid = (cute.size(c, mode=[1]) // 16, cute.size(c, mode=[0]) // 16, 1)
    matmul_kernel(a, b, c).launch(grid=grid, block=(16, 16, 1))


# -- tables, indices, bits -------------------------------------------------------------------------


@cute.kernel
def gather_kernel(table: cute.Tensor, index: cute.Tensor, out: cute.Tensor):
    """An embedding: row ``index[i]`` (64-bit, negative counts from the end) of the table."""
    row = Int64(index[cute.arch.block_idx()[0]])
    if row < 0:
        row += cute.size(table, mode=[0])
    for i in cutlass.range(cute.arch.thread_idx()[0], cute.size(table, mode=[1]), 32):
        out[cute.arch.block_idx()[0], i] = table[row, i]


@cute.jit
def gather(table: cute.Tensor, index: cute.Tensor, out: cute.Tensor):
    gather_kernel(table, index, out).launch(grid=(cute.size(index), 1, 1), block=(32, 1, 1))


@cute.kernel
def scatter_add_kernel(x: cute.Tensor, index: cute.Tensor, out: cute.Tensor):
    i = cute.arch.block_idx()[0] * 32 + cute.arch.thread_idx()[0]
    if i < cute.size(x):
        cute.arch.atomic_add((out.iterator + index[i]).llvm_ptr, x[i])


@cute.jit
def scatter_add(x: cute.Tensor, index: cute.Tensor, out: cute.Tensor):
    grid = (cute.ceil_div(cute.size(x), 32), 1, 1)
    scatter_add_kernel(x, index, out).launch(grid=grid, block=(32, 1, 1))


@cute.kernel
def lower_bound_kernel(table: cute.Tensor, x: cute.Tensor, out: cute.Tensor):
    """Binary search, each thread for as long as it needs."""
    i = cute.arch.thread_idx()[0]
    low, high = Int32(0), Int32(cute.size(table))
    while low < high:
        middle = (low + high) // 2
        if table[middle] < x[i]:
            low = middle + 1
        else:
            high = middle
    out[i] = low


@cute.jit
def lower_bound(table: cute.Tensor, x: cute.Tensor, out: cute.Tensor):
    lower_bound_kernel(table, x, out).launch(grid=(1, 1, 1), block=(cute.size(x), 1, 1))


@cute.jit
def philox(counter, key, rounds: cutlass.Constexpr):
    """Philox2x32 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011)."""
    left, right = Uint32(counter), Uint32(0)
    for _ in cutlass.range_constexpr(rounds):
        product = Uint64(0xD256D193) * Uint64(left)
        left, right = Uint32(product >> 32) ^ key ^ right, Uint32(product)
        key += Uint32(0x9E3779B9)
    return left


@cute.kernel
def dropout_kernel(x: cute.Tensor, out: cute.Tensor, p: Float32, seed: Uint32):
    i = cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0]
    if i < cute.size(x):
        uniform = Float32(philox(i, seed, 10) >> 8) * Float32(2.0**-24)
        kept = x[i].to(Float32) / (1.0 - p)
        out[i] = (kept if uniform >= p else Float32(0.0)).to(out.element_type)


@cute.jit
def dropout(x: cute.Tensor, out: cute.Tensor, p: Float32, seed: Uint32):
    grid = (cute.ceil_div(cute.size(x), THREADS), 1, 1)
    dropout_kernel(x, out, p, seed).launch(grid=grid, block=(THREADS, 1, 1))


@cute.kernel
def quantise_kernel(x: cute.Tensor, out: cute.Tensor, scale: cute.Tensor):
    """int8, a scale a row: the largest magnitude becomes 127."""
    tid, row = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
    n = cute.size(x, mode=[1])
    most = Float32(0.0)
    for i in cutlass.range(tid, n, 32):
        v = x[row, i].to(Float32)
        most = cute.arch.fmax(most, cute.arch.fmax(v, -v))
    for step in cutlass.range_constexpr(5):
        most = cute.arch.fmax(most, cute.arch.shuffle_sync_bfly(most, offset=1 << step))
    inverse = 127.0 / most
    for i in cutlass.range(tid, n, 32):
        q = cute.math.roundeven(x[row, i].to(Float32) * inverse)
        out[row, i] = Int32(q).to(out.element_type)
    if tid == 0:
        scale[row] = most / 127.0


@cute.jit
def quantise(x: cute.Tensor, out: cute.Tensor, scale: cute.Tensor):
    quantise_kernel(x, out, scale).launch(grid=(cute.size(x, mode=[0]), 1, 1), block=(32, 1, 1))


@cute.kernel
def rope_kernel(x: cute.Tensor, out: cute.Tensor, base: Float32):
    """Rotary embedding of (seqlen, head_dim): angles by pow, sin and cos."""
    half = cute.size(x, mode=[1]) // 2
    i, t = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
    if i < half:
        angle = Float32(t) * cute.math.pow(base, -Float32(i) / Float32(half))
        s, c = cute.math.sin(angle), cute.math.cos(angle)
        u, v = x[t, i].to(Float32), x[t, i + half].to(Float32)
        out[t, i] = (u * c - v * s).to(out.element_type)
        out[t, i + half] = (v * c + u * s).to(out.element_type)


@cute.jit
def rope(x: cute.Tensor, out: cute.Tensor, base: Float32):
    rope_kernel(x, out, base).launch(grid=(cute.size(x, mode=[0]), 1, 1), block=(32, 1, 1))


@cute.kernel
def say_kernel(x: cute.Tensor):
    tid = cute.arch.thread_idx()[0]
    if tid < 2:
        cute.printf("x[{}] = {}, {} of {}", tid, x[tid], Int64(tid) + (1 << 40), x.shape[0])


@cute.jit
def say(x: cute.Tensor):
    say_kernel(x).launch(grid=(1, 1, 1), block=(32, 1, 1))


@cute.kernel
def staged_kernel(x: cute.Tensor, out: cute.Tensor):
    """cp.async into shared memory, read back in reverse."""
    tid = cute.arch.thread_idx()[0]
    stage = SmemAllocator().allocate_tensor(x.element_type, cute.make_layout(4 * THREADS), 16)
    atom = cute.make_copy_atom(
        cute.nvgpu.cpasync.CopyG2SOp(), x.element_type, num_bits_per_copy=128
    )
    cute.copy(atom, cute.local_tile(x, (4,), (tid,)), cute.local_tile(stage, (4,), (tid,)))
    cute.arch.cp_async_commit_group()
    cute.arch.cp_async_wait_group(0)
    cute.arch.sync_threads()
    for i in cutlass.range_constexpr(4):
        out[tid * 4 + i] = stage[4 * THREADS - 1 - (tid * 4 + i)]


@cute.jit
def staged_reverse(x: cute.Tensor, out: cute.Tensor):
    staged_kernel(x, out).launch(grid=(1, 1, 1), block=(THREADS, 1, 1))
