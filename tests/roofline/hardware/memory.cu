// SPDX-License-Identifier: Apache-2.0
// Memory of a Hopper GPU seen from its SMs, in cycles of the SM:
//
//     nvcc -gencode=arch=compute_90a,code=sm_90a -O3 -std=c++17 -o memory memory.cu && ./memory
//
// prints CSV: quantity,value,unit. Nothing here loads the tensor cores, so the SM clock stays at
// its maximum and L2's own clock with it. L2: tiles of 16 MiB read before. HBM: of 8 GiB, each once.

#include "bench.cuh"

constexpr int TILE = 128 * 128;  // bytes: 128 rows of 64 bf16, the widest box with 128-byte swizzle
constexpr size_t L2_ROWS = 1 << 17, HBM_ROWS = 1 << 26;  // of 128 bytes
constexpr int DEPTH = 12, TILES = 384;

int sms;

// ------------------------------------------------------------------------ TMA

// The tiles a CTA goes through, from its own part of all on, without a division for each: that
// would take longer than a tile.
struct Walk {
  int at, tiles;
  __device__ Walk(int part, int parts, int tiles) : at(part * (tiles / parts)), tiles(tiles) {}
  __device__ int next() {
    int tile = at;
    if (++at == tiles) at = 0;
    return tile;
  }
};

// A slot of a ring and how often it has come round.
struct Slot {
  int index = 0, turn = 0, depth;
  __device__ Slot(int depth) : depth(depth) {}
  __device__ void next() {
    if (++index == depth) index = 0, ++turn;
  }
};

__device__ void load(const CUtensorMap* map, unsigned to, unsigned bar, int row) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], "
      "[%4];" ::"r"(to), "l"(map), "r"(0), "r"(row), "r"(bar) : "memory");
}

__device__ void load_multicast(const CUtensorMap* map, unsigned to, unsigned bar, int row, int mask) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to), "l"(map), "r"(0), "r"(row), "r"(bar), "h"((short)mask)
      : "memory");
}

// One thread of each CTA keeps `depth` tiles in flight; out[CTA] = cycles for all TILES of it.
// sharers: as many CTAs after one another read the same tiles, more or less in step.
__global__ void tma_stream(const __grid_constant__ CUtensorMap map, int box, int tiles, int sharers,
                           int depth, long long* out) {
  extern __shared__ __align__(1024) char raw[];
  __shared__ unsigned long long bars[DEPTH];
  unsigned smem = (shared_address(raw) + 1023) / 1024 * 1024, bar = shared_address(bars);
  if (threadIdx.x) return;
  for (int i = 0; i < depth; ++i) mbarrier_init(bar + 8 * i, 1);
  asm volatile("fence.proxy.async;" ::: "memory");
  Walk walk(blockIdx.x / sharers, (gridDim.x + sharers - 1) / sharers, tiles);
  Slot slot(depth);
  long long start = clock64();
  for (int k = 0; k < TILES + depth; ++k, slot.next()) {
    unsigned full = bar + 8 * slot.index;
    if (slot.turn) mbarrier_wait(full, (slot.turn - 1) & 1);
    if (k >= TILES) continue;
    mbarrier_expect(full, box * 128);
    load(&map, smem + slot.index * TILE, full, walk.next() * box);
  }
  out[blockIdx.x] = clock64() - start;
}

// Clusters of two: each CTA loads half of every tile, for both.
__global__ void __cluster_dims__(2, 1, 1)
    tma_multicast(const __grid_constant__ CUtensorMap map, int tiles, int depth, long long* out) {
  extern __shared__ __align__(1024) char raw[];
  __shared__ unsigned long long full[DEPTH], empty[DEPTH];
  unsigned smem = (shared_address(raw) + 1023) / 1024 * 1024, rank = cluster_rank();
  if (threadIdx.x == 0)
    for (int i = 0; i < depth; ++i) {
      mbarrier_init(shared_address(&full[i]), 1);
      mbarrier_init(shared_address(&empty[i]), 2);
    }
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  cluster_sync();
  if (threadIdx.x == 0) {
    Walk walk(blockIdx.x / 2, gridDim.x / 2, tiles);
    Slot slot(depth);
    long long start = clock64();
    for (int k = 0; k < TILES + depth; ++k, slot.next()) {
      unsigned bar = shared_address(&full[slot.index]), free = shared_address(&empty[slot.index]);
      if (slot.turn) {
        mbarrier_wait(bar, (slot.turn - 1) & 1);
        for (int cta = 0; cta < 2; ++cta)
          asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(mapa(free, cta)) : "memory");
      }
      if (k >= TILES) continue;
      mbarrier_expect(bar, TILE);
      if (slot.turn) mbarrier_wait(free, (slot.turn - 1) & 1);
      unsigned to = smem + slot.index * TILE + rank * TILE / 2;
      load_multicast(&map, to, bar, walk.next() * 128 + rank * 64, 3);
    }
    out[blockIdx.x] = clock64() - start;
  }
  cluster_sync();
}

