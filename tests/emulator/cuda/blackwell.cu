// What only sm_100a has: maxima of three floats, packed float32 arithmetic.
//
// nvcc 13.0 made blackwell.ptx of it: make cuda-ptx

extern "C" __global__ void greatest(const float* x, float* out, int n) {
  const int i = threadIdx.x;
  float m = -INFINITY, least = INFINITY;
  for (int k = 0; k < n; k += 2) {
    const float a = x[i * n + k], b = x[i * n + k + 1];
    asm("max.f32 %0, %0, %1, %2;" : "+f"(m) : "f"(a), "f"(b));
    asm("{ .reg .f32 t; abs.f32 t, %1; min.NaN.f32 %0, %0, t, %2; }" : "+f"(least) : "f"(a), "f"(b));
  }
  out[2 * i] = m;
  out[2 * i + 1] = least;
}

extern "C" __global__ void packed(const float2* a, const float2* b, float2* out) {
  const int i = threadIdx.x;
  const float2 c = __ffma2_rn(a[i], b[i], make_float2(0.5f, -0.25f));
  out[2 * i] = __fadd2_rn(c, a[i]);
  out[2 * i + 1] = __fmul2_rn(c, b[i]);
}
