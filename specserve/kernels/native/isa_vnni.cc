// Products of 4-bit weights by AVX-512's dot products of bytes (VNNI), which add four products to a sum of 32 bits where a
// multiplication of floats adds one, and need no floats made of the weights. Activations are cut into digits as for tiles
// (digits_isa.h). (For int8 weights that brings nothing: three digits cost what it saves.)
//
// An instruction multiplies bytes without a sign by bytes with one, so weights come with a number added that makes them
// positive: 8 (but for those that begin at 0), or 12 (e2m1, whose doubles go from -12 to 12). As many times the digits' sum is what the sums begin with,
// below zero.

#include "digits_isa.h"

namespace specserve {
namespace {

constexpr int kPanel = 2 * kOutputs;  // outputs of a panel
constexpr int kRowTile = 4;           // rows of which the sums of three digits, and the weights, stay in registers
constexpr int kLanes = 4;             // bytes of a lane
constexpr int64_t kAhead = 4096;      // bytes; see kernels_isa.h

constexpr int kInputs = 8;            // of a line of weights: of a lane of 32 bits
constexpr int kParts = kInputs / kLanes;

template <Format format>
constexpr int kAdded = format == Format::kInt4 ? 8 : format == Format::kUint4 ? 0 : 12;

// Of a row's block: what its digits are multiples of, its sum, and what the sums of each digit begin with.
struct Head {
  float unit, sum;
  int32_t begin[kDigits], unused[3];
};

// A row is [block: Head | block, digit, input].
struct Shape {
  int64_t blocks, lines, digit;  // blocks; lines of a block's weights; bytes of a block's digit

  static Shape of(const Matmul& call) {
    const int64_t lines = (least(call.block, call.d_in) + kInputs - 1) / kInputs;
    return {blocks_of(call), lines, (lines * kInputs + 15) / 16 * 16};
  }

