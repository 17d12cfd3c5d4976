// SPDX-License-Identifier: Apache-2.0
// Throughput and latency of a Hopper SM's own pipes and barriers, in cycles of its clock:
//
//     nvcc -gencode=arch=compute_90a,code=sm_90a -O3 -std=c++17 -o pipes pipes.cu && ./pipes
//
// prints CSV: quantity,value,unit. Throughput: one CTA of 512 threads, eight independent chains a
// thread; latency: one warp, one chain. Two instructions in a name are timed together. What
// latencies.cu has is not here again.

#include "bench.cuh"

constexpr int LOOPS = 32, UNROLL = 8, CHAINS = 8, STEPS = 256, THREADS = 512;

// Every warp notes when it began and ended: the scheduler may let one warp of a sub-partition finish
// before another one begins.
__device__ void note(long long* out, long long start, long long end) {
  if (threadIdx.x % 32) return;
  out[threadIdx.x / 16] = start;
  out[threadIdx.x / 16 + 1] = end;
}

double span(const long long* out, int threads) {  // cycles from the first start to the last end
  std::vector<long long> times = fetch(out, threads / 16);
  long long first = times[0], last = times[1];
  for (size_t i = 0; i < times.size(); i += 2) {
    first = std::min(first, times[i]);
    last = std::max(last, times[i + 1]);
  }
  return (double)(last - first);
}

// ------------------------------------------------------------------------ arithmetic

#define OP(NAME, TYPE, TEXT, CONSTRAINT)                        \
  struct NAME {                                                 \
    using T = TYPE;                                             \
    static __device__ void step(T& x, T y) {                    \
      asm volatile(TEXT : "+" CONSTRAINT(x) : CONSTRAINT(y));   \
    }                                                           \
  };

OP(ex2_approx_ftz_f32, float, "ex2.approx.ftz.f32 %0, %0;", "f")
OP(lg2_approx_ftz_f32, float, "lg2.approx.ftz.f32 %0, %0;", "f")
OP(fma_rn_f32, float, "fma.rn.f32 %0, %0, %1, %1;", "f")
OP(mul_f32, float, "mul.rn.f32 %0, %0, %1;", "f")
OP(add_f32, float, "add.rn.f32 %0, %0, %1;", "f")
OP(max_f32, float, "max.f32 %0, %0, %1;", "f")
OP(setp_selp_f32, float, "{.reg .pred p; setp.gt.f32 p, %0, %1; selp.f32 %0, %1, %0, p;}", "f")
OP(mad_lo_s32, int, "mad.lo.s32 %0, %0, %1, %1;", "r")
OP(lop3_b32, int, "lop3.b32 %0, %0, %1, 255, 0x6a;", "r")
OP(shf_l_b32, int, "shf.l.wrap.b32 %0, %0, %1, 5;", "r")
OP(prmt_b32, int, "prmt.b32 %0, %0, %1, 0x2540;", "r")
OP(popc_b32, int, "popc.b32 %0, %0;", "r")
OP(fma_bf16x2, int, "fma.rn.bf16x2 %0, %0, %1, %1;", "r")
OP(cvt_bf16x2_f32, int, "{.reg .f32 a, b; mov.b32 a, %0; mov.b32 b, %1; cvt.rn.bf16x2.f32 %0, a, b;}", "r")
OP(cvt_f16x2_f32, int, "{.reg .f32 a, b; mov.b32 a, %0; mov.b32 b, %1; cvt.rn.f16x2.f32 %0, a, b;}", "r")
OP(cvt_prmt_e4m3x2_f32, int,
   "{.reg .f32 a, b; .reg .b16 h; mov.b32 a, %0; mov.b32 b, %1; cvt.rn.satfinite.e4m3x2.f32 h, a, b;"
   " mov.b32 %0, {h, h};}", "r")
