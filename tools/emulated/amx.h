// AMX's instructions one number at a time, in place of the library's file of this name (check_kernels.py).
#pragma once

#include <stdint.h>
#include <string.h>

#include "kernels.h"

namespace specserve {
namespace {

struct Tile {
  char lines[16][64];
  int64_t count;
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
  for (int64_t i = 0; i < tiles[tile].count; ++i) memcpy(tiles[tile].lines[i], static_cast<const char*>(from) + i * stride, 64);
}

template <int tile>
void store(void* to, int64_t stride) {
  for (int64_t i = 0; i < tiles[tile].count; ++i) memcpy(static_cast<char*>(to) + i * stride, tiles[tile].lines[i], 64);
}

// Adds the product of each line of `rows` and each output of `weights`, numbers of T as `read` gives them, to sums of S.
template <class S, class T, class Read>
void add_product(Tile& sums, const Tile& rows, const Tile& weights, Read read) {
  constexpr int kLanes = 4 / sizeof(T);
  for (int64_t row = 0; row < sums.count; ++row) {
    for (int64_t output = 0; output < 16; ++output) {
      S sum = number_at<S>(sums, row, output);
      for (int64_t input = 0; input < 16 * kLanes; ++input) {
        const T weight = number_at<T>(weights, input / kLanes, output * kLanes + input % kLanes);
        sum += read(number_at<T>(rows, row, input)) * read(weight);
      }
      memcpy(sums.lines[row] + output * sizeof(S), &sum, sizeof(S));
    }
  }
}

template <int sums, int rows, int weights>
void add_product_of_halves() {
  add_product<float, uint16_t>(tiles[sums], tiles[rows], tiles[weights],
                               [](uint16_t half) { return float_of(static_cast<uint32_t>(half) << 16); });
}

template <int sums, int rows, int weights>
void add_product_of_bytes() {
  add_product<int32_t, int8_t>(tiles[sums], tiles[rows], tiles[weights], [](int8_t byte) { return int32_t{byte}; });
}

void configure(int64_t lines) {
  for (int i = 0; i < 8; ++i) tiles[i].count = i == 7 ? 16 : lines;
}

void release() {}

}  // namespace
}  // namespace specserve
