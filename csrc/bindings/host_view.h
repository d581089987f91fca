// The memory of an argument as the host can read it, for checks of what tensors hold: itself, or a copy.
#pragma once

#include <vector>

#include "bindings/arg.h"
#include "bindings/backend.h"

namespace pagedkern::bindings {

class HostView {
 public:
  HostView(const Backend& backend, const Place& place, const Arg& arg) : HostView(backend, place, &arg) {}
  // Null where `arg` is.
  HostView(const Backend& backend, const Place& place, const Arg* arg) {
    if (arg == nullptr) return;
    data_ = arg->data;
    if (backend.read == nullptr || arg->extent == 0) return;
    copy_.resize(static_cast<size_t>(arg->extent));
    backend.read(copy_.data(), arg->data, arg->extent, place);
    data_ = copy_.data();
  }
  HostView(const HostView&) = delete;
  HostView& operator=(const HostView&) = delete;

  const char* data() const { return data_; }
  template <class T>
  T* as() const {
    return reinterpret_cast<T*>(const_cast<char*>(data_));
  }

 private:
  std::vector<char> copy_;
  const char* data_ = nullptr;
};

}  // namespace pagedkern::bindings
