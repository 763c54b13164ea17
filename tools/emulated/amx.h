// AMX's instructions one number at a time, in place of the library's file of this name (check_kernels.py).
#pragma once

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "kernels.h"

namespace specserve {
namespace {

struct Tile {
  char lines[16][64];
  int64_t count, bytes;
} tiles[8];

template <class T>
T number_at(const Tile& tile, int64_t line, int64_t at) {
  T number;
  memcpy(&number, tile.lines[line] + at * sizeof(T), sizeof(T));
  return number;
}

template <int tile>
void zero() {
  memset(tiles[tile].lines, 0, sizeof(tiles[tile].lines));
}

template <int tile>
void load(const void* from, int64_t stride = 64) {
  for (int64_t i = 0; i < tiles[tile].count; ++i) memcpy(tiles[tile].lines[i], static_cast<const char*>(from) + i * stride, tiles[tile].bytes);
}

template <int tile>
void store(void* to, int64_t stride) {
  for (int64_t i = 0; i < tiles[tile].count; ++i) {
    memcpy(static_cast<char*>(to) + i * stride, tiles[tile].lines[i], tiles[tile].bytes);
  }
}

// Adds the product of each line of `rows` and each output of `weights`, numbers of T and W as `read` gives them, to sums
// of S.
template <class S, class T, class W, class Read>
void add_product(Tile& sums, const Tile& rows, const Tile& weights, Read read) {
  if (rows.bytes != 4 * weights.count || sums.count != rows.count) abort();  // the processor would raise an exception
  constexpr int kLanes = 4 / sizeof(T);
  for (int64_t row = 0; row < sums.count; ++row) {
    for (int64_t output = 0; output < 16; ++output) {
      S sum = number_at<S>(sums, row, output);
      for (int64_t input = 0; input < rows.bytes / int64_t{sizeof(T)}; ++input) {
        const W weight = number_at<W>(weights, input / kLanes, output * kLanes + input % kLanes);
        sum += read(number_at<T>(rows, row, input)) * read(weight);
      }
      memcpy(sums.lines[row] + output * sizeof(S), &sum, sizeof(S));
    }
  }
}

template <int sums, int rows, int weights>
void add_product_of_halves() {
  add_product<float, uint16_t, uint16_t>(tiles[sums], tiles[rows], tiles[weights],
                               [](uint16_t half) { return float_of(static_cast<uint32_t>(half) << 16); });
}

template <int sums, int rows, int weights>
void add_product_of_bytes() {
  add_product<int32_t, int8_t, int8_t>(tiles[sums], tiles[rows], tiles[weights], [](int32_t byte) { return byte; });
}

template <int sums, int rows, int weights>
void add_product_of_positive_bytes() {
  add_product<int32_t, int8_t, uint8_t>(tiles[sums], tiles[rows], tiles[weights], [](int32_t byte) { return byte; });
}

void configure(int64_t lines, int first = 7, int64_t bytes = 64) {
  for (int i = 0; i < 8; ++i) {
    tiles[i].count = i >= first ? bytes / 4 : lines;
    tiles[i].bytes = i >= 4 && i < first ? bytes : 64;
  }
}

void release() {}

}  // namespace
}  // namespace specserve