// One tile at a time: from before expect_tx to the wait's end.
__global__ void tma_latency(const __grid_constant__ CUtensorMap map, int box, int tiles, int stride,
                            int copies, long long* out) {
  extern __shared__ __align__(1024) char raw[];
  __shared__ unsigned long long bars[1];
  unsigned smem = (shared_address(raw) + 1023) / 1024 * 1024, bar = shared_address(bars);
  if (threadIdx.x) return;
  mbarrier_init(bar, 1);
  asm volatile("fence.proxy.async;" ::: "memory");
  for (int k = 0; k < 64; ++k) {
    int row = (int)(((long long)blockIdx.x * 64 + k) * stride % tiles) * box;
    long long start = clock64();
    mbarrier_expect(bar, copies * box * 128);
    for (int c = 0; c < copies; ++c) load(&map, smem + c * TILE, bar, row);
    mbarrier_wait(bar, k & 1);
    long long end = clock64();
    out[blockIdx.x * 64 + k] = end - start;
    while (clock64() - end < 1500) {}
  }
}

// Stores of tiles by one thread a CTA, `depth` groups in flight; read: waits for SMEM alone.
__global__ void tma_store(const __grid_constant__ CUtensorMap map, int tiles, int depth, bool read,
                          long long* out) {
  extern __shared__ __align__(1024) char raw[];
  unsigned smem = (shared_address(raw) + 1023) / 1024 * 1024;
  if (threadIdx.x) return;
  asm volatile("fence.proxy.async;" ::: "memory");
  Walk walk(blockIdx.x, gridDim.x, tiles);
  long long start = clock64();
  for (int k = 0; k < TILES; ++k) {
    int row = walk.next() * 128;
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(&map),
                 "r"(0), "r"(row), "r"(smem + k % 8 * TILE) : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    if (depth == 1 && read) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
    if (depth == 1 && !read) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    if (depth > 1) asm volatile("cp.async.bulk.wait_group.read 3;" ::: "memory");
  }
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  out[blockIdx.x] = clock64() - start;
}

CUtensorMap tensor_map(void* data, size_t rows, int box) {
  static decltype(&cuTensorMapEncodeTiled) encode = nullptr;  // without linking libcuda
  cudaDriverEntryPointQueryResult found;
  if (!encode)
    CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", (void**)&encode, 12000,
                                           cudaEnableDefault, &found));
  CUtensorMap map;
  cuuint64_t dims[2] = {64, rows}, strides[1] = {128};
  cuuint32_t shape[2] = {64, (cuuint32_t)box}, element[2] = {1, 1};
  CHECK(encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, data, dims, strides, shape, element,
               CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
               CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE));
  return map;
}

template <class Kernel>
Kernel* roomy(Kernel* kernel) {
  CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, DEPTH * TILE + 1024));
  return kernel;
}

constexpr int ROOM = DEPTH * TILE + 1024;

double slowest(long long* out, int ctas) {
  std::vector<long long> spans = fetch(out, ctas);
  return *std::max_element(spans.begin(), spans.end());
}

void stream(const char* what, void* data, size_t rows, int box, int sharers, int depth, int ctas) {
  long long* out = words(ctas);
  CUtensorMap map = tensor_map(data, rows, box);
  int warm = rows == L2_ROWS ? 2 : 0;
  for (int k = 0; k <= warm; ++k)
    roomy(tma_stream)<<<ctas, 32, ROOM>>>(map, box, rows / box, sharers, depth, out);
  char text[128];
  snprintf(text, sizeof text, "TMA load %s: %d CTAs; each tile by %d; %dx64 boxes; %d in flight", what, ctas,
           sharers, box, depth);
  row(text, (double)TILES * box * 128 / slowest(out, ctas), "B/clk/SM");
  CHECK(cudaFree(out));
}