OP(cvt_rn_f32_s32, int, "{.reg .f32 a; cvt.rn.f32.s32 a, %0; mov.b32 %0, a;}", "r")
OP(cvt_rzi_s32_f32, int, "{.reg .f32 a; mov.b32 a, %0; cvt.rzi.s32.f32 %0, a;}", "r")
OP(shfl_bfly, int, "shfl.sync.bfly.b32 %0, %0, 1, 31, 0xffffffff;", "r")
OP(setp_vote_ballot, int, "{.reg .pred p; setp.ne.s32 p, %0, %1; vote.sync.ballot.b32 %0, p, 0xffffffff;}", "r")
OP(redux_add, int, "redux.sync.add.s32 %0, %0, 0xffffffff;", "r")
OP(movmatrix, int, "movmatrix.sync.aligned.m8n8.trans.b16 %0, %0;", "r")
OP(elect_sync_add, int,
   "{.reg .pred p; .reg .b32 l; elect.sync l|p, 0xffffffff; @p add.s32 %0, %0, %1;}", "r")

template <class Op>
__global__ void throughput(long long* out, typename Op::T y) {
  typename Op::T x[CHAINS];
#pragma unroll
  for (int i = 0; i < CHAINS; ++i) x[i] = (typename Op::T)(threadIdx.x + i);
  long long start = 0, end = 0;
  for (int round = 0; round < 2; ++round) {
    __syncthreads();
    start = clock64();
#pragma unroll 1
    for (int k = 0; k < LOOPS; ++k) {
#pragma unroll
      for (int j = 0; j < UNROLL; ++j) {
#pragma unroll
        for (int i = 0; i < CHAINS; ++i) Op::step(x[i], y);
      }
    }
    __syncthreads();
    end = clock64();
  }
  typename Op::T sum = 0;
#pragma unroll
  for (int i = 0; i < CHAINS; ++i) sum += x[i];
  note(out, start, end);
  if (sum == (typename Op::T)123456789) out[60] = 1;
}

template <class Op>
__global__ void latency(long long* out, typename Op::T y) {
  typename Op::T x = (typename Op::T)threadIdx.x;
  long long start = 0, end = 0;
  for (int round = 0; round < 3; ++round) {
    start = clock64();
#pragma unroll
    for (int k = 0; k < STEPS; ++k) Op::step(x, y);
    end = clock64();
  }
  if (threadIdx.x == 0) out[0] = end - start;
  if (x == (typename Op::T)123456789) out[60] = 1;
}

long long* out;

template <class Op>
void arithmetic(const char* name) {
  char text[96];
  throughput<Op><<<1, THREADS>>>(out, (typename Op::T)3);
  double cycles = span(out, THREADS);
  snprintf(text, sizeof text, "%s throughput", name);
  row(text, (double)THREADS * LOOPS * UNROLL * CHAINS / cycles, "op/clk/SM");
  latency<Op><<<1, 32>>>(out, (typename Op::T)3);
  snprintf(text, sizeof text, "%s latency", name);
  row(text, (double)fetch(out, 1)[0] / STEPS, "clk");
}
#define ARITHMETIC(NAME) arithmetic<NAME>(#NAME)

// Softmax's mix: 8 independent values a thread, FMA then ex2, and FMA alone beside it.
template <int FMAS>
__global__ void mixed(long long* out, float f) {
  float x[CHAINS], y[CHAINS];
#pragma unroll
  for (int i = 0; i < CHAINS; ++i) x[i] = y[i] = threadIdx.x + i;
  long long start = 0, end = 0;
  for (int round = 0; round < 2; ++round) {
    __syncthreads();
    start = clock64();
#pragma unroll 1
    for (int k = 0; k < LOOPS; ++k) {
#pragma unroll
      for (int i = 0; i < CHAINS; ++i) {
        asm volatile("ex2.approx.ftz.f32 %0, %0;" : "+f"(x[i]));
#pragma unroll
        for (int j = 0; j < FMAS; ++j)
          asm volatile("fma.rn.f32 %0, %0, %1, %1;" : "+f"(y[(i + j) % CHAINS]) : "f"(f));
      }
    }
    __syncthreads();
    end = clock64();
  }
  float sum = 0;
  for (int i = 0; i < CHAINS; ++i) sum += x[i] + y[i];
  note(out, start, end);
  if (sum == 123456789.f) out[60] = 1;
}

template <int FMAS>
void mix() {
  mixed<FMAS><<<1, THREADS>>>(out, 3.f);
  char text[96];
  snprintf(text, sizeof text, "ex2 with %d fma beside each throughput", FMAS);
  row(text, (double)THREADS * LOOPS * CHAINS / span(out, THREADS), "ex2/clk/SM");
}

// ------------------------------------------------------------------------ shared memory

