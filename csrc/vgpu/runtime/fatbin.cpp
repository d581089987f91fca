#include "vgpu/runtime/fatbin.h"

#include <cstdint>
#include <cstring>
#include <stdexcept>

namespace pagedkern::vgpu::runtime {
namespace {

constexpr uint32_t kWrapperMagic = 0x466243b1, kFatbinMagic = 0xba55ed50;
constexpr uint16_t kPtx = 1;
constexpr uint32_t kArch = 90;
constexpr const char* kFlags =
    "compile with -gencode=arch=compute_90a,code=compute_90a --no-compress for the virtual GPU";

struct Wrapper {
  uint32_t magic, version;
  const char* fatbin;
};

struct FatbinHeader {
  uint32_t magic;
  uint16_t version, header_bytes;
  uint64_t bytes;  // of all entries behind the header
};

// The start of an entry's header; `header_bytes` tells where its payload begins.
struct Entry {
  uint16_t kind, version;
  uint32_t header_bytes;
  uint64_t payload_bytes;
  uint32_t compressed_bytes;  // 0: plain
  uint32_t reserved;
  uint16_t minor, major;
  uint32_t arch;
};

}  // namespace

std::string ptx_of_fatbin(const void* wrapper_address) {
  Wrapper wrapper;
  std::memcpy(&wrapper, wrapper_address, sizeof(wrapper));
  FatbinHeader header;
  if (wrapper.magic != kWrapperMagic) throw std::runtime_error("no fat binary of nvcc's was registered");
  std::memcpy(&header, wrapper.fatbin, sizeof(header));
  if (header.magic != kFatbinMagic) throw std::runtime_error("the registered fat binary has no header");
  const char* at = wrapper.fatbin + header.header_bytes;
  const char* const end = at + header.bytes;
  std::string best;
  uint32_t best_arch = 0;
  bool compressed = false;
  while (at + sizeof(Entry) <= end) {
    Entry entry;
    std::memcpy(&entry, at, sizeof(entry));
    const char* payload = at + entry.header_bytes;
    at = payload + entry.payload_bytes;
    if (entry.kind != kPtx || entry.arch > kArch || entry.arch < best_arch || at > end) continue;
    if (entry.compressed_bytes != 0) {
      compressed = true;
      continue;
    }
    best_arch = entry.arch;
    best.assign(payload, strnlen(payload, entry.payload_bytes));
  }
  if (best.empty()) {
    throw std::runtime_error(std::string(compressed ? "the PTX is compressed: " : "there is no PTX for sm_90a: ") +
                             kFlags);
  }
  return best;
}

}  // namespace pagedkern::vgpu::runtime
