// Plain CUDA kernels for test_core.py: divergence, shared memory, shuffles, atomics, and one planted race.
extern "C" __global__ void saxpy(const float* x, const float* y, float* o, float a, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) o[i] = a * x[i] + y[i];
}

extern "C" __global__ void row_sum(const float* x, float* o, int n) {
  __shared__ float s[32];
  float v = 0;
  for (int i = threadIdx.x; i < n; i += blockDim.x) v += x[blockIdx.x * n + i];
  for (int d = 16; d; d >>= 1) v += __shfl_xor_sync(~0u, v, d);
  if (threadIdx.x % 32 == 0) s[threadIdx.x / 32] = v;
  __syncthreads();
  if (threadIdx.x < 32) {
    v = threadIdx.x < blockDim.x / 32 ? s[threadIdx.x] : 0.f;
    for (int d = 16; d; d >>= 1) v += __shfl_xor_sync(~0u, v, d);
    if (threadIdx.x == 0) o[blockIdx.x] = v;
  }
}

extern "C" __global__ void collatz(const int* x, int* o, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  int v = x[i], steps = 0;
  while (v != 1) {
    v = v & 1 ? 3 * v + 1 : v / 2;
    ++steps;
  }
  o[i] = steps;
}

extern "C" __global__ void histogram(const int* x, int* h, int n) {
  __shared__ int s[64];
  if (threadIdx.x < 64) s[threadIdx.x] = 0;
  __syncthreads();
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) atomicAdd(&s[x[i] & 63], 1);
  __syncthreads();
  if (threadIdx.x < 64) atomicAdd(&h[threadIdx.x], s[threadIdx.x]);
}

template <bool kBarrier>
__device__ void reverse(float* o) {
  __shared__ float s[128];
  s[threadIdx.x] = float(threadIdx.x);
  if (kBarrier) __syncthreads();
  o[threadIdx.x] = s[127 - threadIdx.x];
}
extern "C" __global__ void reverse_racy(float* o) {
  reverse<false>(o);
}
extern "C" __global__ void reverse_right(float* o) {
  reverse<true>(o);
}
