// SPDX-License-Identifier: Apache-2.0
// Latencies that the cycle model needs, measured on a Hopper or newer GPU, in SM cycles:
//
//     nvcc -gencode=arch=compute_90a,code=sm_90a -O3 -o latencies latencies.cu && ./latencies
//
// Prints JSON. Chains of dependent instructions are timed with clock64() over many steps; barriers
// by two warps that answer each other; TMA tiles (64 x 128 bf16, 128-byte swizzle, as attention
// kernels load K and V) from data that lie in L2, alone and with every SM loading.

#include <cuda.h>
#include <cuda_runtime.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include <algorithm>
#include <vector>

#define CHECK(call)                                                              \
  do {                                                                           \
    auto e_ = (call);                                                            \
    if (e_ != 0) {                                                               \
      fprintf(stderr, "%s:%d: %s failed: %d\n", __FILE__, __LINE__, #call, (int)e_); \
      exit(1);                                                                   \
    }                                                                            \
  } while (0)

constexpr int STEPS = 512;

#define CHAIN(NAME, DECLARE, STEP)                                       \
  __global__ void NAME(long long* out, float f, int i) {                 \
    DECLARE;                                                             \
    long long start = 0, end = 0;                                        \
    for (int round = 0; round < 3; ++round) {                            \
      start = clock64();                                                 \
      _Pragma("unroll") for (int k = 0; k < STEPS; ++k) { STEP; }        \
      end = clock64();                                                   \
    }                                                                    \
    if (threadIdx.x == 0) out[0] = end - start;                          \
    if (x == (decltype(x))123456789) out[1] = 1;                         \
  }

CHAIN(chain_fma, float x = f, asm volatile("fma.rn.f32 %0, %0, %1, %1;" : "+f"(x) : "f"(f)))
CHAIN(chain_max, float x = f, asm volatile("max.f32 %0, %0, %1;" : "+f"(x) : "f"(f)); f = -f)
CHAIN(chain_lop, int x = i,
      asm volatile("{xor.b32 %0, %0, %1; shf.l.wrap.b32 %0, %0, %0, 1;}" : "+r"(x) : "r"(i)))
CHAIN(chain_imad, int x = i, asm volatile("mad.lo.s32 %0, %0, %1, %1;" : "+r"(x) : "r"(i)))
CHAIN(chain_ex2, float x = f, asm volatile("ex2.approx.ftz.f32 %0, %0;" : "+f"(x)))
CHAIN(chain_cvt, unsigned x = i,
      asm volatile("{.reg .f32 t; mov.b32 t, %0; cvt.rn.bf16x2.f32 %0, t, t;}" : "+r"(x)))
CHAIN(chain_shfl, int x = threadIdx.x,
      asm volatile("shfl.sync.idx.b32 %0, %0, %0, 31, 0xffffffff;" : "+r"(x)))
CHAIN(chain_vote, int x = i,
      asm volatile("{.reg .pred p; setp.ne.s32 p, %0, 7; vote.sync.ballot.b32 %0, p, 0xffffffff;}"
                   : "+r"(x)))
CHAIN(chain_elect_add, int x = i,
      asm volatile("{.reg .pred p; .reg .b32 l; elect.sync l|p, 0xffffffff; @p add.s32 %0, %0, %1;}"
                   : "+r"(x) : "r"(i)))

__global__ void chain_smem(long long* out) {
  __shared__ unsigned cell[32];
  unsigned base = (unsigned)__cvta_generic_to_shared(cell), x = base + 4 * threadIdx.x;
  cell[threadIdx.x] = x;
  __syncwarp();
  long long start = clock64();
#pragma unroll
  for (int k = 0; k < STEPS; ++k) asm volatile("ld.shared.b32 %0, [%0];" : "+r"(x));
  long long end = clock64();
  if (threadIdx.x == 0) out[0] = end - start;
  if (x == 1) out[1] = x;
}

// Past L1: from L2, where all the ring lies after `warm` steps.
__global__ void chain_global(long long* out, unsigned long long* cells, int warm) {
  unsigned long long x = (unsigned long long)cells;
  for (int k = 0; k < warm; ++k) asm volatile("ld.global.cg.b64 %0, [%0];" : "+l"(x));
  long long start = clock64();
#pragma unroll 8
  for (int k = 0; k < STEPS; ++k) asm volatile("ld.global.cg.b64 %0, [%0];" : "+l"(x));
  long long end = clock64();
  if (threadIdx.x == 0) out[0] = end - start;
  if (x == 1) out[1] = x;
}

__device__ unsigned shared_address(void* p) { return (unsigned)__cvta_generic_to_shared(p); }

__device__ void mbarrier_init(unsigned bar, int count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}

__device__ void mbarrier_arrive(unsigned bar) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(bar) : "memory");
}