void latency(const char* what, void* data, size_t rows, int box, int copies, int ctas) {
  long long* out = words(ctas * 64);
  CUtensorMap map = tensor_map(data, rows, box);
  int warm = rows == L2_ROWS ? 3 : 0, stride = rows == L2_ROWS ? 1 : 977;
  for (int k = 0; k <= warm; ++k)
    roomy(tma_latency)<<<ctas, 32, ROOM>>>(map, box, rows / box, stride, copies, out);
  std::vector<long long> spans = fetch(out, ctas * 64);
  char text[128];
  snprintf(text, sizeof text, "TMA latency %s: %d CTAs; %d of %dx64", what, ctas, copies, box);
  row(text, median({spans.begin(), spans.end()}), "clk");
  std::vector<double> firsts;  // of each CTA: the tensor map is not in the SM's cache yet
  for (int cta = 0; cta < ctas; ++cta) firsts.push_back(spans[cta * 64]);
  snprintf(text, sizeof text, "TMA latency %s: %d CTAs; %d of %dx64; a CTA's first", what, ctas, copies, box);
  row(text, median(firsts), "clk");
  CHECK(cudaFree(out));
}

void tma(void* data) {
  for (int box : {8, 64, 128})
    for (int ctas : {1, sms}) {
      latency("from L2", data, L2_ROWS, box, 1, ctas);
      latency("from HBM", (char*)data + ((size_t)1 << 32), HBM_ROWS / 2, box, 1, ctas);
    }
  latency("from L2", data, L2_ROWS, 128, 2, 1);
  latency("from L2", data, L2_ROWS, 128, 4, 1);
  latency("from L2", data, L2_ROWS, 128, 2, sms);
  latency("from L2", data, L2_ROWS, 128, 4, sms);
  for (int depth : {1, 2, 4, 8, 12}) stream("from L2", data, L2_ROWS, 128, 1, depth, sms);
  for (int depth : {4, 12}) stream("from L2", data, L2_ROWS, 64, 1, depth, sms);
  for (int ctas : {1, 16, 66}) stream("from L2", data, L2_ROWS, 128, 1, 12, ctas);
  for (int sharers : {2, 4, 12, sms})
    for (int depth : {2, 4, 12}) stream("from L2", data, L2_ROWS, 128, sharers, depth, sms);
  for (int depth : {2, 4, 12}) stream("from HBM", data, HBM_ROWS, 128, 1, depth, sms);
  long long* out = words(sms);
  CUtensorMap half = tensor_map(data, L2_ROWS, 64), whole = tensor_map(data, L2_ROWS, 128);
  for (int depth : {1, 2, 4, 12}) {
    for (int k = 0; k < 3; ++k)
      roomy(tma_multicast)<<<sms, 32, ROOM>>>(half, L2_ROWS / 128, depth, out);
    char text[128];
    snprintf(text, sizeof text, "TMA multicast to 2 from L2: %d CTAs; 64x64 boxes; %d tiles of 128x64 in flight",
             sms, depth);
    row(text, (double)TILES * TILE / slowest(out, sms), "B/clk/SM");
  }
  for (int ctas : {1, sms}) {
    char text[128];
    for (bool read : {true, false}) {
      roomy(tma_store)<<<ctas, 32, ROOM>>>(whole, L2_ROWS / 128, 1, read, out);
      snprintf(text, sizeof text, "TMA store of 128x64 to wait_group%s 0: %d CTAs", read ? ".read" : "", ctas);
      row(text, slowest(out, ctas) / TILES, "clk");
    }
    roomy(tma_store)<<<ctas, 32, ROOM>>>(whole, L2_ROWS / 128, 4, true, out);
    snprintf(text, sizeof text, "TMA store to L2: %d CTAs; 128x64 boxes; 4 in flight", ctas);
    row(text, (double)TILES * TILE / slowest(out, ctas), "B/clk/SM");
  }
  CHECK(cudaFree(out));
}

// ------------------------------------------------------------------------ loads of threads

