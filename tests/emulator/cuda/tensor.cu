// Tensor cores and asynchronous copies: ldmatrix and mma.sync in inline assembly whose scopes repeat
// their names and labels, cp.async by the pipeline primitives, a bulk copy on a cuda::barrier.
//
// nvcc 13.0 made tensor.ptx of it: make cuda-ptx

#include <cuda/barrier>
#include <cuda_bf16.h>
#include <cuda_pipeline.h>
#include <cstdint>

using barrier = cuda::barrier<cuda::thread_scope_block>;

__device__ __forceinline__ void load_x4(uint32_t* r, const void* at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"((uint32_t)__cvta_generic_to_shared(at)));
}

__device__ __forceinline__ void load_x2(uint32_t* r, const void* at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"((uint32_t)__cvta_generic_to_shared(at)));
}

// out[16, 8] = a[16, 64] b[8, 64]^T, one warp; rows of shared memory are padded by 16 bytes.
extern "C" __global__ void product(const __nv_bfloat16* a, const __nv_bfloat16* b, float* out) {
  __shared__ alignas(16) __nv_bfloat16 sa[16][72], sb[8][72];
  const int lane = threadIdx.x;
  for (int k = lane; k < 16 * 8; k += 32)
    __pipeline_memcpy_async(&sa[k / 8][k % 8 * 8], &a[k * 8], 16);
  for (int k = lane; k < 8 * 8; k += 32)
    __pipeline_memcpy_async(&sb[k / 8][k % 8 * 8], &b[k * 8], 16);
  __pipeline_commit();
  __pipeline_wait_prior(0);
  __syncwarp();
  float c[4] = {};
  for (int k = 0; k < 64; k += 16) {
    uint32_t fa[4], fb[2];
    load_x4(fa, &sa[lane % 16][k + lane / 16 * 8]);
    load_x2(fb, &sb[lane % 8][k + lane / 8 % 2 * 8]);
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(fa[0]), "r"(fa[1]), "r"(fa[2]), "r"(fa[3]), "r"(fb[0]), "r"(fb[1]));
  }
  const int row = lane / 4, column = lane % 4 * 2;
  *(float2*)&out[row * 8 + column] = make_float2(c[0], c[1]);
  *(float2*)&out[(row + 8) * 8 + column] = make_float2(c[2], c[3]);
}

// out[i] = steps of the Collatz walk of x[i], twice: the same labels in two scopes of inline asm.
extern "C" __global__ void walked(const uint32_t* x, uint32_t* out) {
  const int i = threadIdx.x;
  uint32_t total = 0;
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    uint32_t steps;
    asm volatile(
        "{\n"
        " .reg .pred P, Q; .reg .b32 n, t;\n"
        " mov.b32 n, %1; mov.b32 %0, 0;\n"
        "LOOP: setp.le.u32 P, n, 1; @P bra DONE;\n"
        " { .reg .pred P; and.b32 t, n, 1; setp.eq.u32 P, t, 0;\n"
        "   @P bra EVEN; mad.lo.u32 n, n, 3, 1; bra NEXT;\n"
        "EVEN: shr.u32 n, n, 1;\n"
        "NEXT: }\n"
        " add.u32 %0, %0, 1; bra LOOP;\n"
        "DONE:\n"
        "}\n"
        : "=&r"(steps)
        : "r"(x[i] + k));
    total = total * 1000 + steps;
  }
  out[i] = total;
}

// out = 2 in: one bulk copy to shared memory that a barrier counts, and one back.
extern "C" __global__ void copied(const int* in, int* out, int n) {
  __shared__ alignas(16) int room[512];
#pragma nv_diag_suppress static_var_with_dynamic_init
  __shared__ barrier full;
  if (threadIdx.x == 0) {
    init(&full, blockDim.x);
    cuda::device::experimental::fence_proxy_async_shared_cta();
  }
  __syncthreads();
  barrier::arrival_token token;
  if (threadIdx.x == 0) {
    cuda::device::experimental::cp_async_bulk_global_to_shared(room, in, n * 4, full);
    token = cuda::device::barrier_arrive_tx(full, 1, n * 4);
  } else {
    token = full.arrive();
  }
  full.wait(std::move(token));
  for (int k = threadIdx.x; k < n; k += blockDim.x) room[k] *= 2;
  cuda::device::experimental::fence_proxy_async_shared_cta();
  __syncthreads();
  if (threadIdx.x == 0) {
    cuda::device::experimental::cp_async_bulk_shared_to_global(out, room, n * 4);
    cuda::device::experimental::cp_async_bulk_commit_group();
    cuda::device::experimental::cp_async_bulk_wait_group_read<0>();
  }
}
