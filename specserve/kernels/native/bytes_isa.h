// Products of weights of 4 bits, and of 8 where an instruction adds four products to a sum of 32 bits, as sums of products
// of bytes, for which no floats are made of the weights. Activations are cut into two digits (digits_isa.h), those of a
// chunk of inputs with one unit: integers of 16 bits, of which a third digit would take half as long again.
#pragma once

#include "digits_isa.h"

// Loops over what registers hold, which GCC unrolls too late by itself: their arrays went through memory.
#define UNROLLED _Pragma("GCC unroll 16")

namespace specserve {
namespace {
namespace bytes {

typedef uint8_t Quads __attribute__((vector_size(4 * LANES)));  // four inputs of each output

constexpr int kLanes = 4;  // bytes of a lane
constexpr int kDigits = 2;
constexpr int64_t kMostInputs = 128;  // that share a unit
static_assert(kMostInputs * 128 * 128 * 257 < int64_t{1} << 31, "sums of both digits together fit into 32 bits");

// Inputs of a lane of weights, which are those of a step, and how many vectors of bytes they become.
template <Format format>
constexpr int kInputs = 32 / kBits[static_cast<int>(format)];
template <Format format>
constexpr int kParts = kInputs<format> / kLanes;

template <int lanes>
struct SomeInts {
  typedef int32_t Type __attribute__((vector_size(4 * lanes)));
};

// The halves of a vector added to each other, again and again, until so many lanes are left.
template <int left, int lanes = LANES>
inline typename SomeInts<left>::Type fold(typename SomeInts<lanes>::Type x) {
  if constexpr (lanes == left) {
    return x;
  } else {
    typedef typename SomeInts<lanes / 2>::Type Half;
    return fold<left, lanes / 2>(load<Half>(&x) + load<Half>(reinterpret_cast<const char*>(&x) + sizeof(Half)));
  }
}

// What an instruction set says of itself:
//
//   kChunk      inputs at most that share a unit, whose products a sum can hold
//   kVectors    of a panel
//   kRows       that are multiplied together, whose sums stay in registers
//   kIsSigned   whether weights are bytes with a sign, and not positive ones
//   Sum         sums of products of bytes, for each output of a vector: begin, add for each four inputs
//   together    256 times the sums of the upper digit, and those of the lower one
//   begin_of    what a digit's Sum begins with, by the sums of its inputs 4 i, 4 i + 1, 4 i + 2 and 4 i + 3, and by what is
//               added to weights that are to be positive
//   kHasInt8    whether weights of 8 bits are multiplied so too
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
constexpr int64_t kChunk = kMostInputs;
constexpr int kVectors = 2, kRows = LANES == 16 ? 4 : 3;
constexpr bool kIsSigned = false, kHasInt8 = true;
typedef Ints Sum;
inline int32_t begin_of(SomeInts<kLanes>::Type sums, int added) {
  return -added * (sums[0] + sums[1] + sums[2] + sums[3]);
}
inline Sum begin(int32_t from) { return from - Ints{}; }
inline void add(Sum& sum, Quads weights, Ints digits) {
#if LANES == 16
  sum = (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weights, (__m512i)digits);
#else
  sum = (Ints)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)weights, (__m256i)digits);
#endif
}
inline Ints together(Sum high, Sum low) { return high * 256 + low; }
#elif LANES >= 8
// Two products at a time in 16 bits. Sums may leave these on the way, since what they begin with brings them back.
constexpr int64_t kChunk = 32;
constexpr int kVectors = 2, kRows = 3;
constexpr bool kIsSigned = false, kHasInt8 = false;
typedef int16_t Sum __attribute__((vector_size(4 * LANES)));
static_assert(kChunk / 2 * 15 * 128 < 1 << 15, "the sums of a chunk fit into 16 bits");
inline int32_t begin_of(SomeInts<kLanes>::Type sums, int added) {
  const int32_t low = -added * (sums[0] + sums[1]), high = -added * (sums[2] + sums[3]);
  return static_cast<int32_t>((static_cast<uint32_t>(low) & 0xffff) | static_cast<uint32_t>(high) << 16);
}
inline Sum begin(int32_t from) { return (Sum)(from - Ints{}); }
#if LANES == 8
inline Sum products(Quads weights, Ints digits) { return (Sum)_mm256_maddubs_epi16((__m256i)weights, (__m256i)digits); }
inline Ints wide(Sum sum, int16_t by) { return (Ints)_mm256_madd_epi16((__m256i)sum, _mm256_set1_epi16(by)); }
#else
inline Sum products(Quads weights, Ints digits) { return (Sum)_mm512_maddubs_epi16((__m512i)weights, (__m512i)digits); }
inline Ints wide(Sum sum, int16_t by) { return (Ints)_mm512_madd_epi16((__m512i)sum, _mm512_set1_epi16(by)); }
#endif
inline Ints together(Sum high, Sum low) { return wide(high, 256) + wide(low, 1); }
inline void add(Sum& sum, Quads weights, Ints digits) {
  sum += products(weights, digits);
#if defined(__AVX2__)
  __asm__("" : "+v"(sum));  // else GCC makes many products before it adds them, for which there are no registers
#endif
}
#else
constexpr int kVectors = 4;
constexpr bool kIsSigned = true;
inline int32_t begin_of(SomeInts<kLanes>::Type, int) { return 0; }
#if defined(__ARM_FEATURE_DOTPROD)
constexpr int64_t kChunk = kMostInputs;
constexpr int kRows = 2;
constexpr bool kHasInt8 = true;
typedef int32x4_t Sum;
inline Sum begin(int32_t) { return vdupq_n_s32(0); }
inline void add(Sum& sum, Quads weights, Ints digits) { sum = vdotq_s32(sum, (int8x16_t)weights, (int8x16_t)digits); }
inline Ints together(Sum high, Sum low) { return (Ints)high * 256 + (Ints)low; }
#else
constexpr int64_t kChunk = 32;
constexpr int kRows = 1;
constexpr bool kHasInt8 = false;
struct Sum {
  int16x8_t low, high;  // of two outputs each
};
inline Sum begin(int32_t) { return {vdupq_n_s16(0), vdupq_n_s16(0)}; }
inline void add(Sum& sum, Quads weights, Ints digits) {
  sum.low = vmlal_s8(sum.low, vget_low_s8((int8x16_t)weights), vget_low_s8((int8x16_t)digits));
  sum.high = vmlal_high_s8(sum.high, (int8x16_t)weights, (int8x16_t)digits);
}
inline Ints wide(Sum sum) { return (Ints)vpaddq_s32(vpaddlq_s16(sum.low), vpaddlq_s16(sum.high)); }
inline Ints together(Sum high, Sum low) { return wide(high) * 256 + wide(low); }
#endif
#endif

constexpr int64_t kPanel = kVectors * LANES;  // outputs of a panel
constexpr int64_t kStep = 4 * kPanel;         // bytes of a step of weights
constexpr int64_t kAhead = 4096;              // bytes; see kernels_isa.h

// What makes weights positive: 128 or 8 (but for those that begin at 0), or 12 (e2m1, whose doubles go from -12 to 12).
template <Format format>
constexpr int kAdded = kIsSigned || format == Format::kUint4 ? 0
                       : format == Format::kInt8             ? 128
                       : format == Format::kInt4             ? 8
                                                             : 12;

// Of a row's chunk: what its digits are multiples of, its sum, and what each digit's sums of products begin with.
struct Head {
  float unit, sum;
  int32_t begin[kDigits];
};

// A row is [block, chunk: Head | block, chunk, digit, input].
struct Shape {
  int64_t blocks, chunks, steps, digit;  // blocks; chunks and steps of a block; bytes of a chunk's digit

