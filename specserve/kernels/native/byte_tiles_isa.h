// The products of bytes_isa.h by AMX's tiles, 16 rows at once. The sums of integers are exact in any order, and the floats
// that are made of them are added in the same one, so a row has the same bits as by dot products, which multiply the rows
// that fill no tile.
#pragma once

#include "amx.h"
#include "bytes_isa.h"

namespace specserve {
namespace {
namespace bytes {

constexpr int64_t kTileRows = 16;

// Inputs of a tile: as many as a chunk's digits hold whole, which are a multiple of 16.
inline int64_t inputs_of_tile(const Shape& shape) {
  return shape.digit % 64 == 0 ? 64 : shape.digit % 32 == 0 ? 32 : 16;
}

// kTileRows rows are [block, chunk, row: Head | block, chunk, tile, digit, row, input]; fewer are as bytes_isa.h has them.
template <Format format>
void split_tile(const Matmul& call, int64_t begin, int64_t end, char* to) {
  if (end - begin < kTileRows) return split<format>(call, begin, end, to);
  const Shape shape = Shape::of(call, kInputs<format>);
  const int64_t piece = inputs_of_tile(shape), tile = kTileRows * piece;
  for (int64_t row = 0; row < kTileRows; ++row) {
    split_row<format>(call, shape, begin + row,
                      {to + row * sizeof(Head), to + kTileRows * shape.head_bytes() + row * piece, kTileRows * sizeof(Head),
                       kTileRows * kDigits * shape.digit, tile, piece, kDigits * tile});
  }
}

// A chunk of a panel's weights as tiles have them: lines of four inputs of a vector's outputs, vector by vector.
struct ByteTiles {
  alignas(kLine) char lines[kVectors][kChunk / kLanes][kLine];
};

template <Format format>
inline void unpack(const char* weights, int64_t steps, ByteTiles& to) {
  for (int64_t i = 0; i < steps; ++i, weights += kStep) {
    for (int64_t line = 0; line < kStep; line += kLine) __builtin_prefetch(weights + kAhead + line);
    UNROLLED for (int v = 0; v < kVectors; ++v) {
      UNROLLED for (int part = 0; part < kParts<format>; ++part) {
        const Quads bytes = bytes_of<format>(load<Quads>(weights + v * 4 * LANES), part);
        memcpy(to.lines[v][i * kParts<format> + part], &bytes, sizeof(bytes));
      }
    }
  }
}

// The sums [vector, digit, row, output] of a chunk's weights times the digits of 16 rows.
inline void multiply_tiles(const char* digits, const Shape& shape, int64_t inputs, const ByteTiles& weights,
                           int32_t (&sums)[kVectors][kDigits][kTileRows][LANES]) {
  zero<0>(), zero<1>(), zero<2>(), zero<3>();
  for (int64_t at = 0; at < shape.digit; at += inputs, digits += kDigits * kTileRows * inputs) {
    specserve::load<4>(digits, inputs), specserve::load<5>(digits + kTileRows * inputs, inputs);
    specserve::load<6>(weights.lines[0][at / kLanes]), specserve::load<7>(weights.lines[1][at / kLanes]);
    add_product_of_positive_bytes<0, 4, 6>(), add_product_of_positive_bytes<1, 5, 6>();
    add_product_of_positive_bytes<2, 4, 7>(), add_product_of_positive_bytes<3, 5, 7>();
  }
  specserve::store<0>(sums[0][0], kLine), specserve::store<1>(sums[0][1], kLine);
  specserve::store<2>(sums[1][0], kLine), specserve::store<3>(sums[1][1], kLine);
}

// Adds what a tile of rows' sums stand for to totals [row, kPanel].
inline void add_up(const int32_t (&sums)[kVectors][kDigits][kTileRows][LANES], const Head* head, const Floats (&scales)[kVectors],
                   const Floats (&offsets)[kVectors], bool has_offset, float* totals) {
  for (int row = 0; row < kTileRows; ++row, ++head, totals += kPanel) {
    const Ints from = begin(head->begin[1]);
    UNROLLED for (int v = 0; v < kVectors; ++v) {
      const Ints whole = together(specserve::load<Sum>(sums[v][0][row]), specserve::load<Sum>(sums[v][1][row])) + from;
      Floats total = load_floats(totals + v * LANES);
      total += __builtin_convertvector(whole, Floats) * head->unit * scales[v];
      if (has_offset) total += offsets[v] * head->sum;
      store(totals + v * LANES, total);
    }
  }
}

// y of so many rows, a multiple of kTileRows, and one panel.
template <Format format>
void multiply_by_tiles(const Matmul& call, const Shape& shape, int64_t panel, const int32_t* order, const char* rows,
                       int64_t count, int64_t column) {
  const int64_t per_row = shape.row_bytes(), inputs = inputs_of_tile(shape);
  const char* weights = static_cast<const char*>(call.panels) + panel * shape.blocks * shape.steps * kStep;
  const char *heads = rows, *digits = rows + kTileRows * shape.head_bytes();  // of the first rows' chunk
  float* totals = scratch(count * kPanel);
  memset(totals, 0, count * kPanel * sizeof(float));
  ByteTiles unpacked = {};
  // of two tiles of rows: while one is multiplied, the one before it is added up
  alignas(kLine) int32_t sums[2][kVectors][kDigits][kTileRows][LANES];
  for (int64_t block = 0; block < shape.blocks; ++block) {
    Floats scales[kVectors], offsets[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      const auto at_block = [&](const void* first) {
        return load_scales<kPanel>(call, first, panel, block, shape.blocks, v * LANES);
      };
      scales[v] = call.scale ? at_block(call.scale) : splat(1.0f);
      offsets[v] = call.offset ? at_block(call.offset) : splat(0.0f);
    }
    for (int64_t step = 0, upto; step < shape.steps; step = upto) {
      upto = least(shape.steps, step + kChunk / kInputs<format>);
      unpack<format>(weights, upto - step, unpacked);
      weights += (upto - step) * kStep;
      multiply_tiles(digits, shape, inputs, unpacked, sums[0]);
      for (int64_t row = 0, turn = 0; row < count; row += kTileRows, turn ^= 1) {
        const int64_t next = row + kTileRows;
        if (next < count) multiply_tiles(digits + next * per_row, shape, inputs, unpacked, sums[turn ^ 1]);
        const Head* head = reinterpret_cast<const Head*>(heads + row * per_row);
        add_up(sums[turn], head, scales, offsets, call.offset != nullptr, totals + row * kPanel);
      }
      heads += kTileRows * sizeof(Head), digits += kTileRows * kDigits * shape.digit;
    }
  }
  for (int64_t row = 0; row < count; ++row) {
    for (int v = 0; v < kVectors; ++v) {
      const int64_t from = column + v * LANES, y = order[row] * call.d_out + from;
      Floats total = load_floats(totals + row * kPanel + v * LANES);
      if (call.add) total += load_part(call.add + y, call.d_out - from);
      store_part(call.y + y, total, call.d_out - from);
    }
  }
}

template <Format format>
void matmul_by_tiles(const Matmul& call, int64_t group, int64_t first, int64_t last, int64_t begin, int64_t end,
                     const char* rows) {
  const Shape shape = Shape::of(call, kInputs<format>);
  const int64_t num_panels = (call.d_out + kPanel - 1) / kPanel, whole = (end - begin) / kTileRows * kTileRows;
  if (whole) {
    configure(kTileRows, 6, inputs_of_tile(shape));
    for (int64_t panel = first; panel < last; ++panel) {
      multiply_by_tiles<format>(call, shape, group * num_panels + panel, call.order + begin, rows, whole, panel * kPanel);
    }
    release();
  }
  if (begin + whole < end) {
    matmul<format>(call, group, first, last, begin + whole, end, rows + whole * shape.row_bytes());
  }
}

template <Format format>
constexpr Tiles kByTiles = {kPanel, kInputs<format>, kTileRows, 8 * kTileRows, row_bytes<format>, split_tile<format>,
                            matmul_by_tiles<format>};

}  // namespace bytes
}  // namespace
}  // namespace specserve
