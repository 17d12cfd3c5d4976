// SPDX-License-Identifier: Apache-2.0
// What pipes.cu and memory.cu share: rows of CSV, inline PTX for barriers.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include <algorithm>
#include <vector>

#define CHECK(call)                                                                  \
  do {                                                                               \
    auto e_ = (call);                                                                \
    if (e_ != 0) {                                                                   \
      fprintf(stderr, "%s:%d: %s failed: %d\n", __FILE__, __LINE__, #call, (int)e_); \
      exit(1);                                                                       \
    }                                                                                \
  } while (0)

inline void row(const char* quantity, double value, const char* unit) {
  CHECK(cudaGetLastError());
  printf("%s,%.4g,%s\n", quantity, value, unit);
  fflush(stdout);
}

inline double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// `count` 64-bit words that kernels write, zeroed.
inline long long* words(size_t count) {
  long long* device;
  CHECK(cudaMalloc(&device, count * 8));
  CHECK(cudaMemset(device, 0, count * 8));
  return device;
}

inline std::vector<long long> fetch(const long long* device, size_t count) {
  std::vector<long long> host(count);
  CHECK(cudaDeviceSynchronize());
  CHECK(cudaMemcpy(host.data(), device, count * 8, cudaMemcpyDeviceToHost));
  return host;
}

__device__ inline unsigned shared_address(const void* p) {
  return (unsigned)__cvta_generic_to_shared(p);
}

__device__ inline void mbarrier_init(unsigned bar, int count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}

__device__ inline void mbarrier_arrive(unsigned bar) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(bar) : "memory");
}

__device__ inline void mbarrier_expect(unsigned bar, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes)
               : "memory");
}

__device__ inline void mbarrier_wait(unsigned bar, int parity) {
  asm volatile(
      "{\n.reg .pred p;\nW%=: mbarrier.try_wait.parity.shared.b64 p, [%0], %1, 10000000;\n"
      "@p bra D%=;\nbra W%=;\nD%=:\n}" ::"r"(bar),
      "r"(parity)
      : "memory");
}

__device__ inline unsigned cluster_rank() {
  unsigned rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

__device__ inline unsigned mapa(unsigned address, unsigned rank) {
  unsigned there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}

__device__ inline void cluster_sync() {
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}