  static Shape of(const Matmul& call, int64_t of_step) {
    const int64_t steps = (least(call.block, call.d_in) + of_step - 1) / of_step, inputs = steps * of_step;
    return {blocks_of(call), (inputs + kChunk - 1) / kChunk, steps, (least(inputs, kChunk) + 15) / 16 * 16};
  }

  int64_t head_bytes() const { return blocks * chunks * static_cast<int64_t>(sizeof(Head)); }
  int64_t row_bytes() const {
    return (head_bytes() + blocks * chunks * kDigits * digit + kLine - 1) / kLine * kLine;
  }
};

template <Format format>
int64_t row_bytes(const Matmul& call) {
  return Shape::of(call, kInputs<format>).row_bytes();
}

// Where a row's heads and digits go: the first of each, and how far the next ones are. A digit's bytes lie in pieces.
struct Places {
  char *heads, *digits;
  int64_t next_head, next_chunk, next_digit, piece, next_piece;
};

template <Format format>
void split_row(const Matmul& call, const Shape& shape, int64_t row, const Places& to) {
  char *head_at = to.heads, *digits = to.digits;
  const float* of_row = call.x + call.order[row] * call.d_in;
  for (int64_t i = 0, first = 0, end = call.block; i < shape.blocks * shape.chunks; ++i) {
    const float* x = of_row + first;
    const int64_t inputs = least(least(kChunk, end - first), call.d_in - first);
    first += kChunk;
    if (first >= end) first = end, end += call.block;
    Head head = {};
    const float factor = factor_of<kDigits>(x, inputs, head.unit);
    Ints sums[kDigits] = {};
    char* piece = digits;
    for (int64_t from = 0; from < shape.digit; from += to.piece, piece += to.next_piece) {
      for (int64_t at = 0; at < to.piece; at += LANES) {
        cut(load_part(x + from + at, inputs - from - at), factor, piece + at, to.next_digit, sums);
      }
    }
    int64_t sum = 0;
    for (int digit = 0; digit < kDigits; ++digit) {
      const SomeInts<kLanes>::Type of_lanes = fold<kLanes>(sums[digit]);
      head.begin[digit] = begin_of(of_lanes, kAdded<format>);
      sum = sum * 256 + of_lanes[0] + of_lanes[1] + of_lanes[2] + of_lanes[3];
    }
    if constexpr (sizeof(Sum) == sizeof(Ints) && kMostInputs == kChunk) {  // sums of 32 bits: one vector has it all
      head.begin[1] += 256 * head.begin[0], head.begin[0] = 0;
    }
    head.sum = static_cast<float>(sum) * head.unit;
    memcpy(head_at, &head, sizeof(head));
    head_at += to.next_head, digits += to.next_chunk;
  }
}

template <Format format>
void split(const Matmul& call, int64_t begin, int64_t end, char* to) {
  const Shape shape = Shape::of(call, kInputs<format>);
  for (int64_t row = begin; row < end; ++row, to += shape.row_bytes()) {
    split_row<format>(call, shape, row,
                      {to, to + shape.head_bytes(), sizeof(Head), kDigits * shape.digit, shape.digit, shape.digit, 0});
  }
}

// The bytes of a table of 16 that these name.
inline Quads look_up(const int8_t (&table)[16], Quads names) {
#if LANES == 16
  return (Quads)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(load<__m128i>(table)), (__m512i)names);
#elif LANES == 8
  return (Quads)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(load<__m128i>(table)), (__m256i)names);
