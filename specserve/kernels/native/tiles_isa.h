// Products by tiles: what is alike whatever the numbers are. Each isa_*.cc that multiplies tiles says how, as a `Way`:
//
//   kRows, kInputs             rows that are multiplied together, inputs of a tile
//   row_bytes(steps)           of what `split` writes for a row of a block of so many tiles, a multiple of 64
//   split(x, rows, inputs, steps, to)
//                              prepares the first `inputs` numbers of each of these rows for so many tiles
//   begin(rows), end()         before and after chunks of at most so many rows
//   kMostSteps                 after so many the tiles of sums may be stored and loaded again, so that inputs are multiplied
//                              slice by slice; 0: not
//   multiply(parts, weights, steps, rows, ahead, kept, sums, stride)
//                              sums [rows, kWidth], in lines of `stride` floats, = the rows that were split, times a panel's
//                              weights in so many steps, added to those that were kept of slices before [kRows, kWidth]
//                              (null: there are none). Memory is asked for weights ahead. What lies behind the parts may
//                              be read, up to a whole tile, and sums of more rows may be written, up to kRows
#pragma once

#define LANES 16
#include "digits_isa.h"

namespace specserve {
namespace {

constexpr int kOutputs = 16;           // of a tile
constexpr int kWidth = 4 * kOutputs;   // of a panel, whose tiles of weights follow each other
constexpr int64_t kTileBytes = 1024;   // of weights
constexpr int64_t kStep = 4 * kTileBytes;
constexpr int64_t kPanelsAtOnce = 4;   // that share the slices of rows in the cache

// The lines of each tile of weights that memory is asked for while another is multiplied, so many bytes before it. One chunk
// asks for the tiles that come soon. Several share the next panel among them: the first would wait for all of its memory,
// and the others for none.
struct Ahead {
  int64_t bytes, first, last;

