// What the kernels take and do, apart from who calls them (ffi.cc) and with which vectors they are compiled (isa_*.cc).
//
// A kernel is a pure function of its arguments and of a range of independent units of work, so that any number of
// threads may share a call without talking to each other. No unit's result depends on how many units there are, which
// is what makes a product's row independent of the other rows of the call.
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

namespace specserve {

inline __attribute__((always_inline)) int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
inline __attribute__((always_inline)) int64_t most(int64_t a, int64_t b) { return a < b ? b : a; }

// The last three are codes of 4 bits: whole numbers with 8 added, whole numbers from 0 on, and floats of 1 sign bit, 2 of
// exponent and 1 of mantissa (e2m1), which stand for twice their values, so that these are whole numbers too.
enum class Format : int { kFloat32 = 0, kBfloat16 = 1, kInt8 = 2, kInt4 = 3, kUint4 = 4, kFp4 = 5 };
constexpr int kFormats = 6;
constexpr int kBits[kFormats] = {32, 16, 8, 4, 4, 4};

// How scales and offsets lie in memory. Those of two levels, as Q4_K has them, lie by super-blocks of kTogether blocks,
// the last filled up with zeros: float16 factors of all outputs of a panel, then the bytes with a sign of each block's
// outputs that are multiplied by them. Such a product has 18 bits at most, so float32 holds it exactly.
enum class Scales : int { kFloat32, kFloat16, kTwoLevels };
constexpr int kTogether = 8;
constexpr int kSuperBytes = 2 + kTogether;  // of a super-block, for each output

// y[r] = x[r] @ weight[group[r]] (+ add[r]), summed in float32 over d_in in ascending order, whatever the number of rows.
// A weight is values * scale + offset, of which each block of inputs has one for each output.
//
// A weight lies in panels of `width` outputs: [d_out / width rounded up, d_in, width]. The float32 values of one input
// are in the order of the outputs. Of narrower values a lane of 32 bits holds several, so that shifts and masks widen
// them: outputs j and j + width / 2 (bfloat16), or j, j + width / 4, j + width / 2 and j + 3 width / 4 (int8), the first
// in the lowest bits. Where weights are multiplied by tiles, as those of 4 bits are everywhere, a lane holds inputs of one
// output: two (bfloat16), four (int8) or eight (4 bits: i in the lower and i + 4 in the upper half of a byte). The panel's
// tiles follow each other, and each block's inputs are filled up with zeros to whole tiles:
// [d_out / width rounded up, inputs / tile, width / 16, tile / lanes, 16, lanes].
struct Matmul {
  const float* x;        // [rows, d_in]
  const int32_t* group;  // [rows], which weight each row is multiplied by; null: the first. Out of range: y is 0
  const void* panels;    // [groups, d_out / width rounded up, d_in, width]
  const void* scale;     // [groups, d_out / width rounded up, d_in / block rounded up, width]; null: none. Of two levels:
                         // [groups, d_out / width rounded up, super-block, kSuperBytes, width] bytes
  const void* offset;    // like scale; null: none
  const float* add;      // [rows, d_out], added to the finished sums; null: nothing
  float* y;              // [rows, d_out]
  int64_t rows, groups, d_in, d_out, block;
  Scales scales;  // what scales and offsets are
  Format format;
  const int32_t* order;  // [rows], the rows sorted by group
  const int64_t* start;  // [groups + 1], where each group's rows begin in `order`
};

// Numbers of pages: as they are computed, rounded to bfloat16, or of 8 bits, whole or e4m3fn floats, with a float32 scale
// for each entry and KV head. A query sees of a new key what later ones will see of it in the pages.
enum class Stored : int { kFloat32, kBfloat16, kInt8, kFloat8 };
struct PageBfloat16 {
  uint16_t bits;
};
struct PageFloat8 {
  uint8_t bits;
};

template <class T>
constexpr float kLargest = 0.0f;  // of a dtype with scales; 0: it has none
template <>
constexpr float kLargest<int8_t> = 127.0f;
template <>
constexpr float kLargest<PageFloat8> = 448.0f;
// What a number as it is read is multiplied by: 8-bit floats are read as float16 numbers of the same digits.
template <class T>
constexpr float kUnit = 1.0f;
template <>
constexpr float kUnit<PageFloat8> = 256.0f;

#define SPECSERVE_INLINE inline __attribute__((always_inline))
SPECSERVE_INLINE uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof(bits));
  return bits;
}
SPECSERVE_INLINE float float_of(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof(x));
  return x;
}

