#include "bindings/overlap.h"

#include <algorithm>
#include <array>

namespace pagedkern::bindings {
namespace {

constexpr int kMaxTerms = 16;
// Nested strides, which every real layout has, need two candidates a dimension at most. A layout that needs more than
// this many steps is answered "overlaps": refusing it is safe.
constexpr int kMaxSteps = 1 << 16;

// sum(x[i] * stride[i]) with 0 <= x[i] <= count[i], strides positive and falling.
struct Term {
  int64_t stride;  // bytes
  int64_t count;
};

struct Terms {
  std::array<Term, kMaxTerms> terms;
  std::array<int64_t, kMaxTerms + 1> reach;  // reach[i]: the largest sum of terms i and later
  int size = 0;
  bool too_many = false;
  int steps = 0;

  void add(int64_t stride, int64_t count) {
    for (int i = 0; i < size; ++i) {
      if (terms[i].stride == stride) {
        terms[i].count += count;
        return;
      }
    }
    if (size == kMaxTerms) {
      too_many = true;
      return;
    }
    terms[size++] = {stride, count};
  }

  void finish() {
    std::sort(terms.begin(), terms.begin() + size, [](const Term& a, const Term& b) { return a.stride > b.stride; });
    reach[size] = 0;
    for (int i = size - 1; i >= 0; --i) reach[i] = reach[i + 1] + terms[i].stride * terms[i].count;
  }

  // Can terms first.. sum to a value in [low, high]?
  bool hits(int first, int64_t low, int64_t high) {
    if (high < 0 || low > reach[first]) return false;
    if (low <= 0 || high >= reach[first]) return true;
    if (first == size) return false;
    if (++steps > kMaxSteps) return true;
    const auto [stride, count] = terms[first];
    const int64_t rest = reach[first + 1];
    const int64_t from = low > rest ? (low - rest + stride - 1) / stride : 0;
    const int64_t to = std::min(count, high / stride);
    for (int64_t x = from; x <= to; ++x) {
      if (hits(first + 1, low - x * stride, high - x * stride)) return true;
    }
    return false;
  }
};

// Bytes of the innermost run: the last dimension where it is contiguous, else one element.
struct Run {
  int64_t bytes;
  int64_t dims;  // dimensions left outside the run
};

Run innermost_run(const Arg& tensor) {
  const int64_t last = tensor.dim - 1;
  if (tensor.dim > 0 && tensor.strides[last] == 1) return {tensor.sizes[last] * tensor.itemsize, last};
  return {tensor.itemsize, tensor.dim};
}

void add_dims(Terms& terms, const Arg& tensor, int64_t dims) {
  for (int64_t d = 0; d < dims; ++d) {
    if (tensor.sizes[d] > 1 && tensor.strides[d] != 0) {
      terms.add(tensor.strides[d] * tensor.itemsize, tensor.sizes[d] - 1);
    }
  }
}

}  // namespace

bool overlaps_itself(const Arg& tensor) {
  if (tensor.numel <= 1) return false;
  const Run run = innermost_run(tensor);
  Terms terms;
  int long_dims = 0;
  for (int64_t d = 0; d < run.dims; ++d) {
    if (tensor.sizes[d] > 1 && tensor.strides[d] == 0) return true;
    long_dims += tensor.sizes[d] > 1 ? 1 : 0;
  }
  add_dims(terms, tensor, run.dims);
  if (terms.too_many || terms.size < long_dims) return true;  // two dimensions with one stride meet
  terms.finish();
  // Two rows meet where sum(y * stride) lies within a run of 0, -count <= y <= count, y not all 0. By symmetry the
  // first non-zero y is positive; the later ones are shifted to start at 0.
  Terms doubled = terms;
  for (int i = 0; i < terms.size; ++i) doubled.terms[i].count *= 2;
  doubled.finish();
  for (int i = 0; i < terms.size; ++i) {
    const auto [stride, count] = terms.terms[i];
    const int64_t rest = terms.reach[i + 1];
    const int64_t most = std::min(count, (rest + run.bytes - 1) / stride);
    for (int64_t y = 1; y <= most; ++y) {
      const int64_t middle = rest - y * stride;
      if (doubled.hits(i + 1, middle - (run.bytes - 1), middle + (run.bytes - 1))) return true;
    }
  }
  return false;
}

bool overlaps(const Arg& a, const Arg& b) {
  if (a.extent == 0 || b.extent == 0) return false;
  if (a.data + a.extent <= b.data || b.data + b.extent <= a.data) return false;
  const Run run_a = innermost_run(a);
  const Run run_b = innermost_run(b);
  Terms terms;
  add_dims(terms, a, run_a.dims);
  add_dims(terms, b, run_b.dims);
  if (terms.too_many) return true;
  terms.finish();
  // Rows at a.data + x and b.data + z meet where -run_a < (a.data - b.data) + x - z < run_b; z' = last_b - z.
  const int64_t shift = (b.extent - run_b.bytes) - (a.data - b.data);
  return terms.hits(0, shift - (run_a.bytes - 1), shift + (run_b.bytes - 1));
}

bool same_memory(const Arg& a, const Arg& b) {
  if (a.data != b.data || a.scalar_type != b.scalar_type || a.dim != b.dim) return false;
  for (int64_t d = 0; d < a.dim; ++d) {
    if (a.sizes[d] != b.sizes[d] || (a.sizes[d] > 1 && a.strides[d] != b.strides[d])) return false;
  }
  return true;
}

}  // namespace pagedkern::bindings
