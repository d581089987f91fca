// Host code as a launcher has it, linked with the virtual GPU's runtime: what it calls, it calls as on a GPU. Every
// function returns the error it ends with; `text` gets the error's string, or the text of a kernel's fault.
#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <exception>
#include <stdexcept>

namespace {

constexpr int kText = 4096;

__device__ int device_counter = 5;
__constant__ float constant_factors[4] = {1, 2, 3, 4};

__global__ void saxpy(float a, const float* x, float* y, int count) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) y[i] = a * x[i] + y[i];
}

__global__ void use_variables(float* out) {
  out[threadIdx.x] = constant_factors[threadIdx.x];
  if (threadIdx.x == 0) device_counter += 10;
}

__global__ void reverse_in_shared(int* data) {
  extern __shared__ int s_data[];
  s_data[threadIdx.x] = data[threadIdx.x];
  __syncthreads();
  data[threadIdx.x] = s_data[blockDim.x - 1 - threadIdx.x];
}

__device__ unsigned cluster_rank() {
  unsigned rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

__global__ void write_rank(unsigned* out) {
  if (threadIdx.x == 0) out[blockIdx.x] = cluster_rank();
}

__global__ void __cluster_dims__(2, 1, 1) write_rank_of_two(unsigned* out) {
  if (threadIdx.x == 0) out[blockIdx.x] = cluster_rank();
}

__global__ void __launch_bounds__(128) bounded(int* out) {
  out[threadIdx.x] = 1;
}

struct Pair {
  double first;
  int8_t second;
};

__global__ void take_structs(Pair a, char b, Pair c, double* out) {
  out[0] = a.first + a.second + b + c.first + c.second;
}

template <class Body>
int guarded(char* text, Body body) {
  try {
    body();
  } catch (const std::exception& error) {
    std::snprintf(text, kText, "%s", error.what());
    return -1;
  }
  const cudaError_t peeked = cudaPeekAtLastError();
  const cudaError_t error = cudaGetLastError();
  std::snprintf(text, kText, "%s", cudaGetErrorString(error));
  return peeked == error && cudaGetLastError() == cudaSuccess ? error : -2;
}

template <class T>
class DeviceArray {
 public:
  DeviceArray(T* host, int count) : host_(host), bytes_(count * sizeof(T)) {
    cudaMalloc(&data_, bytes_);
    cudaMemcpy(data_, host_, bytes_, cudaMemcpyHostToDevice);
  }
  ~DeviceArray() {
    cudaMemcpy(host_, data_, bytes_, cudaMemcpyDeviceToHost);
    cudaFree(data_);
  }
  T* get() const { return data_; }

 private:
  T* host_;
  T* data_ = nullptr;
  size_t bytes_;
};

cudaLaunchConfig_t config_of(int grid, int block, size_t shared_bytes, cudaLaunchAttribute* attributes, int count) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(grid);
  config.blockDim = dim3(block);
  config.dynamicSmemBytes = shared_bytes;
  config.attrs = attributes;
  config.numAttrs = count;
  return config;
}

cudaLaunchAttribute cluster_of(int size) {
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {unsigned(size), 1, 1};
  return attribute;
}

}  // namespace