__global__ void __launch_bounds__(512) read_all(const int4* data, size_t count, int rounds, int* sink) {
  constexpr int BATCH = 4;  // loads in flight a thread
  int4 sum = {0, 0, 0, 0}, x[BATCH];
  size_t step = (size_t)gridDim.x * blockDim.x, first = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
  for (int r = 0; r < rounds; ++r)
    for (size_t i = first; i + (BATCH - 1) * step < count; i += BATCH * step) {
#pragma unroll
      for (int j = 0; j < BATCH; ++j)
        asm volatile("ld.global.cg.v4.b32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(x[j].x), "=r"(x[j].y), "=r"(x[j].z), "=r"(x[j].w) : "l"(data + i + j * step));
#pragma unroll
      for (int j = 0; j < BATCH; ++j)
        sum.x ^= x[j].x, sum.y ^= x[j].y, sum.z ^= x[j].z, sum.w ^= x[j].w;
    }
  if ((sum.x ^ sum.y ^ sum.z ^ sum.w) == 123456789) *sink = 1;
}

// TB/s of all SMs; the last bytes that do not fill a batch of every thread are left out.
double read_rate(const void* data, size_t bytes, int rounds) {
  size_t batch = (size_t)sms * 2 * 512 * 16 * 4, read = bytes / batch * batch;
  int* sink = (int*)words(1);
  cudaEvent_t start, end;
  CHECK(cudaEventCreate(&start));
  CHECK(cudaEventCreate(&end));
  std::vector<double> rates;
  for (int k = 0; k < 5; ++k) {
    CHECK(cudaEventRecord(start));
    read_all<<<sms * 2, 512>>>((const int4*)data, bytes / 16, rounds, sink);
    CHECK(cudaEventRecord(end));
    CHECK(cudaEventSynchronize(end));
    float ms;
    CHECK(cudaEventElapsedTime(&ms, start, end));
    rates.push_back((double)read * rounds / ms * 1e-9);
  }
  CHECK(cudaFree(sink));
  return median(rates);
}

// Pointers in a ring: each load waits for the last. hops: so many of them timed.
template <int CACHED>
__global__ void chase(unsigned long long* start, int warm, int hops, long long* out) {
  unsigned long long x = (unsigned long long)start;
  for (int k = 0; k < warm; ++k)
    if (CACHED) asm volatile("ld.global.ca.b64 %0, [%0];" : "+l"(x));
    else asm volatile("ld.global.cg.b64 %0, [%0];" : "+l"(x));
  long long begin = clock64();
  for (int k = 0; k < hops; ++k)
    if (CACHED) asm volatile("ld.global.ca.b64 %0, [%0];" : "+l"(x));
    else asm volatile("ld.global.cg.b64 %0, [%0];" : "+l"(x));
  out[0] = clock64() - begin;
  if (x == 1) out[1] = x;
}

__global__ void make_ring(unsigned long long* cells, size_t count, size_t step, size_t apart) {
  size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) cells[i * apart] = (unsigned long long)(cells + (i + step) % count * apart);
}

__global__ void atomics(int* cell, int zero, long long* out) {  // each waits for the one before
  int x = 0;
  long long start = clock64();
  for (int k = 0; k < 256; ++k) x = atomicAdd(cell + (x & zero), 1);
  out[0] = clock64() - start;
  if (x == -1) out[1] = 1;
}

// cp.async of 16 bytes by every thread: `chunks` of them in flight, then all waited for.
template <int CHUNKS>
__global__ void cp_async(const char* data, long long* out) {
  extern __shared__ __align__(1024) char raw[];
  unsigned smem = shared_address(raw) + threadIdx.x * 16;
  const char* from = data + (blockIdx.x * 128 * 32 * CHUNKS + threadIdx.x) * 16;
  __syncthreads();
  long long start = clock64();
  for (int k = 0; k < 32; ++k) {
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c, from += 2048)
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(smem + c * 2048), "l"(from) : "memory");
    asm volatile("cp.async.wait_all;" ::: "memory");
  }
  __syncthreads();
  if (threadIdx.x == 0) out[blockIdx.x] = clock64() - start;
}

