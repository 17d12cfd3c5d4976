// Calls through pointers are not modelled, and must be refused by name.
//
// nvcc 13.0 made pointers.ptx of it: make cuda-ptx

__device__ __noinline__ float twice(float x) { return x + x; }
__device__ __noinline__ float square(float x) { return x * x; }

extern "C" __global__ void indirect(const int* which, const float* x, float* out) {
  float (*const table[2])(float) = {twice, square};
  out[threadIdx.x] = table[which[threadIdx.x] & 1](x[threadIdx.x]);
}