extern "C" {

int run_saxpy(float a, float* x, float* y, int count, int threads, char* text) {
  return guarded(text, [&] {
    DeviceArray<float> dx(x, count), dy(y, count);
    saxpy<<<(count + threads - 1) / threads, threads>>>(a, dx.get(), dy.get(), count);
  });
}

// cudaMalloc'ed memory that nothing wrote (`wrong` 0), that was released (1), or one element too small (2); released
// before another allocation of that size, which must not take its place (3).
int run_faulty_saxpy(int wrong, char* text) {
  return guarded(text, [&] {
    float *x = nullptr, *y = nullptr;
    cudaMalloc(&x, 64 * sizeof(float));
    cudaMalloc(&y, (wrong == 2 ? 63 : 64) * sizeof(float));
    cudaMemset(y, 0, 63 * sizeof(float));
    if (wrong != 0) cudaMemsetAsync(x, 0, 64 * sizeof(float), nullptr);
    if (wrong == 1 || wrong == 3) cudaFree(x);
    if (wrong == 3) {
      float* other = nullptr;
      cudaMalloc(&other, 64 * sizeof(float));
      cudaMemset(other, 0, 64 * sizeof(float));
    }
    saxpy<<<1, 64>>>(2, x, y, wrong == 2 ? 64 : 63);
  });
}

int run_variables(float* out, int* counter, char* text) {
  return guarded(text, [&] {
    DeviceArray<float> d(out, 4);
    const float third = 30;
    cudaMemcpyToSymbol(constant_factors, &third, sizeof(third), 2 * sizeof(float));
    use_variables<<<1, 4>>>(d.get());
    cudaMemcpyFromSymbol(counter, device_counter, sizeof(int));
  });
}

int run_shared(int* data, int count, int shared_bytes, int allowed, char* text) {
  return guarded(text, [&] {
    DeviceArray<int> d(data, count);
    if (allowed >= 0 &&
        cudaFuncSetAttribute(reverse_in_shared, cudaFuncAttributeMaxDynamicSharedMemorySize, allowed) != cudaSuccess) {
      return;
    }
    reverse_in_shared<<<1, count, shared_bytes>>>(d.get());
  });
}

int run_cluster(unsigned* out, int grid, int cluster, int large_allowed, char* text) {
  return guarded(text, [&] {
    DeviceArray<unsigned> d(out, grid);
    cudaFuncSetAttribute(write_rank, cudaFuncAttributeNonPortableClusterSizeAllowed, large_allowed);
    cudaLaunchAttribute attributes[2] = {cluster_of(cluster), {}};
    attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[1].val.programmaticStreamSerializationAllowed = 1;
    const cudaLaunchConfig_t config = config_of(grid, 32, 0, attributes, 2);
    cudaLaunchKernelEx(&config, write_rank, d.get());
  });
}

int run_cluster_of_two(unsigned* out, int grid, char* text) {
  return guarded(text, [&] {
    DeviceArray<unsigned> d(out, grid);
    write_rank_of_two<<<grid, 32>>>(d.get());
  });
}

int run_bounded(int threads, char* text) {
  return guarded(text, [&] {
    int host[1024] = {};
    DeviceArray<int> d(host, 1024);
    int* pointer = d.get();
    void* args[] = {&pointer};
    cudaLaunchKernel(reinterpret_cast<const void*>(&bounded), dim3(1), dim3(threads), args, 0, nullptr);
  });
}

int run_cooperative(int grid, char* text) {
  return guarded(text, [&] {
    int host[128] = {};
    DeviceArray<int> d(host, 128);
    int* pointer = d.get();
    void* args[] = {&pointer};
    cudaLaunchCooperativeKernel(reinterpret_cast<const void*>(&bounded), dim3(grid), dim3(128), args, 0, nullptr);
  });
}

int run_structs(double* out, char* text) {
  return guarded(text, [&] {
    DeviceArray<double> d(out, 1);
    take_structs<<<1, 1>>>(Pair{1.5, -2}, 7, Pair{100, 3}, d.get());
  });
}

int run_unknown_attribute(char* text) {
  return guarded(text, [&] {
    unsigned host[1];
    DeviceArray<unsigned> d(host, 1);
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeDeviceUpdatableKernelNode;
    const cudaLaunchConfig_t config = config_of(1, 32, 0, &attribute, 1);
    cudaLaunchKernelEx(&config, write_rank, d.get());
  });
}

int occupancy(int threads, int shared_bytes) {
  int blocks = -1;
  cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, saxpy, threads, size_t(shared_bytes));
  return blocks;
}

void describe_bounded(int* threads, int* shared_limit) {
  cudaFuncAttributes attributes;
  cudaFuncGetAttributes(&attributes, bounded);
  *threads = attributes.maxThreadsPerBlock;
  *shared_limit = attributes.maxDynamicSharedSizeBytes;
}

int attribute(int id) {
  int value = -1;
  cudaDeviceGetAttribute(&value, cudaDeviceAttr(id), 0);
  cudaGetLastError();
  return value;
}

// The numbers that both ways of asking must give alike, and the rest.
void properties(long long* out) {
  cudaDeviceProp p;
  cudaGetDeviceProperties(&p, 0);
  int device = -1, count = 0;
  cudaGetDevice(&device);
  cudaGetDeviceCount(&count);
  const long long values[] = {p.multiProcessorCount,
                              static_cast<long long>(p.sharedMemPerBlockOptin),
                              p.l2CacheSize,
                              p.major,
                              p.minor,
                              p.warpSize,
                              device,
                              count,
                              cudaSetDevice(1)};
  cudaGetLastError();
  for (int i = 0; i < 9; ++i) out[i] = values[i];
}

int copy_rows(char* to, const char* from, int to_pitch, int from_pitch, int width, int height, char* text) {
  return guarded(text, [&] { cudaMemcpy2D(to, to_pitch, from, from_pitch, width, height, cudaMemcpyDefault); });
}

// Milliseconds between two events around a launch, below 0 where something went wrong.
float time_on_a_stream() {
  cudaStream_t stream;
  cudaEvent_t begin, end;
  cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  cudaEventCreate(&begin);
  cudaEventCreateWithFlags(&end, cudaEventDefault);
  float host[32] = {}, milliseconds = -1;
  {
    DeviceArray<float> d(host, 32);
    cudaEventRecord(begin, stream);
    saxpy<<<1, 32, 0, stream>>>(1, d.get(), d.get(), 32);
    cudaEventRecord(end, stream);
    cudaStreamWaitEvent(stream, end, 0);
    cudaStreamSynchronize(stream);
    cudaEventElapsedTime(&milliseconds, begin, end);
  }
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  cudaStreamDestroy(stream);
  return cudaDeviceSynchronize() == cudaSuccess ? milliseconds : -1;
}

