// What the static constructors of nvcc's host objects register, and the error a thread sees.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>
#include <mutex>
#include <string>

#include "vgpu/program.h"

namespace pagedkern::vgpu::runtime {

// One embedded fat binary: parsed when its first kernel or variable is used.
class Module {
 public:
  explicit Module(const void* wrapper) : wrapper_(wrapper) {}
  std::shared_ptr<const Program> program();  // throws ParseError, or std::runtime_error where there is no PTX

 private:
  const void* wrapper_;
  std::mutex mutex_;
  std::shared_ptr<const Program> program_;
};

// A __global__ function. cudaKernel_t handles are pointers to this.
struct Function {
  Module* module;
  std::string name;
  int max_dynamic_shared;  // what cudaFuncSetAttribute allowed; -1: what fits 48 KiB beside static shared memory
  bool large_clusters;     // more than 8 blocks allowed

  const Kernel& kernel() { return module->program()->kernel(name); }
};

// `symbol` is the host's stub or a cudaKernel_t; nullptr: unknown.
Function* find_function(const void* symbol);

// Memory of a __device__ or __constant__ variable by the host's shadow of it; nullptr: unknown.
const ModuleVariable* find_variable(const void* symbol);

// Remembers the error for cudaGetLastError and why it came for cudaGetErrorString, and returns it.
cudaError_t fail(cudaError_t error, const std::string& why = "");

}  // namespace pagedkern::vgpu::runtime