// From L2: what one CTA goes through is 64 KiB for each chunk in flight.
template <int CHUNKS>
void copies(const char* data, int ctas, long long* out) {
  CHECK(cudaFuncSetAttribute(cp_async<CHUNKS>, cudaFuncAttributeMaxDynamicSharedMemorySize, 64 << 10));
  for (int k = 0; k < 3; ++k) cp_async<CHUNKS><<<ctas, 128, 64 << 10>>>(data, out);
  double cycles = slowest(out, ctas);
  char text[128];
  snprintf(text, sizeof text, "cp.async by 128 threads from L2: %d CTAs; %d of 16 bytes each to wait_all", ctas,
           CHUNKS);
  row(text, cycles / 32, "clk");
}

void threads(char* data) {
  row("ld.global.cg.v4 by all SMs from L2 (16 MiB)", read_rate(data, L2_ROWS * 128, 50), "TB/s");
  row("ld.global.cg.v4 by all SMs from L2 (32 MiB)", read_rate(data, L2_ROWS * 256, 25), "TB/s");
  row("ld.global.cg.v4 by all SMs from HBM", read_rate(data, HBM_ROWS * 128, 1), "TB/s");
  long long* out = words(sms);
  auto ring = [&](size_t count, size_t step, size_t apart) {
    make_ring<<<(count + 255) / 256, 256>>>((unsigned long long*)data, count, step, apart);
  };
  ring(1024, 17, 16);
  chase<1><<<1, 1>>>((unsigned long long*)data, 2048, 1024, out);
  row("ld.global.ca latency from L1", (double)fetch(out, 1)[0] / 1024, "clk");
  ring(65536, 4097, 16);
  chase<0><<<1, 1>>>((unsigned long long*)data, 65536, 2048, out);
  row("ld.global.cg latency from L2", (double)fetch(out, 1)[0] / 2048, "clk");
  size_t far = (HBM_ROWS * 128 - 1) / 65536;  // one word each 64 KiB, the L2 swept before the chase
  ring(far, 40961 % far, 8192);
  read_rate(data + (size_t(4) << 30), (size_t)1 << 30, 1);
  chase<0><<<1, 1>>>((unsigned long long*)data, 0, 1024, out);
  row("ld.global.cg latency from HBM: 8 GiB touched", (double)fetch(out, 1)[0] / 1024, "clk");
  ring(1 << 14, 4097, 2048);
  read_rate(data + (size_t(4) << 30), (size_t)1 << 30, 1);
  chase<0><<<1, 1>>>((unsigned long long*)data, 0, 1024, out);
  row("ld.global.cg latency from HBM: 256 MiB touched", (double)fetch(out, 1)[0] / 1024, "clk");
  atomics<<<1, 1>>>((int*)data, 0, out);
  row("atom.global.add latency in L2", (double)fetch(out, 1)[0] / 256, "clk");
  for (int ctas : {1, sms}) copies<1>(data, ctas, out), copies<4>(data, ctas, out);
  copies<16>(data, 1, out);  // by all SMs they would go through more than the L2
  CHECK(cudaFree(out));
}

__global__ void clock_rate(long long* out) {
  long long start, end, t0, t1;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t0));
  start = clock64();
  do {
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t1));
  } while (t1 - t0 < 5000000);
  end = clock64();
  out[0] = end - start;
  out[1] = t1 - t0;
}

int main() {
  CHECK(cudaSetDevice(0));
  cudaDeviceProp prop;
  CHECK(cudaGetDeviceProperties(&prop, 0));
  sms = prop.multiProcessorCount;
  printf("# %s, %d SMs: made by memory.cu, whose text says how\nquantity,value,unit\n", prop.name, sms);
  char* data;
  CHECK(cudaMalloc(&data, HBM_ROWS * 128 + ((size_t)1 << 32)));
  CHECK(cudaMemset(data, 1, HBM_ROWS * 128 + ((size_t)1 << 32)));
  long long* out = words(2);
  clock_rate<<<1, 1>>>(out);
  std::vector<long long> ticks = fetch(out, 2);
  row("SM clock at the start", (double)ticks[0] / ticks[1], "GHz");
  tma(data);
  threads(data);
  clock_rate<<<1, 1>>>(out);
  ticks = fetch(out, 2);
  row("SM clock at the end", (double)ticks[0] / ticks[1], "GHz");
  return 0;
}