enum Access { LDS32, LDS64, LDS128, STS32, STS64, STS128, LDSM4, LDSM4T, STSM4 };

template <int KIND>
__device__ unsigned access(unsigned address, unsigned value) {
  unsigned a = value, b = 0, c = 0, d = 0;
  if (KIND == LDS32) asm volatile("ld.shared.b32 %0, [%1];" : "=r"(a) : "r"(address));
  if (KIND == LDS64)
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(a), "=r"(b) : "r"(address));
  if (KIND == LDS128)
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a), "=r"(b), "=r"(c), "=r"(d) : "r"(address));
  if (KIND == STS32) asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(a));
  if (KIND == STS64) asm volatile("st.shared.v2.b32 [%0], {%1, %1};" ::"r"(address), "r"(a));
  if (KIND == STS128)
    asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(address), "r"(a));
  if (KIND == LDSM4)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a), "=r"(b), "=r"(c), "=r"(d) : "r"(address));
  if (KIND == LDSM4T)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a), "=r"(b), "=r"(c), "=r"(d) : "r"(address));
  if (KIND == STSM4)
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %1, %1, %1};" ::"r"(address),
                 "r"(a));
  return a + b + c + d;
}

__host__ __device__ constexpr int width(int kind) {
  return kind == LDS32 || kind == STS32 ? 4 : kind == LDS64 || kind == STS64 ? 8 : 16;
}

template <int KIND>
__global__ void shared_throughput(long long* out, int zero) {
  extern __shared__ __align__(128) char cells[];
  unsigned address = shared_address(cells) + threadIdx.x * width(KIND), sum = 0;
  long long start = 0, end = 0;
  for (int round = 0; round < 2; ++round) {
    __syncthreads();
    start = clock64();
#pragma unroll 1
    for (int k = 0; k < LOOPS; ++k) {
#pragma unroll
      for (int j = 0; j < UNROLL; ++j)  // another address each, or ptxas merges them
        sum += access<KIND>(address + j * THREADS * width(KIND), sum);
      address += zero;  // or ptxas takes the loads out of the loop
    }
    __syncthreads();
    end = clock64();
  }
  note(out, start, end);
  if (sum == 123456789) out[60] = 1;
}

template <int KIND>
__global__ void shared_latency(long long* out) {  // each address waits for the datum before
  __shared__ __align__(128) char cells[32 * 16];
  ((int4*)cells)[threadIdx.x] = int4{0, 0, 0, 0};
  __syncwarp();
  unsigned base = shared_address(cells) + threadIdx.x * 16, x = 0;
  long long start = 0, end = 0;
  for (int round = 0; round < 2; ++round) {
    start = clock64();
#pragma unroll 8
    for (int k = 0; k < STEPS; ++k) x = access<KIND>(base + x, 0);
    end = clock64();
  }
  if (threadIdx.x == 0) out[0] = end - start;
  if (x == 123456789) out[60] = 1;
}

template <int KIND>
void shared(const char* name, bool loads) {
  char text[96];
  int size = UNROLL * THREADS * width(KIND);
  auto kernel = shared_throughput<KIND>;
  CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, size));
  kernel<<<1, THREADS, size>>>(out, 0);
  double bytes = (double)THREADS * width(KIND) * LOOPS * UNROLL;
  snprintf(text, sizeof text, "%s throughput", name);
  row(text, bytes / span(out, THREADS), "B/clk/SM");
  if (!loads) return;
  shared_latency<KIND><<<1, 32>>>(out);
  snprintf(text, sizeof text, "%s latency with the additions behind it", name);
  row(text, (double)fetch(out, 1)[0] / STEPS, "clk");
}

// ------------------------------------------------------------------------ barriers

template <int COUNT>
__global__ void named_barrier(long long* out) {
  __syncthreads();
  long long start = clock64();
#pragma unroll 8
  for (int k = 0; k < STEPS; ++k) asm volatile("bar.sync 1, %0;" ::"n"(COUNT) : "memory");
  long long end = clock64();
  if (threadIdx.x == 0) out[0] = end - start;
}