#else
  return (Quads)vqtbl1q_s8(load<int8x16_t>(table), (uint8x16_t)names);
#endif
}

// The weights of a lane's first four inputs as bytes, or those of the others.
template <Format format>
inline Quads bytes_of(Quads lanes, int part) {
  if constexpr (format == Format::kInt8) return kIsSigned ? lanes : lanes ^ kAdded<format>;
  const Quads numbers = part ? lanes >> 4 : lanes & 15;
  if constexpr (format == Format::kFp4) {
    constexpr int8_t kZero = kIsSigned ? 0 : kAdded<Format::kFp4>;
    constexpr int8_t kDoubles[16] = {kZero, kZero + 1, kZero + 2, kZero + 3, kZero + 4, kZero + 6, kZero + 8, kZero + 12,
                                     kZero, kZero - 1, kZero - 2, kZero - 3, kZero - 4, kZero - 6, kZero - 8, kZero - 12};
    return look_up(kDoubles, numbers);
  }
  return kIsSigned && format == Format::kInt4 ? numbers - 8 : numbers;
}

// y of R rows and one panel. The first rows of a unit ask memory for weights ahead.
template <Format format, int R>
void multiply(const Matmul& call, const Shape& shape, int64_t panel, const int32_t* order, const char* rows,
              int64_t column, bool is_first) {
  const int64_t per_row = shape.row_bytes();
  const char* weights = static_cast<const char*>(call.panels) + panel * shape.blocks * shape.steps * kStep;
  const char *head_at = rows, *digits = rows + shape.head_bytes();  // of the first row's chunk
  Floats totals[kVectors][R];
  for (int i = 0; i < kVectors * R; ++i) totals[i / R][i % R] = Floats{};
  for (int64_t block = 0; block < shape.blocks; ++block) {
    for (int64_t step = 0, upto; step < shape.steps; step = upto) {
      upto = least(shape.steps, step + kChunk / kInputs<format>);
      const Head* heads[R];
      Sum sums[kVectors][R][kDigits];
      UNROLLED for (int r = 0; r < R; ++r) {
        heads[r] = reinterpret_cast<const Head*>(head_at + r * per_row);
        UNROLLED for (int digit = 0; digit < kDigits; ++digit) {
          UNROLLED for (int v = 0; v < kVectors; ++v) sums[v][r][digit] = begin(heads[r]->begin[digit]);
        }
      }
      const char* at = digits;
      for (int64_t i = step; i < upto; ++i, weights += kStep, at += kInputs<format>) {
        for (int64_t line = 0; is_first && line < kStep; line += kLine) __builtin_prefetch(weights + kAhead + line);
        UNROLLED for (int part = 0; part < kParts<format>; ++part) {
          Quads bytes[kVectors];
          UNROLLED for (int v = 0; v < kVectors; ++v) {
            bytes[v] = bytes_of<format>(load<Quads>(weights + v * 4 * LANES), part);
          }
          UNROLLED for (int r = 0; r < R; ++r) {
            UNROLLED for (int digit = 0; digit < kDigits; ++digit) {
              const char* from = at + r * per_row + digit * shape.digit + part * kLanes;
              const Ints digits_of_all = load<int32_t>(from) - Ints{};
              UNROLLED for (int v = 0; v < kVectors; ++v) add(sums[v][r][digit], bytes[v], digits_of_all);
            }
          }
        }
      }
      UNROLLED for (int v = 0; v < kVectors; ++v) {
        const Floats scale =
            call.scale ? load_scales<kPanel>(call, call.scale, panel, block, shape.blocks, v * LANES) : splat(1.0f);
        UNROLLED for (int r = 0; r < R; ++r) {
          const Ints whole = together(sums[v][r][0], sums[v][r][1]);
          totals[v][r] += __builtin_convertvector(whole, Floats) * heads[r]->unit * scale;
        }
        if (!call.offset) continue;
        const Floats offset = load_scales<kPanel>(call, call.offset, panel, block, shape.blocks, v * LANES);
        UNROLLED for (int r = 0; r < R; ++r) totals[v][r] += offset * heads[r]->sum;
      }
      head_at += sizeof(Head), digits += kDigits * shape.digit;
    }
  }
  UNROLLED for (int r = 0; r < R; ++r) {
    UNROLLED for (int v = 0; v < kVectors; ++v) {
      const int64_t from = column + v * LANES, y = order[r] * call.d_out + from;
      Floats total = totals[v][r];
      if (call.add) total += load_part(call.add + y, call.d_out - from);
      store_part(call.y + y, total, call.d_out - from);
    }
  }
}