  template <int tile>
  void ask(const char* weights) const {
    const char* from = weights + bytes + tile * kTileBytes;
    if (bytes != 3 * kTileBytes) {
      for (int64_t line = first; line < last; line += kLine) __builtin_prefetch(from + line, 0, 2);
    } else {
      for (int64_t line = 0; line < kTileBytes; line += kLine) __builtin_prefetch(from + line);
    }
  }
};

template <class Way>
int64_t steps_of_block(const Matmul& call) {
  return (least(call.block, call.d_in) + Way::kInputs - 1) / Way::kInputs;
}

template <class Way>
int64_t row_bytes(const Matmul& call) {
  return blocks_of(call) * Way::row_bytes(steps_of_block<Way>(call));
}

// The rows order[begin:end], one chunk: block after block.
template <class Way>
void split(const Matmul& call, int64_t begin, int64_t end, char* to) {
  const int64_t rows = end - begin, steps = steps_of_block<Way>(call);
  const float* x[Way::kRows];
  for (int64_t block = 0; block < call.d_in; block += call.block, to += rows * Way::row_bytes(steps)) {
    for (int64_t row = 0; row < rows; ++row) x[row] = call.x + call.order[begin + row] * call.d_in + block;
    Way::split(x, rows, least(call.block, call.d_in - block), steps, to);
  }
}

// A part of each block's inputs, which is all of them but where a matrix of one block is multiplied slice by slice.
struct Slice {
  int64_t first, steps;
  bool is_last;
};

// One panel, one chunk of rows, and the last slice; `sums` has room for those of two chunks.
template <class Way>
void multiply_chunk(const Matmul& call, int64_t group, int64_t panel, int64_t begin, int64_t end, const char* parts,
                    const char* weights, const Slice& slice, const Ahead& ahead, const float* kept, float* sums) {
  const int64_t num_panels = (call.d_out + kWidth - 1) / kWidth, num_blocks = blocks_of(call);
  const int64_t rows = end - begin, column = panel * kWidth, columns = least(kWidth, call.d_out - column);
  if (Way::kMostSteps && !call.scale && !call.add && rows == Way::kRows && columns == kWidth &&
      call.order[end - 1] - call.order[begin] == rows - 1) {
    float* y = call.y + call.order[begin] * call.d_out + column;
    return Way::multiply(parts, weights, slice.steps, rows, ahead, kept, y, call.d_out);
  }
  float* totals = num_blocks > 1 ? sums + Way::kRows * kWidth : sums;
  for (int64_t block = 0; block < num_blocks; ++block) {
    Way::multiply(parts, weights, slice.steps, rows, ahead, kept, sums, kWidth);
    parts += rows * Way::row_bytes(slice.steps), weights += slice.steps * kStep;
    if (!call.scale) continue;
    const auto at_block = [&](const void* first, int64_t at) {
      return load_scales<kWidth>(call, first, group * num_panels + panel, block, num_blocks, at);
    };
    for (int64_t row = 0; row < rows; ++row) {
      float of_x = 0.0f;
      if (call.offset) {
        const int64_t first = block * call.block, inputs = least(call.block, call.d_in - first);
        of_x = sum_of(call.x + call.order[begin + row] * call.d_in + first, inputs);
      }
      for (int64_t at = 0; at < columns; at += 16) {
        Floats sum = load_floats(sums + row * kWidth + at) * at_block(call.scale, at);
        if (call.offset) sum += at_block(call.offset, at) * of_x;
        store(totals + row * kWidth + at, block ? load_floats(totals + row * kWidth + at) + sum : sum);
      }
    }
  }
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t place = call.order[begin + row] * call.d_out + column;
    for (int64_t at = 0; at < columns; at += 16) {
      Floats total = load_floats(totals + row * kWidth + at);
      if (call.add) total += load_part(call.add + place + at, columns - at);
      store_part(call.y + place + at, total, columns - at);
    }
  }
}

// Several panels and chunks of rows are multiplied slice by slice, so that a slice of all rows stays in the cache until all
// of these panels are multiplied by it.
template <class Way>
void matmul(const Matmul& call, int64_t group, int64_t first, int64_t last, int64_t begin, int64_t end,
            const char* parts) {
  constexpr int64_t kSums = Way::kRows * kWidth;
  const int64_t steps = steps_of_block<Way>(call), panel_bytes = blocks_of(call) * steps * kStep;
  const int64_t chunks = (end - begin + Way::kRows - 1) / Way::kRows;
  const char* weights = static_cast<const char*>(call.panels) + group * ((call.d_out + kWidth - 1) / kWidth) * panel_bytes;
  const bool is_sliced = Way::kMostSteps && chunks > 1 && last - first > 1 && blocks_of(call) == 1;
  const int64_t slices = is_sliced ? (steps + Way::kMostSteps - 1) / Way::kMostSteps : 1;
  const int64_t of_slice = (steps + slices - 1) / slices, at_once = slices > 1 ? kPanelsAtOnce : 1;
  float* sums = scratch((2 + (slices > 1 ? at_once * chunks : 0)) * kSums);
  Way::begin(least(Way::kRows, end - begin));
  for (int64_t panels = first; panels < last; panels += at_once) {
    const int64_t panels_end = least(last, panels + at_once);
    for (int64_t from = 0; from < steps; from += of_slice) {
      const Slice slice = {from, least(of_slice, steps - from), from + of_slice >= steps};
      for (int64_t panel = panels; panel < panels_end; ++panel) {
        const char* own = weights + panel * panel_bytes + slice.first * kStep;
        // the same slice of the next panel, or the first panel's next one
        const int64_t next = slices == 1 || panel + 1 < panels_end ? panel_bytes
                             : slice.is_last                       ? panel_bytes - slice.first * kStep
                                             : of_slice * kStep - (panel - panels) * panel_bytes;
        for (int64_t chunk = 0; chunk < chunks; ++chunk) {
          const int64_t row = begin + chunk * Way::kRows, row_end = least(end, row + Way::kRows);
          const char* of_rows = parts + (row - begin) * blocks_of(call) * Way::row_bytes(steps) +
                                (row_end - row) * (Way::row_bytes(slice.first) - Way::row_bytes(0));
          const Ahead ahead = {chunks > 1 ? next : 3 * kTileBytes, chunk * kTileBytes / chunks / kLine * kLine,
                               (chunk + 1) * kTileBytes / chunks / kLine * kLine};
          float* place = sums + (2 + (panel - panels) * chunks + chunk) * kSums;
          const float* kept = from ? place : nullptr;
          if (slice.is_last) {
            multiply_chunk<Way>(call, group, panel, row, row_end, of_rows, own, slice, ahead, kept, sums);
          } else {
            Way::multiply(of_rows, own, slice.steps, row_end - row, ahead, kept, place, kWidth);
          }
        }
      }
    }
  }
  Way::end();
}

// `chunks` of rows make a unit of `matmul`.
template <class Way>
constexpr Tiles tiles_of(int64_t chunks) {
  const int64_t panels = Way::kMostSteps ? kPanelsAtOnce : 1;
  return {kWidth, Way::kInputs, Way::kRows, chunks * Way::kRows, row_bytes<Way>, split<Way>, matmul<Way>, panels};
}

}  // namespace
}  // namespace specserve
