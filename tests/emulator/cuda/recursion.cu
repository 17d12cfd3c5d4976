// Recursion is not modelled, and must be refused by name.
//
// nvcc 13.0 made recursion.ptx of it: make cuda-ptx

__device__ __noinline__ int fibonacci(int n) {
  return n < 2 ? n : fibonacci(n - 1) + fibonacci(n - 2);
}

extern "C" __global__ void recursive(const int* x, int* out) {
  out[threadIdx.x] = fibonacci(x[threadIdx.x]);
}