template <Format format, int R>
void multiply_rows(int64_t count, const Matmul& call, const Shape& shape, int64_t panel, const int32_t* order,
                   const char* rows, int64_t column, bool is_first) {
  if constexpr (R > 1) {
    if (count < R) return multiply_rows<format, R - 1>(count, call, shape, panel, order, rows, column, is_first);
  }
  multiply<format, R>(call, shape, panel, order, rows, column, is_first);
}

template <Format format>
void matmul(const Matmul& call, int64_t group, int64_t first, int64_t last, int64_t begin, int64_t end,
            const char* rows) {
  const Shape shape = Shape::of(call, kInputs<format>);
  const int64_t num_panels = (call.d_out + kPanel - 1) / kPanel, per_row = shape.row_bytes();
  for (int64_t panel = first; panel < last; ++panel) {
    int64_t tile;
    for (int64_t row = begin; row < end; row += tile) {
      const int64_t left = end - row, tiles = (left + kRows - 1) / kRows;
      tile = (left + tiles - 1) / tiles;  // tiles of like size
      multiply_rows<format, kRows>(tile, call, shape, group * num_panels + panel, call.order + row,
                                   rows + (row - begin) * per_row, panel * kPanel, row == begin);
    }
  }
}

template <Format format>
constexpr Tiles kTiles = {kPanel, kInputs<format>, 1, 48, row_bytes<format>, split<format>, matmul<format>};

}  // namespace bytes

// Has these kernels multiply whole numbers so.
inline void multiply_bytes(Kernels& kernels) {
  if constexpr (bytes::kHasInt8) kernels.tiles[static_cast<int>(Format::kInt8)] = &bytes::kTiles<Format::kInt8>;
  kernels.tiles[static_cast<int>(Format::kInt4)] = &bytes::kTiles<Format::kInt4>;
  kernels.tiles[static_cast<int>(Format::kUint4)] = &bytes::kTiles<Format::kUint4>;
  kernels.tiles[static_cast<int>(Format::kFp4)] = &bytes::kTiles<Format::kFp4>;
}

}  // namespace
}  // namespace specserve
