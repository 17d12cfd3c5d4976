// Memory and cooperation: static and extern shared arrays, vector loads and stores, constants,
// atomics, shuffles and cooperative groups, printf.
//
// nvcc 13.0 made memory.ptx of it: make cuda-ptx

#include <cooperative_groups.h>
#include <cooperative_groups/reduce.h>
#include <cstdint>
#include <cstdio>

namespace cg = cooperative_groups;

__constant__ float weights[4] = {0.25f, -1.5f, 3.0f, 0.125f};
__device__ unsigned int tally[8];

// out[4 i ...] = in reversed within the block, four at a time, times a constant each.
extern "C" __global__ void reversed(const float4* in, float4* out) {
  extern __shared__ float4 room[];
  const int i = threadIdx.x, n = blockDim.x;
  room[i] = in[blockIdx.x * n + i];
  __syncthreads();
  float4 v = room[n - 1 - i];
  v.x *= weights[0];
  v.y *= weights[1];
  v.z *= weights[2];
  v.w *= weights[3];
  out[blockIdx.x * n + i] = v;
}

// Sums of a block by shuffles, then by a shared array; sums of tiles of 8 by cooperative groups.
extern "C" __global__ void summed(const int* x, int* block_sum, int* tile_sum, int* tile_max) {
  __shared__ int part[32];
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  const int v = x[i];
  cg::thread_block block = cg::this_thread_block();
  cg::thread_block_tile<8> tile = cg::tiled_partition<8>(block);
  tile_sum[i] = cg::reduce(tile, v, cg::plus<int>());
  tile_max[i] = cg::reduce(tile, v, cg::greater<int>());
  int s = v;
  for (int d = 16; d; d /= 2) s += __shfl_xor_sync(~0u, s, d);
  if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = s;
  block.sync();
  if (threadIdx.x == 0) {
    int total = 0;
    for (int k = 0; k < blockDim.x / 32; ++k) total += part[k];
    atomicAdd(block_sum, total);
  }
}

// A histogram by shared and global atomics; the one who comes last (in some order) writes it out.
extern "C" __global__ void counted(const uint8_t* x, unsigned int* out, unsigned long long* most) {
  __shared__ unsigned int bins[8];
  if (threadIdx.x < 8) bins[threadIdx.x] = 0;
  __syncthreads();
  const int v = x[blockIdx.x * blockDim.x + threadIdx.x];
  atomicAdd(&bins[v & 7], 1u);
  atomicMax(most, (unsigned long long)v << 32 | threadIdx.x);
  __syncthreads();
  if (threadIdx.x < 8) {
    atomicAdd(&tally[threadIdx.x], bins[threadIdx.x]);
    atomicAdd(&out[threadIdx.x], bins[threadIdx.x]);
  }
}

extern "C" __global__ void spoken(const float* x) {
  if (threadIdx.x < 2) printf("thread %d has %.3f, %s\n", threadIdx.x, x[threadIdx.x], "it says");
}
