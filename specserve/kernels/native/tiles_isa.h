// Products by tiles: what is alike whatever the numbers are. Each isa_*.cc that multiplies tiles says how, as a `Way`:
//
//   kRows, kInputs             rows that are multiplied together, inputs of a tile
//   row_bytes(steps)           of what `split` writes for a row of a block of so many tiles, a multiple of 64
//   split(x, rows, inputs, steps, to)
//                              prepares the first `inputs` numbers of each of these rows for so many tiles
//   begin(rows), end()         before and after chunks of at most so many rows
//   multiply<is_first>(parts, weights, steps, rows, sums)
//                              sums [rows, kWidth] = the rows that were split, times a panel's weights in so many steps.
//                              The first chunk asks memory for weights ahead. What lies behind the parts may be read, up
//                              to a whole tile, and sums of more rows may be written, up to kRows
#pragma once

#define LANES 16
#include "digits_isa.h"

namespace specserve {
namespace {

constexpr int kOutputs = 16;           // of a tile
constexpr int kWidth = 4 * kOutputs;   // of a panel, whose tiles of weights follow each other
constexpr int64_t kTileBytes = 1024;   // of weights
constexpr int64_t kStep = 4 * kTileBytes;

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

// One panel and one chunk of rows.
template <class Way, bool is_first>
void multiply_chunk(const Matmul& call, int64_t group, int64_t panel, int64_t begin, int64_t end, const char* parts) {
  const int64_t num_panels = (call.d_out + kWidth - 1) / kWidth, num_blocks = blocks_of(call);
  const int64_t steps = steps_of_block<Way>(call), rows = end - begin;
  const int64_t column = panel * kWidth, columns = least(kWidth, call.d_out - column);
  const char* weights = static_cast<const char*>(call.panels) + (group * num_panels + panel) * num_blocks * steps * kStep;
  float* sums = scratch(2 * Way::kRows * kWidth);
  float* totals = num_blocks > 1 ? sums + Way::kRows * kWidth : sums;
  for (int64_t block = 0; block < num_blocks; ++block) {
    Way::template multiply<is_first>(parts + block * rows * Way::row_bytes(steps), weights + block * steps * kStep, steps, rows, sums);
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

template <class Way>
void matmul(const Matmul& call, int64_t group, int64_t first, int64_t last, int64_t begin, int64_t end,
            const char* parts) {
  const int64_t per_row = row_bytes<Way>(call);
  Way::begin(least(Way::kRows, end - begin));
  for (int64_t panel = first; panel < last; ++panel) {
    multiply_chunk<Way, true>(call, group, panel, begin, least(end, begin + Way::kRows), parts);
    for (int64_t from = begin + Way::kRows; from < end; from += Way::kRows) {
      const char* own = parts + (from - begin) * per_row;
      multiply_chunk<Way, false>(call, group, panel, from, least(end, from + Way::kRows), own);
    }
  }
  Way::end();
}

// `chunks` of rows make a unit of `matmul`.
template <class Way>
constexpr Tiles tiles_of(int64_t chunks) {
  return {kWidth, Way::kInputs, Way::kRows, chunks * Way::kRows, row_bytes<Way>, split<Way>, matmul<Way>};
}

}  // namespace
}  // namespace specserve