__device__ void mbarrier_wait(unsigned bar, int parity) {
  asm volatile(
      "{\n.reg .pred p;\nW%=: mbarrier.try_wait.parity.shared.b64 p, [%0], %1, 10000000;\n"
      "@p bra D%=;\nbra W%=;\nD%=:\n}" ::"r"(bar), "r"(parity) : "memory");
}

__global__ void empty_loop(long long* out, int n) {  // what a loop of the kernels below costs
  long long start = clock64();
#pragma unroll 1
  for (int k = 0; k < n; ++k) asm volatile("" ::: "memory");
  long long end = clock64();
  if (threadIdx.x == 0) out[0] = end - start;
}

// Waits that succeed at once, eight an iteration.
__global__ void mbarrier_try(long long* out) {
  __shared__ unsigned long long bar[1];
  unsigned b = shared_address(bar);
  if (threadIdx.x == 0) mbarrier_init(b, 1);
  __syncthreads();
  long long start = 0, end = 0;
  for (int round = 0; round < 2; ++round) {
    start = clock64();
#pragma unroll 1
    for (int k = 0; k < STEPS / 8; ++k) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        asm volatile(
            "{.reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%0], %1, 10000000; @!p trap;}" ::"r"(b),
            "r"(1) : "memory");
      }
    }
    end = clock64();
  }
  if (threadIdx.x == 0) out[0] = end - start;
}

__global__ void mbarrier_ping_pong(long long* out) {  // warp 0 answers warp 1 answers warp 0
  __shared__ unsigned long long bar[2];
  unsigned mine = shared_address(&bar[threadIdx.x / 32]), other = shared_address(&bar[1 - threadIdx.x / 32]);
  if (threadIdx.x % 32 == 0) mbarrier_init(mine, 1);
  __syncthreads();
  long long start = clock64();
#pragma unroll 8
  for (int k = 0; k < STEPS; ++k) {
    if (threadIdx.x < 32) {
      if (threadIdx.x == 0) mbarrier_arrive(other);
      mbarrier_wait(mine, k & 1);
    } else {
      mbarrier_wait(mine, k & 1);
      if (threadIdx.x == 32) mbarrier_arrive(other);
    }
  }
  long long end = clock64();
  if (threadIdx.x == 0) out[0] = (end - start) / 2;
}

__global__ void named_barrier(long long* out) {
  long long start = clock64();
#pragma unroll 1
  for (int k = 0; k < STEPS / 8; ++k) {
#pragma unroll
    for (int j = 0; j < 8; ++j) asm volatile("bar.sync 1, 256;" ::: "memory");
  }
  long long end = clock64();
  if (threadIdx.x == 0) out[0] = end - start;
}

__global__ void proxy_fence(long long* out) {
  __shared__ int cell[32];
  long long start = clock64();
#pragma unroll 1
  for (int k = 0; k < STEPS; ++k) {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(shared_address(&cell[threadIdx.x])), "r"(k) : "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
  long long end = clock64();
  if (threadIdx.x == 0) out[0] = end - start;
}

// Loads `copies` tiles of 16 KiB, waits, pauses; the median time from the first issue to the wait's
// end over 64 rounds of every CTA.
__global__ void tma_load(const __grid_constant__ CUtensorMap map, int rows, int copies, int pause,
                         long long* times) {
  extern __shared__ __align__(1024) char raw[];
  __shared__ unsigned long long bar[1];
  unsigned b = shared_address(bar), smem = (shared_address(raw) + 1023) / 1024 * 1024;
  if (threadIdx.x == 0) {
    mbarrier_init(b, 1);
    asm volatile("fence.proxy.async;" ::: "memory");
    int tiles = rows / 128, tile = blockIdx.x * 37 % tiles;
    for (int k = 0; k < 128; ++k) {
      if ((tile += 5) >= tiles) tile -= tiles;  // no division: ptxas would put it behind the clock
      long long start = clock64();
      asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(b), "r"(copies * 16384) : "memory");
      for (int c = 0; c < copies; ++c)
        asm volatile(
            "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
                smem + c * 16384),
            "l"(&map), "r"(c * 64), "r"(tile * 128), "r"(b)
            : "memory");
      mbarrier_wait(b, k & 1);
      long long end = clock64();
      if (k >= 64) times[blockIdx.x * 64 + k - 64] = end - start;
      while (clock64() - end < pause) {}
    }
  }
}

long long* out;

double steps(const char*) {
  long long host[2];
  CHECK(cudaDeviceSynchronize());
  CHECK(cudaMemcpy(host, out, sizeof host, cudaMemcpyDeviceToHost));
  return (double)host[0] / STEPS;
}