// Two warpgroups take turns as attention's do: each waits for its barrier and then lets the other
// go, bar.sync and bar.arrive of 256 threads.
__global__ void turns(long long* out) {
  int group = threadIdx.x / 128;
  if (group == 1) asm volatile("bar.arrive 1, 256;" ::: "memory");
  long long start = clock64();
  if (group == 0) {
    for (int k = 0; k < STEPS; ++k) asm volatile("bar.sync 1, 256;\nbar.arrive 2, 256;" ::: "memory");
  } else {
    for (int k = 0; k < STEPS; ++k) asm volatile("bar.sync 2, 256;\nbar.arrive 1, 256;" ::: "memory");
  }
  long long end = clock64();
  if (group == 0) asm volatile("bar.sync 1, 256;" ::: "memory");
  if (threadIdx.x == 0) out[0] = (end - start) / 2;
}

#define SOLO(NAME, BODY)                                        \
  __global__ void NAME(long long* out) {                        \
    __shared__ unsigned long long bars[2];                      \
    unsigned bar = shared_address(bars);                        \
    if (threadIdx.x == 0) mbarrier_init(bar, 1 << 19);          \
    __syncthreads();                                            \
    long long start = 0, end = 0;                               \
    for (int round = 0; round < 2; ++round) {                   \
      __syncthreads();                                          \
      start = clock64();                                        \
      _Pragma("unroll 8") for (int k = 0; k < STEPS; ++k) BODY; \
      end = clock64();                                          \
    }                                                           \
    if (threadIdx.x == 0) out[0] = end - start;                 \
  }

SOLO(arrive, mbarrier_arrive(bar))
SOLO(arrive_with_state, asm volatile("{.reg .b64 s; mbarrier.arrive.shared.b64 s, [%0];}" ::"r"(bar) : "memory"))
SOLO(arrive_expect_tx, mbarrier_expect(bar, 16))
SOLO(test_wait, asm volatile("{.reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%0], 1; @!p trap;}" ::"r"(bar) : "memory"))
SOLO(try_wait, asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%0], 1; @!p trap;}" ::"r"(bar) : "memory"))
SOLO(proxy_fence_alone, asm volatile("fence.proxy.async.shared::cta;" ::: "memory"))
SOLO(membar_cta, asm volatile("fence.acq_rel.cta;" ::: "memory"))

// Warpgroup 0 gives registers away, 1 and 2 take them, as warp-specialised kernels start; then back.
__global__ void __launch_bounds__(384, 1) registers(long long* out) {
  int group = threadIdx.x / 128;
  __syncthreads();
  long long start = clock64(), end;
  if (group == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    end = clock64();
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    end = clock64();
  }
  if (threadIdx.x % 128 == 0) out[group] = end - start;
}

__global__ void __cluster_dims__(2, 1, 1) cluster_barrier(long long* out, bool relaxed) {
  cluster_sync();
  long long start = clock64();
#pragma unroll 1
  for (int k = 0; k < STEPS; ++k) {
    if (relaxed)
      asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
    else
      cluster_sync();
  }
  long long end = clock64();
  if (blockIdx.x == 0 && threadIdx.x == 0) out[0] = end - start;
}

// A warp of each CTA answers the other CTA's: arrival at a remote mbarrier to the waiter's answer.
__global__ void __cluster_dims__(2, 1, 1) remote_ping_pong(long long* out) {
  __shared__ unsigned long long bars[1];
  unsigned mine = shared_address(bars), other = mapa(mine, 1 - cluster_rank());
  if (threadIdx.x == 0) mbarrier_init(mine, 1);
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  cluster_sync();
  bool leads = cluster_rank() == 0;
  long long start = clock64();
  for (int k = 0; k < STEPS; ++k) {
    if (!leads) mbarrier_wait(mine, k & 1);
    if (threadIdx.x == 0)
      asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(other) : "memory");
    if (leads) mbarrier_wait(mine, k & 1);
  }
  long long end = clock64();
  if (leads && threadIdx.x == 0) out[0] = (end - start) / 2;
  cluster_sync();
}

__global__ void __cluster_dims__(2, 1, 1) remote_load(long long* out) {
  __shared__ unsigned cell[32];
  cell[threadIdx.x] = 0;
  cluster_sync();
  unsigned base = mapa(shared_address(&cell[threadIdx.x]), 1 - cluster_rank()), x = 0;
  long long start = clock64();
#pragma unroll 8
  for (int k = 0; k < STEPS; ++k)
    asm volatile("ld.shared::cluster.b32 %0, [%1];" : "=r"(x) : "r"(base + x) : "memory");
  long long end = clock64();
  if (blockIdx.x == 0 && threadIdx.x == 0) out[0] = end - start;
  if (x) out[1] = x;
  cluster_sync();
}

