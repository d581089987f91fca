// A chain of quantised linear layers in one go over the pool's threads.
//
// A call wakes the threads once. They take pieces of work from a counter, and pass from one step to the next when all
// pieces of the last are done: waiting is a matter of a piece's length, waking a sleeping thread costs as much as a
// small layer. Any number of threads may take part, one alone does it all.
#include "cpu/simd/quantized_linear.h"

#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>

#include "cpu/buffer.h"
#include "cpu/kernels.h"

namespace pagedkern::cpu {
namespace {

constexpr int64_t kOwnRows = 2 * kTileRows;  // up to here every thread quantises all rows for itself
constexpr int64_t kTilesPerPiece = 8;        // of rows: what a panel is multiplied with before the next
constexpr int64_t kPieceWork = 2 << 20;      // multiplications a piece should have
constexpr int64_t kPiecesPerThread = 4;      // at least, where there are so many panels
constexpr int kSpins = 2000;                 // some ten microseconds

int64_t divide_up(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// Pieces of work that any thread may take, and who waits for all of them.
struct alignas(64) Step {
  std::atomic<int64_t> taken{0};
  alignas(64) std::atomic<int64_t> done{0};

  template <class Piece>
  void run(int64_t count, const Piece& piece) {
    for (int64_t i = taken.fetch_add(1); i < count; i = taken.fetch_add(1)) {
      piece(i);
      done.fetch_add(1, std::memory_order_release);
    }
    for (int spins = 0; done.load(std::memory_order_acquire) < count; ++spins) {
      if (spins < kSpins) {
        relax();
      } else {
        std::this_thread::yield();
      }
    }
  }
};

QuantizedRows rows_in(Buffer& buffer, int64_t num_rows, int64_t in_features) {
  const int64_t values = num_rows * in_features, groups = values / kQuantGroup;
  char* data = buffer.at_least(values + 3 * groups * static_cast<int64_t>(sizeof(float)));
  float* scales = reinterpret_cast<float*>(data + values);
  return {reinterpret_cast<uint8_t*>(data), scales, scales + groups, reinterpret_cast<int32_t*>(scales + 2 * groups)};
}

// How a linear is cut: pieces of some panels for some tiles of rows, one piece's panels after the other's.
struct Cut {
  int64_t tiles, tiles_per_piece, panels, panels_per_piece, pieces_across, pieces;

  Cut(const QuantizedLinear& linear, int64_t num_rows, int64_t threads) {
    tiles = num_row_tiles(num_rows);
    tiles_per_piece = std::min(tiles, kTilesPerPiece);
    const int64_t outputs = linear.gated ? linear.out_features / 2 : linear.out_features;
    panels = divide_up(outputs, kPanelOutputs);
    const int64_t rows = std::min(num_rows, tiles_per_piece * kTileRows);
    const int64_t panel_work = rows * kPanelOutputs * linear.in_features * (linear.gated ? 2 : 1);
    const int64_t most = std::max<int64_t>(1, panels / (threads * kPiecesPerThread));
    panels_per_piece = std::clamp<int64_t>(kPieceWork / panel_work, 1, most);
    pieces_across = divide_up(panels, panels_per_piece);
    pieces = pieces_across * divide_up(tiles, tiles_per_piece);
  }
};

void run_piece(const QuantizedLinear& linear, int64_t num_rows, const Cut& cut, const QuantizedRows& rows,
               int64_t piece) {
  const int64_t tile = piece / cut.pieces_across * cut.tiles_per_piece;
  const int64_t panel = piece % cut.pieces_across * cut.panels_per_piece;
  PAGEDKERN_CALL_SIMD(linear_panels, (linear, num_rows, tile, std::min(cut.tiles, tile + cut.tiles_per_piece), rows,
                                      panel, std::min(cut.panels, panel + cut.panels_per_piece)));
}

}  // namespace

void quantized_linears(const QuantizedLinearsParams& params, const ThreadPool& pool) {
  static thread_local Buffer shared;
  const int64_t num_rows = params.num_rows, tiles = num_row_tiles(num_rows);
  int64_t widest = 0;
  for (int64_t i = 0; i < params.num_linears; ++i) widest = std::max(widest, params.linears[i].in_features);
  const bool own = num_rows <= kOwnRows;
  if (!own) rows_in(shared, num_rows, widest);
  Buffer& caller = shared;  // the caller's, in every thread
  std::vector<Step> steps(2 * params.num_linears);

  pool.parallel_for(pool.num_threads, 1, [&](int64_t, int64_t) {
    static thread_local Buffer mine;
    for (int64_t i = 0; i < params.num_linears; ++i) {
      const QuantizedLinear& linear = params.linears[i];
      const QuantizedRows rows = rows_in(own ? mine : caller, num_rows, linear.in_features);
      const auto quantize = [&](int64_t begin, int64_t end) {
        PAGEDKERN_CALL_SIMD(quantize_tiles, (linear, num_rows, params.eps, begin, end, rows));
      };
      if (!own) steps[2 * i].run(tiles, [&](int64_t tile) { quantize(tile, tile + 1); });
      const Cut cut(linear, num_rows, pool.num_threads);
      bool ready = !own;
      steps[2 * i + 1].run(cut.pieces, [&](int64_t piece) {
        // Only who holds a piece of this linear may read its input: a later linear may write there.
        if (!ready) quantize(0, tiles);
        ready = true;
        run_piece(linear, num_rows, cut, rows, piece);
      });
    }
  });
}

}  // namespace pagedkern::cpu