  int64_t row_bytes() const {
    const int64_t bytes = blocks * static_cast<int64_t>(sizeof(Head) + kDigits * digit);
    return (bytes + kLine - 1) / kLine * kLine;
  }
};

int64_t row_bytes(const Matmul& call) {
  return Shape::of(call).row_bytes();
}

template <Format format>
void split(const Matmul& call, int64_t begin, int64_t end, char* to) {
  const Shape shape = Shape::of(call);
  for (int64_t row = begin; row < end; ++row, to += shape.row_bytes()) {
    char* digits = to + shape.blocks * sizeof(Head);
    for (int64_t block = 0; block < shape.blocks; ++block, digits += kDigits * shape.digit) {
      const int64_t first = block * call.block, inputs = least(call.block, call.d_in - first);
      const float* x = call.x + call.order[row] * call.d_in + first;
      Head head = {};
      const float factor = factor_of(x, inputs, head.unit);
      for (int64_t at = 0; at < shape.digit; at += 16) cut(part(x + at, inputs - at), factor, digits + at, shape.digit);
      int64_t sum = 0;
      for (int digit = 0; digit < kDigits; ++digit) {
        int32_t of_digit = 0;
        for (int64_t at = 0; at < shape.digit; ++at) of_digit += static_cast<int8_t>(digits[digit * shape.digit + at]);
        head.begin[digit] = -kAdded<format> * of_digit;
        sum = sum * 256 + of_digit;
      }
      head.sum = static_cast<float>(sum) * head.unit;
      memcpy(to + block * sizeof(Head), &head, sizeof(head));
    }
  }
}

inline __m512i line_of(const char* from) { return _mm512_loadu_si512(from); }
inline Floats floats_of(__m512i x) { return reinterpret_cast<Floats>(_mm512_cvtepi32_ps(x)); }

// A line's weights as bytes: of the first four inputs of each lane, and of the others.
template <Format format>
inline void bytes_of(__m512i line, __m512i (&bytes)[kParts]) {
  const __m512i nibbles = _mm512_set1_epi8(15);
  bytes[0] = _mm512_and_si512(line, nibbles);
  bytes[1] = _mm512_and_si512(_mm512_srli_epi16(line, 4), nibbles);
  if constexpr (format == Format::kFp4) {
    const __m128i doubles = _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0);  // with 12 added
    for (__m512i& each : bytes) each = _mm512_shuffle_epi8(_mm512_broadcast_i32x4(doubles), each);
  }
}

// Adds what a block's sums of integers come to, of 16 outputs. (A function for each half of a panel, since a loop that
// is not unrolled would have the sums in memory.)
template <int R>
inline void add_block(const Matmul& call, int64_t panel, int64_t block, int64_t blocks, int64_t at,
                      const Head* const* heads, const Ints (&sums)[R][kDigits], Floats (&totals)[R]) {
  const Floats scale = scales_at<kPanel>(call, call.scale, panel, block, blocks, at);
  for (int r = 0; r < R; ++r) {
    Floats sum = floats_of((__m512i)sums[r][0]) * 256.0f + floats_of((__m512i)sums[r][1]);
    sum = sum * 256.0f + floats_of((__m512i)sums[r][2]);
    totals[r] += sum * heads[r]->unit * scale;
    if (call.offset) totals[r] += scales_at<kPanel>(call, call.offset, panel, block, blocks, at) * heads[r]->sum;
  }
}

// y of R rows and one panel. The first rows ask memory for weights ahead.
template <Format format, int R>
void multiply(const Matmul& call, const Shape& shape, int64_t place, const int32_t* order, const char* rows,
              int64_t column, bool is_first) {
  const int64_t per_row = shape.row_bytes();
  const char* weights = static_cast<const char*>(call.panels) + place * shape.blocks * shape.lines * 2 * kLine;
  Floats totals[2][R];
  for (int r = 0; r < R; ++r) totals[0][r] = totals[1][r] = Floats{};
  for (int64_t block = 0; block < shape.blocks; ++block) {
    const Head* heads[R];
    const char* digits[R];
    Ints sums[2][R][kDigits];
    for (int r = 0; r < R; ++r) {
      heads[r] = reinterpret_cast<const Head*>(rows + r * per_row) + block;
      digits[r] = rows + r * per_row + shape.blocks * sizeof(Head) + block * kDigits * shape.digit;
      for (int digit = 0; digit < kDigits; ++digit) {
        sums[0][r][digit] = sums[1][r][digit] = (Ints)_mm512_set1_epi32(heads[r]->begin[digit]);
      }
    }
    for (int64_t line = 0; line < shape.lines; ++line, weights += 2 * kLine) {
      if (is_first) __builtin_prefetch(weights + kAhead), __builtin_prefetch(weights + kAhead + kLine);
      __m512i left[kParts], right[kParts];
      bytes_of<format>(line_of(weights), left), bytes_of<format>(line_of(weights + kLine), right);
      for (int part = 0; part < kParts; ++part) {
        const int64_t at = (line * kParts + part) * kLanes;
        for (int r = 0; r < R; ++r) {
          for (int digit = 0; digit < kDigits; ++digit) {
            int32_t four;
            memcpy(&four, digits[r] + digit * shape.digit + at, sizeof(four));
            const __m512i inputs = _mm512_set1_epi32(four);
            sums[0][r][digit] = (Ints)_mm512_dpbusd_epi32((__m512i)sums[0][r][digit], left[part], inputs);
            sums[1][r][digit] = (Ints)_mm512_dpbusd_epi32((__m512i)sums[1][r][digit], right[part], inputs);
          }
        }
      }
    }
    add_block<R>(call, place, block, shape.blocks, 0, heads, sums[0], totals[0]);
    add_block<R>(call, place, block, shape.blocks, kOutputs, heads, sums[1], totals[1]);
  }
  for (int r = 0; r < R; ++r) {
    for (int half = 0; half < 2; ++half) {
      const int64_t from = column + half * kOutputs, y = order[r] * call.d_out + from;
      Floats total = totals[half][r];
      if (call.add) total += part(call.add + y, call.d_out - from);
      put_part(call.y + y, total, call.d_out - from);
    }
  }
}

template <Format format>
void matmul_bytes(const Matmul& call, int64_t group, int64_t first, int64_t last, int64_t begin, int64_t end,
                  const char* rows) {
  const Shape shape = Shape::of(call);
  const int64_t num_panels = (call.d_out + kPanel - 1) / kPanel, per_row = shape.row_bytes();
  for (int64_t panel = first; panel < last; ++panel) {
    const int64_t place = group * num_panels + panel;
    int64_t tile;
    for (int64_t row = begin; row < end; row += tile) {
      const int64_t left = end - row, tiles = (left + kRowTile - 1) / kRowTile;
      tile = (left + tiles - 1) / tiles;  // tiles of like size
      constexpr decltype(&multiply<format, 1>) kRuns[kRowTile] = {multiply<format, 1>, multiply<format, 2>,
                                                                  multiply<format, 3>, multiply<format, 4>};
      kRuns[tile - 1](call, shape, place, call.order + row, rows + (row - begin) * per_row, panel * kPanel, row == begin);
    }
  }
}

template <Format format>
constexpr Tiles tiles_for = {kPanel, kInputs, 1, 48, row_bytes, split<format>, matmul_bytes<format>};

}  // namespace

const Tiles* tiles_vnni_int4() { return &tiles_for<Format::kInt4>; }
const Tiles* tiles_vnni_uint4() { return &tiles_for<Format::kUint4>; }
const Tiles* tiles_vnni_fp4() { return &tiles_for<Format::kFp4>; }

}  // namespace specserve