void per_step(const char* name, const char* unit = "clk") {
  row(name, (double)fetch(out, 1)[0] / STEPS, unit);
}

void barriers() {
#define NAMED(COUNT) named_barrier<COUNT><<<1, COUNT>>>(out); per_step("bar.sync of " #COUNT " threads")
  NAMED(128); NAMED(256); NAMED(384); NAMED(512);
  turns<<<1, 256>>>(out);
  per_step("bar.sync/bar.arrive turn from one warpgroup to the other");
#define ALONE(NAME, THREADS) NAME<<<1, THREADS>>>(out); per_step(#NAME " by " #THREADS " threads")
  ALONE(arrive, 1); ALONE(arrive, 32); ALONE(arrive, 128); ALONE(arrive_with_state, 1);
  ALONE(arrive_expect_tx, 1); ALONE(test_wait, 1); ALONE(test_wait, 32); ALONE(test_wait, 128);
  ALONE(test_wait, 384); ALONE(try_wait, 32); ALONE(try_wait, 128); ALONE(try_wait, 384);
  ALONE(proxy_fence_alone, 32); ALONE(proxy_fence_alone, 128); ALONE(membar_cta, 32);
  registers<<<1, 384>>>(out);
  std::vector<long long> spans = fetch(out, 3);
  row("setmaxnreg.dec 168 to 24", spans[0], "clk");
  row("setmaxnreg.inc 168 to 240 while another warpgroup decreases", std::max(spans[1], spans[2]), "clk");
  cluster_barrier<<<2, 384>>>(out, false);
  per_step("barrier.cluster arrive and wait of 2 CTAs of 384 threads");
  cluster_barrier<<<2, 384>>>(out, true);
  per_step("barrier.cluster arrive.relaxed and wait of 2 CTAs of 384 threads");
  remote_ping_pong<<<2, 32>>>(out);
  per_step("remote mbarrier arrival to the waiter's answer");
  remote_load<<<2, 32>>>(out);
  per_step("ld.shared::cluster latency with the addition behind it");
}

int main() {
  CHECK(cudaSetDevice(0));
  cudaDeviceProp prop;
  CHECK(cudaGetDeviceProperties(&prop, 0));
  printf("# one SM of an %s: made by pipes.cu, whose text says how\nquantity,value,unit\n", prop.name);
  out = words(64);
  ARITHMETIC(ex2_approx_ftz_f32); ARITHMETIC(lg2_approx_ftz_f32);
  ARITHMETIC(fma_rn_f32); ARITHMETIC(mul_f32); ARITHMETIC(add_f32); ARITHMETIC(max_f32);
  ARITHMETIC(setp_selp_f32); ARITHMETIC(mad_lo_s32); ARITHMETIC(lop3_b32);
  ARITHMETIC(shf_l_b32); ARITHMETIC(prmt_b32); ARITHMETIC(popc_b32); ARITHMETIC(fma_bf16x2);
  ARITHMETIC(cvt_bf16x2_f32); ARITHMETIC(cvt_f16x2_f32); ARITHMETIC(cvt_prmt_e4m3x2_f32);
  ARITHMETIC(cvt_rn_f32_s32); ARITHMETIC(cvt_rzi_s32_f32); ARITHMETIC(shfl_bfly);
  ARITHMETIC(setp_vote_ballot); ARITHMETIC(redux_add); ARITHMETIC(movmatrix); ARITHMETIC(elect_sync_add);
  mix<1>(); mix<2>(); mix<4>(); mix<8>();
  shared<LDS32>("ld.shared.b32", true); shared<LDS64>("ld.shared.v2.b32", true);
  shared<LDS128>("ld.shared.v4.b32", true); shared<LDSM4>("ldmatrix.x4", true);
  shared<LDSM4T>("ldmatrix.x4.trans", true); shared<STS32>("st.shared.b32", false);
  shared<STS64>("st.shared.v2.b32", false); shared<STS128>("st.shared.v4.b32", false);
  shared<STSM4>("stmatrix.x4", false);
  barriers();
  return 0;
}