SPECSERVE_INLINE float read(float from) { return from; }
SPECSERVE_INLINE float read(PageBfloat16 from) { return float_of(static_cast<uint32_t>(from.bits) << 16); }
SPECSERVE_INLINE float read(int8_t from) { return from; }
SPECSERVE_INLINE float read(PageFloat8 from) {
  const uint32_t digits = from.bits & 0x7f, sign = (from.bits & 0x80u) << 24;
  const float small = static_cast<float>(digits) * 0x1p-17f;
  return float_of(sign | (digits < 8 ? bits_of(small) : (digits << 20) + (112u << 23)));
}

// The nearest number of a dtype, the even one of two; the caller has multiplied by the inverse of the scale.
SPECSERVE_INLINE void keep(float x, float* to) { *to = x; }
SPECSERVE_INLINE void keep(float x, PageBfloat16* to) {
  const uint32_t bits = bits_of(x);
  const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16, quiet = bits >> 16 | 0x40;
  to->bits = static_cast<uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? quiet : rounded);
}
SPECSERVE_INLINE void keep(float x, int8_t* to) {
  const float whole = rintf(x);
  *to = static_cast<int8_t>(whole > 127.0f ? 127.0f : whole > -127.0f ? whole : whole <= -127.0f ? -127.0f : 0.0f);
}
SPECSERVE_INLINE void keep(float x, PageFloat8* to) {
  const uint32_t bits = bits_of(x), sign = bits >> 24 & 0x80;
  const float size = float_of(bits & 0x7fffffff), least = size < 448.0f ? size : 448.0f;
  const uint32_t least_bits = bits_of(least);
  const uint32_t normal = ((least_bits + 0x7ffff + (least_bits >> 20 & 1)) >> 20) - (120u << 3);
  const uint32_t small = static_cast<uint32_t>(rintf((least < 0x1p-6f ? least : 0.0f) * 512.0f));
  to->bits = static_cast<uint8_t>(sign | (size != size ? 0x7f : least < 0x1p-6f ? small : normal));
}

// The scale of an entry's numbers, as `pages.quantize` makes it; not a number where one of them is not.
template <class T>
SPECSERVE_INLINE float scale_of(const float* x, int64_t size) {
  float most = 0.0f;
  for (int64_t i = 0; i < size; ++i) {
    const float next = x[i] < 0.0f ? -x[i] : x[i];
    most = next > most || next != next ? next : most;
  }
  return (most < 1e-30f ? 1e-30f : most) * static_cast<float>(1.0 / kLargest<T>);
}

// Softmax attention of a few new tokens of each sequence over [committed pages | new keys] (see kernels/attention.py).
struct Attend {
  const float* q;             // [batch, n, head, head_dim]
  const float* k;             // [batch, m, kv_head, head_dim]
  const float* v;             // [batch, m, kv_head, v_dim]
  const uint8_t* mask;        // [batch or 1, n, m], 1 where the query sees the new key
  const void* k_pages;        // [page, kv_head, head_dim, page_size]
  const void* v_pages;        // [page, kv_head, page_size, v_dim]; null: the keys' first channels, transposed
  const float* k_scale;       // [page, kv_head, page_size] of 8-bit pages
  const float* v_scale;       // the same of their values
  const int32_t* page_table;  // [batch, width]
  const int32_t* lens;        // [batch], committed entries
  const int32_t* positions;   // [batch, m], of the new keys, the last n of which are the queries' own; read with a window
  const float* sinks;         // [head]; null: none
  float* out;                 // [batch, n, head, v_dim]
  int64_t batch, n, m, heads, kv_heads, head_dim, v_dim, num_pages, page_size, width, first, window;
  bool has_batched_mask;
  float scale, softcap;
  Stored stored;
};

