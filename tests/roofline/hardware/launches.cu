// SPDX-License-Identifier: Apache-2.0
// What it costs a Hopper GPU to start a CTA and a kernel:
//
//     nvcc -gencode=arch=compute_90a,code=sm_90a -O3 -std=c++17 -o launches launches.cu && ./launches
//
// prints CSV: quantity,value,unit; clk are cycles of the SM.

#include "bench.cuh"

int sms;

// Every CTA notes its SM, its first thread's first cycle and its last one.
__device__ void note(long long* log, int busy) {
  long long start = clock64();
  while (clock64() - start < busy) {}
  __syncthreads();
  if (threadIdx.x == 0) {
    unsigned sm;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
    log[3 * blockIdx.x] = sm;
    log[3 * blockIdx.x + 1] = start;
    log[3 * blockIdx.x + 2] = clock64();
  }
}

__global__ void __launch_bounds__(512, 1) ctas(long long* log, int busy) { note(log, busy); }
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(512, 1) clusters(long long* log, int busy) {
  note(log, busy);
}

struct Entry {
  long long sm, start, end;
};

// Gaps between one CTA's last cycle and the next one's first, on the same SM.
double gap(const std::vector<long long>& log) {
  std::vector<Entry> entries;
  for (size_t i = 0; i < log.size(); i += 3) entries.push_back({log[i], log[i + 1], log[i + 2]});
  std::sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) {
    return a.sm != b.sm ? a.sm < b.sm : a.start < b.start;
  });
  std::vector<double> gaps;
  for (size_t i = 1; i < entries.size(); ++i)
    if (entries[i].sm == entries[i - 1].sm) gaps.push_back(entries[i].start - entries[i - 1].end);
  return median(gaps);
}

// Microseconds a node: kernels of one CTA an SM that do nothing, one after another in a graph.
double node(void (*kernel)(long long*, int), int threads, int smem) {
  long long* log = words(3 * sms);
  cudaGraph_t graph;
  cudaGraphExec_t ready;
  cudaStream_t stream;
  CHECK(cudaStreamCreate(&stream));
  CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  for (int k = 0; k < 50; ++k) kernel<<<sms, threads, smem, stream>>>(log, 0);
  CHECK(cudaStreamEndCapture(stream, &graph));
  CHECK(cudaGraphInstantiate(&ready, graph, 0));
  cudaEvent_t start, end;
  CHECK(cudaEventCreate(&start));
  CHECK(cudaEventCreate(&end));
  std::vector<double> times;
  for (int k = 0; k < 7; ++k) {
    CHECK(cudaEventRecord(start, stream));
    CHECK(cudaGraphLaunch(ready, stream));
    CHECK(cudaEventRecord(end, stream));
    CHECK(cudaEventSynchronize(end));
    float ms;
    CHECK(cudaEventElapsedTime(&ms, start, end));
    times.push_back(ms * 1e3 / 50);
  }
  CHECK(cudaFree(log));
  return median(times);
}

void launches() {
  constexpr int SMEM = 180 << 10;  // one CTA an SM
  char text[128];
  for (int threads : {128, 384, 512})
    for (bool paired : {false, true}) {
      auto kernel = paired ? clusters : ctas;
      const char* pairs = paired ? "; clusters of 2" : "";
      CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SMEM));
      int count = sms * 8;
      long long* log = words(3 * count);
      for (int k = 0; k < 2; ++k) kernel<<<count, threads, SMEM>>>(log, 4000);
      snprintf(text, sizeof text, "from a CTA's last cycle to the next one's first: %d threads%s", threads, pairs);
      row(text, gap(fetch(log, 3 * count)), "clk");
      CHECK(cudaFree(log));
      for (int smem : {0, SMEM}) {
        snprintf(text, sizeof text, "a node of a graph: %d CTAs of %d threads; %d KiB of shared memory%s", sms,
                 threads, smem >> 10, pairs);
        row(text, node(kernel, threads, smem), "us");
      }
    }
}

// From the last CTA's last cycle of one kernel to the first cycle of the next one, on the same SM.
void between_kernels() {
  long long *first = words(3 * sms), *second = words(3 * sms);
  CHECK(cudaFuncSetAttribute(ctas, cudaFuncAttributeMaxDynamicSharedMemorySize, 180 << 10));
  std::vector<double> gaps;
  for (int k = 0; k < 9; ++k) {
    ctas<<<sms, 384, 180 << 10>>>(first, 20000);
    ctas<<<sms, 384, 180 << 10>>>(second, 20000);
    std::vector<long long> a = fetch(first, 3 * sms), b = fetch(second, 3 * sms);
    std::vector<double> each;
    for (int i = 0; i < sms; ++i)
      for (int j = 0; j < sms; ++j)
        if (a[3 * i] == b[3 * j]) each.push_back(b[3 * j + 1] - a[3 * i + 2]);
    gaps.push_back(median(each));
  }
  row("from a kernel's last cycle to the next one's first on an SM: 384 threads", median(gaps), "clk");
}

int main() {
  CHECK(cudaSetDevice(0));
  cudaDeviceProp prop;
  CHECK(cudaGetDeviceProperties(&prop, 0));
  sms = prop.multiProcessorCount;
  printf("# %s, %d SMs: made by launches.cu, whose text says how\nquantity,value,unit\n", prop.name, sms);
  launches();
  between_kernels();
  return 0;
}