// x *= 2 and a copy of x to y, captured: neither runs then; each launch of the graph does both. out: x and y after the
// capture and after each of two launches.
int run_graph(float* out, char* text) {
  return guarded(text, [&] {
    cudaStream_t stream;
    cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    float x[1] = {1}, y[1] = {0};
    {
      DeviceArray<float> dx(x, 1), dy(y, 1);
      const auto look = [&](int at) {
        cudaMemcpy(out + at, dx.get(), sizeof(float), cudaMemcpyDeviceToHost);
        cudaMemcpy(out + at + 1, dy.get(), sizeof(float), cudaMemcpyDeviceToHost);
      };
      cudaGraph_t graph;
      cudaGraphExec_t executable;
      cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal);
      saxpy<<<1, 1, 0, stream>>>(1, dx.get(), dx.get(), 1);
      cudaMemcpyAsync(dy.get(), dx.get(), sizeof(float), cudaMemcpyDeviceToDevice, stream);
      cudaStreamCaptureStatus status;
      cudaStreamIsCapturing(stream, &status);
      if (status != cudaStreamCaptureStatusActive) std::snprintf(text, kText, "not capturing");
      cudaStreamEndCapture(stream, &graph);
      look(0);
      cudaGraphInstantiate(&executable, graph, 0);
      cudaGraphDestroy(graph);
      for (int k = 1; k < 3; ++k) {
        cudaGraphLaunch(executable, stream);
        look(2 * k);
      }
      cudaGraphExecDestroy(executable);
    }
    cudaStreamDestroy(stream);
  });
}

// What a call that no capture allows gives, and what the end of the capture then gives.
int break_capture(int call, int* at_end, char* text) {
  return guarded(text, [&] {
    cudaStream_t stream, other;
    cudaEvent_t event;
    cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking);
    cudaEventCreate(&event);
    float x[1] = {1};
    DeviceArray<float>* array = new DeviceArray<float>(x, 1);
    void* more = nullptr;
    cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal);
    switch (call) {
      case 0: cudaStreamSynchronize(stream); break;
      case 1: cudaDeviceSynchronize(); break;
      case 2: cudaMalloc(&more, 4); break;
      case 3: cudaMemcpy(array->get(), x, 4, cudaMemcpyHostToDevice); break;
      case 4: saxpy<<<1, 1>>>(1, array->get(), array->get(), 1); break;
      case 5: cudaStreamWaitEvent(other, event, 0); break;
      case 6: cudaFree(array->get()); break;
      case 7: cudaMemset(array->get(), 0, 4); break;
      case 8: cudaEventQuery(event); break;
      case 9: cudaMallocAsync(&more, 4, stream); break;
      case 10: cudaStreamBeginCapture(other, cudaStreamCaptureModeGlobal); break;
      case 11: {  // allowed: one allocation in relaxed mode
        cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
        cudaThreadExchangeStreamCaptureMode(&mode);
        cudaMalloc(&more, 4);
        cudaThreadExchangeStreamCaptureMode(&mode);
        break;
      }
      default: break;
    }
    const cudaError_t error = cudaPeekAtLastError();
    cudaGraph_t graph = nullptr;
    *at_end = cudaStreamEndCapture(stream, &graph);
    if (graph != nullptr) cudaGraphDestroy(graph);
    if (more != nullptr) cudaFree(more);
    cudaGetLastError();
    delete array;
    cudaEventDestroy(event);
    cudaStreamDestroy(stream);
    cudaStreamDestroy(other);
    if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorName(error));
  });
}

int end_what_did_not_begin(int* begun, char* text) {
  return guarded(text, [&] {
    *begun = cudaStreamBeginCapture(nullptr, cudaStreamCaptureModeGlobal);
    cudaGetLastError();
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaStreamCreate(&stream);
    cudaStreamEndCapture(stream, &graph);
    cudaStreamDestroy(stream);
  });
}

// cuTensorMapEncodeTiled found by name and called for a [rows, 64] uint8 tensor; -1 where it is not found.
int encode(void* map, void* address, uint64_t rows) {
  using Encode = int (*)(void*, int, uint32_t, void*, const uint64_t*, const uint64_t*, const uint32_t*,
                         const uint32_t*, int, int, int, int);
  void* function = nullptr;
  cudaDriverEntryPointQueryResult status;
  cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &status);
  if (status != cudaDriverEntryPointSuccess) return -1;
  void* none = &none;
  cudaGetDriverEntryPointByVersion("cuNoSuchThing", &none, 12000, cudaEnableDefault, &status);
  if (status != cudaDriverEntryPointSymbolNotFound || none != nullptr) return -1;
  const uint64_t dims[] = {64, rows}, strides[] = {64};
  const uint32_t box[] = {32, 8}, steps[] = {1, 1};
  return reinterpret_cast<Encode>(function)(map, 0, 2, address, dims, strides, box, steps, 0, 0, 0, 0);
}

}  // extern "C"