double tma(const CUtensorMap& map, int rows, int copies, int pause, int ctas) {
  long long* times;
  CHECK(cudaMalloc(&times, ctas * 64 * sizeof(long long)));
  int bytes = 66 * 1024;
  CHECK(cudaFuncSetAttribute(tma_load, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  for (int warm = 0; warm < 3; ++warm) tma_load<<<ctas, 32, bytes>>>(map, rows, copies, pause, times);
  CHECK(cudaDeviceSynchronize());
  std::vector<long long> host(ctas * 64);
  CHECK(cudaMemcpy(host.data(), times, host.size() * sizeof(long long), cudaMemcpyDeviceToHost));
  CHECK(cudaFree(times));
  std::sort(host.begin(), host.end());
  return (double)host[host.size() / 2];
}

int main() {
  CHECK(cudaSetDevice(0));
  cudaDeviceProp prop;
  CHECK(cudaGetDeviceProperties(&prop, 0));
  CHECK(cudaMalloc(&out, 64));
  printf("{\n  \"gpu\": \"%s\",\n  \"sms\": %d,\n", prop.name, prop.multiProcessorCount);
#define REPORT(NAME) NAME<<<1, 32>>>(out, 1.0f, 3); printf("  \"%s\": %.1f,\n", #NAME, steps(#NAME))
  REPORT(chain_fma); REPORT(chain_max); REPORT(chain_lop); REPORT(chain_imad); REPORT(chain_ex2);
  REPORT(chain_cvt); REPORT(chain_shfl); REPORT(chain_vote); REPORT(chain_elect_add);
  chain_smem<<<1, 32>>>(out);
  printf("  \"chain_smem\": %.1f,\n", steps(""));
  const int cells = 1 << 16;  // pointers to each other, a 128-byte line apart
  std::vector<unsigned long long> host(cells * 16);
  unsigned long long* ring;
  CHECK(cudaMalloc(&ring, host.size() * 8));
  for (int k = 0; k < cells; ++k)
    host[k * 16] = (unsigned long long)(ring + (size_t)((k + 4097) % cells) * 16);
  CHECK(cudaMemcpy(ring, host.data(), host.size() * 8, cudaMemcpyHostToDevice));
  chain_global<<<1, 32>>>(out, ring, cells);
  printf("  \"chain_global_l2\": %.1f,\n", steps(""));
  empty_loop<<<1, 32>>>(out, STEPS);
  printf("  \"empty_loop\": %.1f,\n", steps(""));
  mbarrier_try<<<1, 32>>>(out);
  printf("  \"mbarrier_try\": %.1f,\n", steps(""));
  mbarrier_ping_pong<<<1, 64>>>(out);
  printf("  \"mbarrier_arrive_to_wake\": %.1f,\n", steps(""));
  named_barrier<<<1, 256>>>(out);
  printf("  \"named_barrier\": %.1f,\n", steps(""));
  proxy_fence<<<1, 32>>>(out);
  printf("  \"proxy_fence\": %.1f,\n", steps(""));

  const int rows = 65536;  // of 128 bf16: 16 MiB, in L2 after a pass
  void* data;
  CHECK(cudaMalloc(&data, (size_t)rows * 256));
  CHECK(cudaMemset(data, 1, (size_t)rows * 256));
  decltype(&cuTensorMapEncodeTiled) encode;  // without linking libcuda
  cudaDriverEntryPointQueryResult found;
  CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", (void**)&encode, 12000,
                                         cudaEnableDefault, &found));
  CUtensorMap map;
  cuuint64_t dims[2] = {128, rows}, strides[1] = {256};
  cuuint32_t box[2] = {64, 128}, element[2] = {1, 1};
  CHECK(encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, data, dims, strides, box, element,
               CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
               CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE));
  int sms = prop.multiProcessorCount;
  printf("  \"tma_16k_alone\": %.0f,\n", tma(map, rows, 1, 2000, 1));
  printf("  \"tma_32k_alone\": %.0f,\n", tma(map, rows, 2, 2000, 1));
  printf("  \"tma_16k_all_sms\": %.0f,\n", tma(map, rows, 1, 2000, sms));
  printf("  \"tma_32k_all_sms_pause_2000\": %.0f,\n", tma(map, rows, 2, 2000, sms));
  printf("  \"tma_32k_all_sms_pause_500\": %.0f,\n", tma(map, rows, 2, 500, sms));
  printf("  \"tma_32k_all_sms_no_pause\": %.0f\n}\n", tma(map, rows, 2, 0, sms));
  return 0;
}
