// Number formats: half, bfloat16 and their pairs, fp8, integer intrinsics, doubles, fast math.
//
// nvcc 13.0 made numbers.ptx of it: make cuda-ptx

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cstdint>

extern "C" __global__ void halves(const __half2* a, const __half2* b, __half2* out) {
  const int i = threadIdx.x;
  out[3 * i] = __hfma2(a[i], b[i], __hmax2(a[i], b[i]));
  out[3 * i + 1] = __hmul2_rn(a[i], __float2half2_rn(0.3f));
  out[3 * i + 2] = __hadd2(h2exp2(__hmin2(a[i], b[i])), __hneg2(b[i]));
}

extern "C" __global__ void brains(const float2* x, __nv_bfloat162* out, float* back) {
  const int i = threadIdx.x;
  const __nv_bfloat162 v = __float22bfloat162_rn(x[i]);
  out[2 * i] = v;
  out[2 * i + 1] = __hfma2(v, v, __hmax2(v, __float2bfloat162_rn(0.5f)));
  back[i] = __low2float(v) + __bfloat162float(__high2bfloat16(v));
}

extern "C" __global__ void eighths(const float2* x, uint16_t* e4, uint16_t* e5, __half2* back) {
  const int i = threadIdx.x;
  const __nv_fp8x2_e4m3 a(x[i]);
  e4[i] = a.__x;
  e5[i] = __nv_fp8x2_e5m2(x[i]).__x;
  back[i] = __half2(a);
}

extern "C" __global__ void integers(const uint32_t* a, const uint32_t* b, uint32_t* out) {
  const int i = threadIdx.x;
  const uint32_t x = a[i], y = b[i];
  const uint64_t wide = uint64_t(x) * y + (uint64_t(y) << 32);
  out[8 * i] = __popc(x) + 100 * __clz(y) + 10000 * __ffs(x);
  out[8 * i + 1] = __byte_perm(x, y, 0x2614);
  out[8 * i + 2] = __funnelshift_l(x, y, x & 63);
  out[8 * i + 3] = __brev(x) ^ __umulhi(x, y);
  out[8 * i + 4] = uint32_t(wide >> 32) - uint32_t(wide);
  out[8 * i + 5] = y ? x / y + x % y : int32_t(x) >> 3;
  out[8 * i + 6] = __vadd4(x, y);
  out[8 * i + 7] = max(min(int32_t(x), int32_t(y)), -77) + __dp4a(int(x), int(y), 5);
}

extern "C" __global__ void doubles(const double* x, double* out, float* fast) {
  const int i = threadIdx.x;
  out[3 * i] = fma(x[i], x[i], 1.0 / x[i]);
  out[3 * i + 1] = sqrt(fabs(x[i]));
  out[3 * i + 2] = rint(x[i] * 100.0) + (long long)(x[i]);
  fast[2 * i] = exp2f(float(x[i]) * 0.125f) * rsqrtf(fabsf(float(x[i])) + 1.0f);
  fast[2 * i + 1] = __fdividef(1.0f, 1.0f + __expf(-float(x[i])));
}
