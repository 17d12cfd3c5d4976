// Control flow and functions: a switch, a jump table (brx.idx in inline assembly), device
// functions that are not inlined (.param variables, structures by value), local arrays with computed
// indices, nested loops, divergence.
//
// nvcc 13.0 made control.ptx of it: make cuda-ptx

#include <cstdint>

struct Pair {
  float sum;
  int count;
};

__device__ __noinline__ Pair grow(Pair p, float x) {
  p.sum += x * p.count;
  p.count += x > 0.5f ? 2 : 1;
  return p;
}

__device__ __noinline__ uint64_t mix(uint64_t a, uint32_t b) {
  if (a & 1) return a * 6364136223846793005ull + b;
  return (a >> 7) ^ (uint64_t(b) << 33);
}

// out[i] = op[i] applied to x[i]: eight cases, one of which falls into the next, and a default.
extern "C" __global__ void switched(const int* op, const float* x, float* out) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  float v = x[i];
  switch (op[i]) {
    case 0: v = v + 3.0f; break;
    case 1: v = v * v; break;
    case 2: v = -v; break;
    case 3: v = fabsf(v) - 1.0f; break;
    case 4: for (int k = 0; k < 5; ++k) v = v * 0.5f + k; break;
    case 5: v = v > 0 ? 1.0f : -1.0f; break;
    case 6: v = fminf(v, 0.25f); [[fallthrough]];
    case 7: v = v * 4.0f; break;
    default: v = 42.0f;
  }
  out[i] = v;
}

// Calls with structures and 64-bit values, from a loop whose count differs by thread.
extern "C" __global__ void called(const float* x, float* sum, int* count, uint64_t* hash, int n) {
  const int i = threadIdx.x;
  Pair p{0.0f, 1};
  uint64_t h = i;
  for (int k = 0; k < (i % n) + 1; ++k) {
    p = grow(p, x[i * n + k]);
    h = mix(h, p.count);
  }
  sum[i] = p.sum;
  count[i] = p.count;
  hash[i] = h;
}

// Each thread sorts its own 12 numbers: a local array, indexed by values, two nested loops.
extern "C" __global__ void sorted(const int* in, int* out) {
  int a[12];
  const int base = (blockIdx.x * blockDim.x + threadIdx.x) * 12;
  for (int k = 0; k < 12; ++k) a[k] = in[base + k];
#pragma unroll 1
  for (int k = 1; k < 12; ++k) {
    const int v = a[k];
    int j = k - 1;
#pragma unroll 1
    while (j >= 0 && a[j] > v) {
      a[j + 1] = a[j];
      --j;
    }
    a[j + 1] = v;
  }
  for (int k = 0; k < 12; ++k) out[base + k] = a[k];
}

// out[i] = one of four formulas of x[i], by a table of branch targets; twice, each in its own scope.
extern "C" __global__ void tabled(const uint32_t* op, const uint32_t* x, uint32_t* out) {
  const int i = threadIdx.x;
  uint32_t v = x[i];
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    asm volatile(
        "{\n"
        "TABLE: .branchtargets SAME, DOUBLE, FLIP, SAME;\n"
        " brx.idx %1, TABLE;\n"
        "DOUBLE: add.u32 %0, %0, %0; bra.uni SAME;\n"
        "FLIP: not.b32 %0, %0;\n"
        "SAME:\n"
        "}\n"
        : "+r"(v)
        : "r"((op[i] >> 2 * k) & 3));
  }
  out[i] = v;
}
