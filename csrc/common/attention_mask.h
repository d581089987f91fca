// Which keys a query row sees, for every kernel alike.
#pragma once

#include <cstdint>

#include "common/attention_params.h"

namespace pagedkern {

struct KeyRange {
  int32_t begin;
  int32_t end;  // one behind the last; begin >= end: no key
};

// Windows without the special values: how many keys before and after the query's own a row sees at most.
struct KeyWindow {
  static constexpr int64_t kUnbounded = int64_t{1} << 40;  // longer than any sequence, far from overflow
  int64_t left;
  int64_t right;
};

inline KeyWindow key_window(const PagedAttentionParams& p) {
  const auto reach = [](int64_t w) { return w < 0 || w > KeyWindow::kUnbounded ? KeyWindow::kUnbounded : w; };
  return {reach(p.window_left), p.causal ? 0 : reach(p.window_right)};
}

// Keys of the row at `position` (seq_len - q_len + row, may be negative) of a sequence of seq_len keys. For rising
// positions both ends rise; the keys of rows first..last are visible_keys(first).begin to visible_keys(last).end.
PAGEDKERN_HOST_DEVICE KeyRange visible_keys(int64_t position, const KeyWindow& window, int32_t seq_len) {
  const int64_t begin = position - window.left;
  const int64_t end = position + window.right + 1;
  return {static_cast<int32_t>(begin < 0         ? 0
                               : begin > seq_len ? seq_len
                                                 : begin),
          static_cast<int32_t>(end < 0         ? 0
                               : end > seq_len ? seq_len
                                               : end)};
}

}  // namespace pagedkern
