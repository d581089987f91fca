// What a launcher returns: success, or why the launch did not happen. Nothing here throws; the bindings turn a failed
// status into an exception.
#pragma once

namespace pagedkern {

struct [[nodiscard]] Status {
  // A string that outlives the status (a literal or the CUDA runtime's own text); null: success.
  const char* message = nullptr;

  constexpr bool ok() const { return message == nullptr; }
};

}  // namespace pagedkern