// y = x / rms(x) * weight over rows of `size`; with `offset` the weight is a difference from 1.
struct Norm {
  const float* x;       // [rows, size]
  const float* weight;  // [size]
  float* y;             // [rows, size]
  int64_t size;
  float eps;
  bool offset;
};

enum class Activation : int { kSilu = 0, kGelu = 1, kClampedSwiglu = 2 };

// y = activation(gate) * up (see models/layers.py), gate and up in rows of `stride` floats.
struct Gate {
  const float* gate;
  const float* up;
  float* y;  // [rows, size]
  int64_t size, stride;
  Activation activation;
};

// Rotary embedding of the first 2 * half channels of each head; the others are copied. y may be x.
struct Rotate {
  const float* x;    // [rows, heads, head_dim]
  const float* cos;  // [rows, half]
  const float* sin;  // [rows, half]
  float* y;          // like x
  int64_t heads, head_dim, half;
  bool is_interleaved;
};

// The first index of each row's largest value; within the row also where there is no largest (NaN).
struct Argmax {
  const float* x;  // [rows, size]
  int32_t* index;  // [rows]
  int64_t size;
};

// Products of weights of one format by tiles of numbers, in place of `Kernels::matmul`.
struct Tiles {
  int64_t panel_width;
  int64_t inputs;     // of a tile
  int64_t chunk;      // rows that are multiplied together
  int64_t row_block;  // rows of a unit of `matmul`, a multiple of `chunk`
  int64_t (*row_bytes)(const Matmul&);  // of a row as tiles take it, a multiple of 64
  // Writes the rows order[begin:end], one chunk, as tiles take them. `matmul` may read up to 1,024 bytes behind the last.
  void (*split)(const Matmul&, int64_t begin, int64_t end, char* to);
  // The panels [first, last) as in `Kernels::matmul`, of rows that were split, each chunk where the one before it ends.
  void (*matmul)(const Matmul&, int64_t group, int64_t first, int64_t last, int64_t begin, int64_t end,
                 const char* rows);
  int64_t panels = 1;  // that several chunks of rows are best multiplied with at once
  const Tiles* of_less = nullptr;  // for blocks of fewer inputs than a tile has, which would fill it in part; null: these
};

struct Kernels {
  const char* name;
  int64_t panel_width;
  int64_t row_block;  // rows of a unit of `matmul`
  // Outputs [panel * width, (panel + 1) * width) of the rows order[begin:end], all of one group. Not of 4-bit weights.
  void (*matmul)(const Matmul&, int64_t group, int64_t panel, int64_t begin, int64_t end);
  // One sequence, one KV head, and the queries [begin, end) of the n.
  void (*attend)(const Attend&, int64_t sequence, int64_t kv_head, int64_t begin, int64_t end);
  // The rows [begin, end).
  void (*norm)(const Norm&, int64_t begin, int64_t end);
  void (*gate)(const Gate&, int64_t begin, int64_t end);
  void (*rotate)(const Rotate&, int64_t begin, int64_t end);
  void (*argmax)(const Argmax&, int64_t begin, int64_t end);
  const Tiles* tiles[kFormats] = {};  // by format; null: `matmul` multiplies it
};

// How weights of a format are multiplied that have blocks of so many inputs; null: by `Kernels::matmul`.
SPECSERVE_INLINE const Tiles* find_tiles(const Kernels& kernels, Format format, int64_t block) {
  const Tiles* tiles = kernels.tiles[static_cast<int>(format)];
  return tiles && tiles->of_less && block < tiles->inputs ? tiles->of_less : tiles;
}

// So many floats for the calling thread, until it asks again; what they hold is undefined.
float* scratch(int64_t floats);

const Kernels* kernels_avx512();
const Kernels* kernels_avx2();
const Kernels* kernels_neon();
// Have kernels, AVX-512's, AVX2's or NEON's, multiply weights by these instructions too, in the formats for which they are
// quicker. False where the compiler did not know them.
bool use_avxvnni(Kernels& kernels);
void use_vnni(Kernels& kernels);
void use_amx(Kernels& kernels);
void use_dotprod(Kernels& kernels);

}  // namespace specserve
